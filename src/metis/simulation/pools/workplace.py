"""What every pool works with, wherever its learners train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from metis.core.events import LearnerId
from metis.core.layers import Memory
from metis.core.model import Layout, Model
from metis.errors import ConfigError, InternalError, MetisError
from metis.learning import Engine, Examples, Learner, Trained, train_batched
from metis.learning.engine import SomeExamples
from metis.runs.folds import VALIDATION

Memories: TypeAlias = Mapping[int, Memory]
Measured: TypeAlias = tuple[dict[str, float], dict[LearnerId, dict[str, float]]]  # all examples; at each learner


@dataclass(frozen=True)
class Workplace:
    """What every pool needs: the engine, the learners and the held-out examples."""

    engine: Engine
    learners: Sequence[Learner]
    test: Examples | None
    layout: Layout | None = None  # of what travels, if it is not the engine's
    test_of_each: Sequence[NDArray[np.int64]] = ()  # of each learner, where the engine keeps parts for itself
    validation: Examples | None = None
    sites: Mapping[LearnerId, NDArray[np.int64]] = field(default_factory=dict)  # the test examples of some learners

    def train_batched(
        self, model: Model, learners: Sequence[int], tasks: Sequence[int], steps: int, rate: float
    ) -> list[Trained | Exception]:
        """Of each learner what came out, or why nothing did; none of them has a memory."""
        who = [self.learners[learner] for learner in learners]
        outcomes: list[Trained | Exception] = []
        try:
            results = train_batched(self.engine, who, model, tasks, steps, rate)
        except Exception:  # whatever it is, it comes out again with the learner that it belongs to
            results = [None] * len(who)
        for learner, task, trained in zip(learners, tasks, results, strict=True):
            try:
                if trained is None:
                    outcomes.append(self.train(model, learner, task, steps, None, rate))
                else:
                    outcomes.append(self.learners[learner].checked(self.engine.layout, trained, task))
            except Exception as problem:
                outcomes.append(problem)
        return outcomes

    def train(
        self,
        model: Model,
        learner: int,
        task: int,
        steps: int,
        memory: Memory | None,
        rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Trained:
        who = self.learners[learner]
        try:
            return who.train(self.engine, model, task, steps, memory, rate, batches_per_step)
        except MetisError:
            raise
        except Exception as problem:  # of the user's network or data
            raise ConfigError(
                f"learner '{who.name}' cannot train on its {len(who.indices)} examples in batches of "
                f"{who.batch_size}: {type(problem).__name__}: {problem}"
            ) from problem

    def evaluate(self, model: Model, memories: Memories | None = None) -> Measured:
        """On the held-out examples; those of each learner with what it keeps for itself, if memories are given."""
        return self._together(model, memories), self._at_learners(model, memories)

    def _at_learners(self, model: Model, memories: Memories | None) -> dict[LearnerId, dict[str, float]]:
        index = {learner.name: number for number, learner in enumerate(self.learners)}
        found = {}
        for name, own in self.sites.items():
            assert self.test is not None
            memory = None if memories is None else memories.get(index.get(name, -1), {})
            found[name] = self.engine.evaluate(model.network, SomeExamples(self.test, own), memory)
        return found

    def _together(self, model: Model, memories: Memories | None) -> dict[str, float]:
        held = {"test": self.test, "validation": self.validation}
        if self.test is None:
            raise InternalError("there are no held-out examples to evaluate on")
        found: dict[str, float] = {}
        for kind, examples in held.items():
            if examples is None:
                continue
            try:
                if memories is None:
                    values = self.engine.evaluate(model.network, examples)
                else:
                    everything = np.arange(len(examples))
                    of_each = self.test_of_each if kind == "test" else [everything] * len(self.learners)
                    silos = [(indices, memories.get(index, {})) for index, indices in enumerate(of_each)]
                    values = cast("Any", self.engine).evaluate_silos(model.network, examples, silos)
            except MetisError:
                raise
            except Exception as problem:
                raise ConfigError(
                    f"the community model cannot be evaluated on the {len(examples)} {kind} examples: "
                    f"{type(problem).__name__}: {problem}"
                ) from problem
            found |= values if kind == "test" else {VALIDATION + name: value for name, value in values.items()}
        return found
