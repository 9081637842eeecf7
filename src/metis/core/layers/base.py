"""What can be put on top of a policy: one small contract, each layer one frozen dataclass in one file.

A layer overrides the hooks that it needs; the others leave things as they are. Layers are applied in ascending `order`:
from the mixing outwards to the wire. A layer has no state. What must be remembered is kept by the community that it
wraps (`arrays`), or by the learner (`Memory`, which never leaves its silo).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from numpy.typing import NDArray

from metis.core.events import Budget, LearnerId
from metis.core.mixing import Mixing
from metis.core.model import Layout, Model
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.errors import DefinitionError, InternalError
from metis.registry import Registry, check_settings, misspelt

if TYPE_CHECKING:
    from metis.core.protocols import CommunicationProtocol
    from metis.core.solvers import Solver, SolverFacts

Memory: TypeAlias = dict[str, NDArray[Any]]  # what one learner keeps between tasks; never leaves its silo

# What a policy offers to a layer, and what a layer may claim for itself:
#   rounds   the protocol has rounds             period  its rounds last as long as a pacing says
#   bound    its rounds can be made longer
#   average  rounds are mixed by a plain average models  the controller sees each local model
#   shares   each learner's model has a weight    wire    how an update is encoded
#   layout   which tensors a model has           cohort  several local models are mixed at a time
#   mixture  what models are mixed to is seen    spread  how far local models went is known
#   weights  what a model counts is known before it is trained
#   everybody  all who are present take part    sums    sums of local models are enough for the mixing
#   steps    how many steps a task has is known before it is trained
#   variates  where control variates are kept or summed up
#   linear   the mixing only adds up local models, each times a number
Need: TypeAlias = Literal[
    "rounds", "period", "bound", "average", "cohort", "shares", "models", "wire", "layout", "mixture", "spread",
    "weights", "everybody", "sums", "steps", "variates", "linear",
]  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A task as it reaches local training."""

    base: Model  # the community model to start from
    solver: Solver
    memory: Memory


@dataclass(frozen=True)
class Outgoing:
    """An update as it leaves local training."""

    model: Model  # as it arrives at the controller
    memory: Memory  # for the next task
    payload: bytes = b""  # what travels, if it is not the model itself
    notes: Mapping[str, float] = field(default_factory=dict)  # for the trace and the tables; information only


