"""SCAFFOLD inside a silo (Karimireddy et al. 2020): an engine whose models carry control variates.

A model that comes is the community's network and behind it the server's variate c; one that goes out is the local
network and behind it the learner's own c_k. The learner remembers its c_k; one that has none yet, or lost it with its
disk, starts at zero. BatchNorm's statistics have no gradient and are not corrected.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from metis.core.model import Layout, Model, Vector
from metis.errors import ConfigError
from metis.learning.engine import Batch, Engine, Examples, Memory, Trained
from metis.learning.solvers import Scaffold, Solver
from metis.learning.torch.parallel import Part

CONTROL = "control"  # in a learner's memory: its own c_k


def engine_for(engine: Engine, solver: Solver) -> Engine:
    """The engine as this solver needs it."""
    return ControlledEngine(engine) if isinstance(solver, Scaffold) else engine


class ControlledEngine:
    """Another engine, for models that carry a control variate for each trainable parameter."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        everything = sum(spec.size for spec in engine.layout.tensors if spec.role == "parameter")
        self._trainable = int(getattr(engine, "trainable", everything))  # they lie first
        self._layout = engine.layout.with_controls(self._trainable)

    def __getattr__(self, name: str) -> Any:
        # What only some engines have: device, metrics, module, load.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._engine, name)

    @property
    def ranks(self) -> Any:
        """The processes that train with this one, as one."""
        return self._engine.ranks  # type: ignore[attr-defined]

    @ranks.setter
    def ranks(self, ranks: Any) -> None:
        self._engine.ranks = ranks  # type: ignore[attr-defined]

    def on(self, device: str) -> ControlledEngine:
        """The same engine on another device."""
        return ControlledEngine(self._engine.on(device))  # type: ignore[attr-defined]

    @property
    def layout(self) -> Layout:
        return self._layout

    def initial_model(self, seed: int) -> Model:
        return self._join(self._engine.initial_model(seed), np.zeros(self._trainable, np.float32))

    def train(
        self,
        community_model: Model,
        batches: Iterable[Batch | Part],
        solver: Solver,
        memory: Memory | None = None,
        seed: int = 0,
    ) -> Trained:
        if not isinstance(solver, Scaffold):
            raise ConfigError(
                f"{type(solver).__name__} was given a model with control variates; "
                "either all learners of a federation train with scaffold or none"
            )
        own = (memory or {}).get(CONTROL)
        if own is None or own.shape != (self._trainable,):
            own = np.zeros(self._trainable, np.float32)
        corrected = solver.corrected(community_model.control - own)
        trained = self._engine.train(community_model.network, batches, corrected, memory, seed)
        model = self._join(trained.model, corrected.mean_gradient())
        return replace(trained, model=model, memory={**trained.memory, CONTROL: model.control})

    def evaluate(self, model: Model, examples: Examples, memory: Memory | None = None) -> dict[str, float]:
        return self._engine.evaluate(model.network, examples, memory)

    def _join(self, network: Model, control: Vector) -> Model:
        return Model(self._layout, np.concatenate((network.vector, control)), network.counters)
