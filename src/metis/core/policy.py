"""A policy: WHEN to mix, HOW MUCH a local model counts, HOW models are mixed, and the layers on top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import reduce

import numpy as np

from metis.core.contribution import ContributionValue, dataset_size, discounted_size
from metis.core.events import Budget, LearnerId
from metis.core.layers.base import LAYERS, Layer, Need
from metis.core.layers.ckks import HomomorphicEncryption, is_linear
from metis.core.layers.differences import Differences
from metis.core.layers.fednova import FedNova
from metis.core.layers.secure_sum import SecureSum, masked_twin
from metis.core.mixing import Community, Mixing, ModelStore
from metis.core.mixing.community import averages_rounds, mixes_cohorts, weighs_learners
from metis.core.model import Layout, Model
from metis.core.protocols.protocol import CommunicationProtocol
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.solvers import Solver
from metis.errors import ArgumentError, DefinitionError
from metis.registry import Registry


@dataclass(frozen=True)
class Baseline:
    """Nobody is federated: one learner trains, with the data of all or with its own."""

    pooled: bool = False
    learner: LearnerId | None = None  # whose data and machine; None: that with the most examples


@dataclass(frozen=True)
class Policy:
    """Three independent choices and a tuple of layers, which are kept in ascending order.

    - `name`: as files call it.
    - `protocol`: when learners train and for how long; settings only, each run works on a fresh copy.
    - `contribution`: what a local model counts.
    - `mixing`: how local models become the community model.
    - `layers`: what is put on top; rather use `with_layers`.
    - `label`: how tables and legends call it.
    - `defaults`: keys of layers that give way to others of the same key.
    - `baseline`: of simulations only: what a federation is compared with.
    """

    name: str
    protocol: CommunicationProtocol
    contribution: ContributionValue
    mixing: Mixing
    layers: tuple[Layer, ...] = ()
    label: str = ""
    defaults: frozenset[str] = frozenset()
    baseline: Baseline | None = None

    def __post_init__(self) -> None:
        self._check_parts()
        layers = tuple(sorted(self.layers, key=lambda layer: layer.order))
        object.__setattr__(self, "layers", layers)
        self._check()
        if not self.label:
            label = reduce(lambda so_far, layer: layer.relabel(so_far), layers, self.name)
            object.__setattr__(self, "label", label)

    def _check_parts(self) -> None:
        """What a user's package gives must be there and callable: better said now than in the middle of a run."""
        given: object = self.protocol
        if isinstance(given, type):
            name = given.__name__
            raise DefinitionError(f"the protocol of policy '{self.name}' is the class {name}; give an object: {name}()")
        protocol = type(given).__name__
        for method, arguments in (("ready", "roster, now"), ("tasks", "who, roster, moment, measure")):
            if not callable(getattr(given, method, None)):
                raise DefinitionError(
                    f"the protocol {protocol} of policy '{self.name}' has no method {method}({arguments})"
                )
        if not isinstance(getattr(given, "deadline", None), (int, float)):
            raise DefinitionError(f"deadline of {protocol} must be a number of seconds, math.inf for never: a property")
        if not is_dataclass(given):
            raise DefinitionError(
                f"the protocol {protocol} of policy '{self.name}' must be a @dataclass, for its settings"
            )
        for layer in self.layers:
            if not isinstance(layer, Layer):
                raise ArgumentError(f"layers of '{self.name}' has {layer!r}, which is not a layer", "layers")

    def with_layers(self, *layers: Layer) -> Policy:
        """The same policy with these layers on top, in place of its defaults, and its label extended by theirs."""
        for layer in layers:
            if not isinstance(layer, Layer):
                raise ArgumentError(f"with_layers takes layers such as metis.FedNova(), not {layer!r}", "layers")
        added = sorted(layers, key=lambda layer: layer.order)
        label = reduce(lambda so_far, layer: layer.relabel(so_far), added, self.label)
        given = frozenset[str]().union(*({layer.key} | layer.displaces for layer in layers)) & self.defaults
        kept = tuple(layer for layer in self.layers if layer.key not in given)
        return replace(self, layers=(*kept, *layers), label=label, defaults=self.defaults - given)

    def _check(self) -> None:
        """Each layer's needs must be offered by the policy and not be taken by another layer."""
        # In a window each learner has weighed what it hands in before anybody knows who else does.
        windowed = not self.protocol.has_rounds and self.secure_sum is not None
        offered: Mapping[Need, bool] = {
            "rounds": self.protocol.has_rounds,
            "period": self.protocol.has_period,
            "bound": self.protocol.has_period,
            "average": averages_rounds(self.mixing),
            "cohort": mixes_cohorts(self.mixing),
            "shares": weighs_learners(self.mixing) and not windowed,
            # A window is opened when its updates are there, and what they count is public then.
            "weights": self.contribution in (dataset_size, discounted_size) or not self.protocol.has_rounds,
            "sums": masked_twin(self.mixing) is not None,
            "steps": not self.protocol.by_deadline,
            "linear": is_linear(self.mixing),
            "variates": not windowed,
            "models": True,
            "mixture": True,
            "spread": True,
            "everybody": True,
            "wire": True,
            "layout": True,
        }
        keys = [layer.key for layer in self.layers]
        for layer in self.layers:
            if keys.count(layer.key) > 1:
                raise ArgumentError(f"{layer.key} is given twice; keep one of them", layer.key)
            for need in sorted(layer.needs.keys() | layer.takes):
                takers = [other for other in self.layers if other is not layer and need in other.takes]
                if layer.key in self.defaults:  # the policy's own: what was put on top is refused, not this
                    takers = [other for other in takers if other.key in self.defaults]
                elif own := [taker for taker in takers if taker.key in self.defaults]:
                    raise ArgumentError(f"{layer.key} does not go with {own[0].key}, which {self.name} has", layer.key)
                if takers and need in layer.takes:
                    raise ArgumentError(
                        f"{layer.key} is given together with {takers[0].key}; keep one of them", layer.key
                    )
                if takers or not offered[need]:
                    other = takers[0].key if takers else ""
                    otherwise = layer.needs.get(need, f"takes the {need}, and {{policy}} has none")
                    raise ArgumentError(f"{layer.key} {otherwise.format(policy=self.name, other=other)}", layer.key)

    # --- before a run ---------------------------------------------------------------------------

    def for_solver(self, solver: Solver) -> tuple[Policy, Solver]:
        """The policy and the solver as they need each other."""
        given: object = solver
        if type(solver).step is Solver.step:
            raise DefinitionError(
                f"the solver {type(solver).__name__} has no method step(weights, gradient, memory, community)"
            )
        if not is_dataclass(given):
            raise DefinitionError(f"the solver {type(solver).__name__} must be a @dataclass, for its settings")
        brought = [layer for layer in solver.layers if layer.key not in {own.key for own in self.layers}]
        policy = replace(self, layers=(*self.layers, *brought))
        solver = reduce(lambda so_far, layer: layer.adapt_solver(so_far), policy.layers, solver)
        return replace(policy, layers=tuple(layer.for_solver(solver.facts) for layer in policy.layers)), solver

    @property
    def fills_the_period(self) -> bool:
        """Is every learner at work all the time? Then the paper charges energy for all of it."""
        return self.protocol.fills_the_period and not any(layer.leaves_idle for layer in self.layers)

    def for_exchange(self, size: int) -> Policy:
        """The policy of a run in which an update request moves so many bytes, both ways; 0 if it is not known."""
        return replace(self, layers=tuple(layer.for_exchange(size) for layer in self.layers))

    def start_protocol(self) -> CommunicationProtocol:
        """The protocol of one run."""
        changed = reduce(lambda so_far, layer: layer.set_protocol(so_far), self.layers, self.protocol)
        return replace(changed)  # type: ignore[type-var]  # a fresh copy: settings without state

    def start_community(self, initial_model: Model, store: ModelStore) -> Community:
        """The mixing of one run, with all that is put on top of it."""
        mixing = reduce(lambda so_far, layer: layer.set_mixing(so_far), self.layers, self.mixing)
        return reduce(lambda so_far, layer: layer.wrap(so_far), self.layers, mixing)(initial_model, store)

    def extend_layout(self, layout: Layout, trainable: int) -> Layout:
        """The layout of what travels; `trainable` numbers at the front are trained."""
        return reduce(lambda so_far, layer: layer.extend_layout(so_far, trainable), self.layers, layout)

    def extend_model(self, network: Model, trainable: int) -> Model:
        """A network as it travels at the start; what layers add is zero."""
        layout = self.extend_layout(network.layout, trainable)
        if layout is network.layout:
            return network
        vector = np.zeros(layout.size, np.float32)
        vector[: network.layout.size] = network.vector
        return Model(layout, vector, network.counters)

    @property
    def learner_layers(self) -> tuple[Layer, ...]:
        """The layers that take part in local training, in ascending order."""
        hooks = ("prepare", "encode", "sent")
        return tuple(
            layer
            for layer in self.layers
            if any(getattr(type(layer), hook) is not getattr(Layer, hook) for hook in hooks)
        )

    @property
    def wire(self) -> Layer | None:
        """The layer that encodes updates, if models do not travel as they are."""
        return next((layer for layer in self.layers if "wire" in layer.takes), None)

    def update_bytes(self, layout: Layout) -> int | None:
        """Bytes of every update of this layout; None if models travel as they are."""
        if self.secure_sum is not None:
            return self.secure_sum.update_bytes(layout, whole=self.sums_whole_models)
        if self.ckks is not None:
            return self.ckks.update_bytes(layout)
        return None if self.wire is None else self.wire.wire_bytes(layout)

    def model_bytes(self, layout: Layout) -> int | None:
        """Bytes of a community model of this layout as it travels; None if it travels as it is."""
        return None if self.ckks is None else self.ckks.model_bytes(layout)

    @property
    def ckks(self) -> HomomorphicEncryption | None:
        """The layer that encrypts models, if the controller cannot read them."""
        return next((layer for layer in self.layers if isinstance(layer, HomomorphicEncryption)), None)

    @property
    def hides_models(self) -> bool:
        """Whether the controller cannot read local models."""
        return self.secure_sum is not None or self.ckks is not None

    def exchange_bytes(self, model: Model) -> int:
        """Bytes that an update request moves: the community model down, and the update up."""
        update = self.update_bytes(model.layout) if model.nbytes else None
        return model.nbytes + (model.nbytes if update is None else update)

    @property
    def secure_sum(self) -> SecureSum | None:
        """The layer that masks updates, if the controller sees sums only."""
        return next((layer for layer in self.layers if isinstance(layer, SecureSum)), None)

    @property
    def sums_whole_models(self) -> bool:
        """Whether its windows are sums of everybody's whole latest models, and not of differences."""
        windowed = self.secure_sum is not None and not self.protocol.has_rounds
        return windowed and weighs_learners(self.mixing)

    def masked_factors(
        self, values: Mapping[LearnerId, float], steps: Mapping[LearnerId, int]
    ) -> Mapping[LearnerId, float]:
        """By how much each learner of a masked round lengthens its own delta."""
        scaling = next((layer for layer in self.layers if isinstance(layer, (FedNova, Differences))), None)
        return dict.fromkeys(values, 1.0) if scaling is None else scaling.factors(values, steps)

    @property
    def chooses(self) -> bool:
        """Whether not everybody takes part in a round."""
        return any(type(layer).choose is not Layer.choose for layer in self.layers)

    # --- each round -----------------------------------------------------------------------------

    def choose(self, waiting: Sequence[LearnerRecord], moment: Moment) -> Sequence[LearnerRecord]:
        """Who of the waiting learners takes part in the round that begins."""
        return reduce(lambda so_far, layer: layer.choose(so_far, moment), self.layers, waiting)

    def limit(self, budgets: dict[LearnerId, Budget], roster: Roster, moment: Moment) -> dict[LearnerId, Budget]:
        """How long they train."""
        return reduce(lambda so_far, layer: layer.limit(so_far, roster, moment), self.layers, budgets)

    def scale_rate(self, moment: Moment) -> float:
        """A factor of the learners' learning rate."""
        return reduce(lambda so_far, layer: so_far * layer.scale_rate(moment), self.layers, 1.0)

    @property
    def identity(self) -> str:
        """All that decides what a run does, as text; equal for equal policies of one process, whatever their labels."""
        return repr((self.name, self.protocol, self.contribution, self.mixing, self.layers))


POLICIES: Registry[Callable[..., Policy]] = Registry("policy", "metis.policies")

__all__ = ["LAYERS", "POLICIES", "Baseline", "Policy"]