class Layer:
    """Subclass it as `@dataclass(frozen=True) class X(Layer, key="x", order=60)`; the class registers itself.

    `key` is the name of its table inside a policy's table of a file. Where several layers share a key, each has a
    `choice`, and `selector` is the key that chooses among them. `needs` maps what the layer needs of a policy to the
    end of the sentence "KEY ..." that refuses a policy without it; `takes` is what no other layer may need then.
    """

    key: ClassVar[str]
    order: ClassVar[int]
    choice: ClassVar[str] = ""
    selector: ClassVar[str] = ""
    needs: ClassVar[Mapping[Need, str]] = {}
    takes: ClassVar[frozenset[Need]] = frozenset()
    replaces: ClassVar[frozenset[str]] = frozenset()  # parameters of a policy that mean nothing with this layer
    displaces: ClassVar[frozenset[str]] = frozenset()  # keys of a policy's default layers that give way to this one
    leaves_idle: ClassVar[bool] = False  # learners may idle although the protocol fills the period
    in_files: ClassVar[bool] = True  # False: put on by something else, such as a solver

    def __init_subclass__(
        cls,
        key: str = "",
        order: int = 0,
        choice: str = "",
        needs: Mapping[Need, str] | None = None,
        takes: Iterable[Need] | None = None,
        in_files: bool = True,
    ) -> None:
        super().__init_subclass__()
        _check_definition(cls, needs or {}, takes or ())
        if needs is not None:
            cls.needs = needs
        if takes is not None:
            cls.takes = frozenset(takes)
        if key:
            cls.key, cls.order, cls.choice, cls.in_files = key, order, choice, in_files
            LAYERS.add(key, LAYERS[key] if key in LAYERS.registered else LayerKind(key)).add(cls)

    def __post_init__(self) -> None:
        check_settings(self, self.key)

    @classmethod
    def definition(cls) -> Callable[..., Any]:
        """Whose parameters are the keys of its table in a file."""
        return cls

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Layer:
        """The layer that a table of a file describes."""
        return cls(**table)

    # --- composition: once, before a run starts -------------------------------------------------

    def relabel(self, label: str) -> str:
        """How tables and legends call a policy with this layer."""
        return label

    def adapt_solver(self, solver: Solver) -> Solver:
        """The local solver as this layer wants it."""
        return solver

    def for_solver(self, facts: SolverFacts) -> Layer:
        """This layer with what it must know of the local solver."""
        return self

    def for_exchange(self, size: int) -> Layer:
        """This layer with what it must know of an exchange of models: its bytes, both ways; 0 if they are not known."""
        return self

    def set_protocol(self, protocol: CommunicationProtocol) -> CommunicationProtocol:
        """The protocol as this layer wants it."""
        return protocol

    def set_mixing(self, mixing: Mixing) -> Mixing:
        """Another mixing in place of the policy's."""
        return mixing

    def wrap(self, mixing: Mixing) -> Mixing:
        """The mixing with something around it."""
        return mixing

    def extend_layout(self, layout: Layout, trainable: int) -> Layout:
        """The layout of what travels; additional tensors lie behind the network's own and start at zero.

        `trainable` is how many numbers at the front of the vector are trained.
        """
        return layout

    # --- each round, at the controller; pure ----------------------------------------------------

    def choose(self, waiting: Sequence[LearnerRecord], moment: Moment) -> Sequence[LearnerRecord]:
        """Who of the waiting learners takes part in the round that begins."""
        return waiting

    def limit(self, budgets: dict[LearnerId, Budget], roster: Roster, moment: Moment) -> dict[LearnerId, Budget]:
        """How long they train."""
        return budgets

    def scale_rate(self, moment: Moment) -> float:
        """A factor of the learners' learning rate."""
        return 1.0

    # --- each task, at the learner --------------------------------------------------------------

    def prepare(self, work: Work) -> Work:
        """What local training gets; layers are asked from the wire inwards."""
        return work

    def encode(self, out: Outgoing, received: Work, prepared: Work) -> Outgoing:
        """What leaves, given what `prepare` received and returned; layers are asked from the mixing outwards."""
        return out

    def sent(self, arrives: Model, memory: Memory) -> Memory:
        """What the learner remembers, once it is known what arrives at the controller."""
        return memory

    # --- the wire; at most one layer owns it ----------------------------------------------------

    def wire_bytes(self, layout: Layout) -> int:
        """Bytes of every update of this layout."""
        raise InternalError(f"{self.key} does not own the wire")

    def decode(self, payload: bytes | memoryview, base: Model) -> Model:
        """The local model of a payload; a ValueError if `encode` cannot have made it."""
        raise InternalError(f"{self.key} does not own the wire")


def _check_definition(layer: type[Layer], needs: Mapping[Need, str], takes: Iterable[Need]) -> None:
    """Refuse what would otherwise be ignored without a word."""
    name = layer.__name__
    hooks = {hook for hook in (*vars(Layer), *Layer.__annotations__) if not hook.startswith("_")}
    for need in (*needs, *takes):
        if need not in get_args(Need):
            raise DefinitionError(f"{name} needs or takes '{need}'; choose one of {', '.join(get_args(Need))}")
    for field_name, annotation in vars(layer).get("__annotations__", {}).items():
        if field_name in hooks and "ClassVar" not in str(annotation):
            raise DefinitionError(f"{name} has a field '{field_name}', which is the name of a hook; call it otherwise")
    own = [method for method, value in vars(layer).items() if callable(value) and not method.startswith("_")]
    for method in own:
        if method not in hooks and (meant := misspelt(method, hooks)) is not None:
            raise DefinitionError(f"{name} has a method '{method}'; did you mean the hook '{meant}'?")
    if {"wire_bytes", "decode"} & set(own) and "wire" not in takes:
        raise DefinitionError(f"{name} encodes updates but does not own the wire; declare takes={{'wire'}}")


class LayerKind:
    """The layers that share a key; one without a choice is alone."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.classes: dict[str, type[Layer]] = {}

    def add(self, layer: type[Layer]) -> None:
        """A key is taken once; what is defined again, as in a notebook, has the same home."""
        known = self.classes.get(layer.choice)
        homes = [f"{one.__module__}.{one.__qualname__}" for one in (known or layer, layer)]
        if homes[0] != homes[1]:
            raise DefinitionError(f"two definitions of the layer '{self.key}': {homes[0]} and {homes[1]}")
        self.classes[layer.choice] = layer

    @property
    def selector(self) -> str:
        """The key of a table that chooses the layer; empty if there is no choice."""
        return next(iter(self.classes.values())).selector

    @property
    def in_files(self) -> bool:
        return next(iter(self.classes.values())).in_files


LAYERS: Registry[LayerKind] = Registry("layer", "metis.layers")
