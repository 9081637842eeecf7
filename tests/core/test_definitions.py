"""Definitions that do not keep their contract are refused in a sentence that names them, before or as a run starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from core.play import Play
from metis.core.contribution import dataset_size
from metis.core.layers import LAYERS, FedNova, Layer
from metis.core.mixing import FullPass
from metis.core.policies import sync_fedavg
from metis.core.policy import Policy
from metis.core.protocols import BaseProtocol
from metis.core.solvers import Solver
from metis.errors import ArgumentError, DefinitionError, InternalError


def field_like_a_hook() -> None:
    @dataclass(frozen=True)
    class Warmup(Layer):
        limit: int = 3  # type: ignore[assignment]


def field_like_a_name() -> None:
    @dataclass(frozen=True)
    class Warmup(Layer):
        order: int = 3  # type: ignore[misc]


def misspelt_hook() -> None:
    class Warmup(Layer):
        def scale_rates(self, moment: Any) -> float:
            return 1.0


def unknown_need() -> None:
    class Warmup(Layer, needs={"round": "counts rounds"}):  # type: ignore[dict-item]
        pass


def taken_key() -> None:
    class Warmup(Layer, key="cap"):
        pass


def unowned_wire() -> None:
    class Packed(Layer):
        def wire_bytes(self, layout: Any) -> int:
            return 1


@pytest.mark.parametrize(
    ("define", "sentence"),
    [
        (field_like_a_hook, "Warmup has a field 'limit', which is the name of a hook"),
        (field_like_a_name, "Warmup has a field 'order', which is the name of a hook"),
        (misspelt_hook, "Warmup has a method 'scale_rates'; did you mean the hook 'scale_rate'?"),
        (unknown_need, "Warmup needs or takes 'round'; choose one of rounds, period"),
        (taken_key, "two definitions of the layer 'cap': metis.core.layers.cap.Cap and "),
        (unowned_wire, "Packed encodes updates but does not own the wire"),
    ],
)
def test_a_layer_that_would_be_ignored_is_refused_where_it_is_defined(
    define: Callable[[], None], sentence: str
) -> None:
    """Nothing of it is registered."""
    before = list(LAYERS.registered)
    with pytest.raises(DefinitionError, match=sentence.replace("?", r"\?")):
        define()
    assert list(LAYERS.registered) == before


class Half(BaseProtocol):
    """Has no tasks."""

    def ready(self, roster: Any, now: float) -> bool:
        return False


class Plain(Half):
    """Has no decorator."""

    def tasks(self, who: Any, roster: Any, moment: Any, measure: Any) -> dict[str, Any]:
        return {}


@dataclass
class Asleep(Half):
    """Asks to be woken and is not ready then."""

    woken_at: float = 1.0

    def tasks(self, who: Any, roster: Any, moment: Any, measure: Any) -> dict[str, Any]:
        return {}

    @property
    def deadline(self) -> float:
        return self.woken_at


class Method(Asleep):
    def deadline(self) -> float:  # type: ignore[override]
        return math.inf


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        (None, r"the protocol NoneType of policy 'mine' has no method ready\(roster, now\)"),
        (Half, r"the protocol of policy 'mine' is the class Half; give an object: Half\(\)"),
        (Half(), r"the protocol Half of policy 'mine' has no method tasks\(who, roster, moment, measure\)"),
        (Plain(), "the protocol Plain of policy 'mine' must be a @dataclass, for its settings"),
        (Method(), "deadline of Method must be a number of seconds"),
    ],
)
def test_a_policy_needs_a_whole_protocol(protocol: Any, sentence: str) -> None:
    """Known when the policy is made."""
    with pytest.raises(DefinitionError, match=sentence):
        Policy("mine", protocol, dataset_size, FullPass)


def test_layers_are_objects() -> None:
    """A class in their place is a slip that every user makes once."""
    with pytest.raises(ArgumentError, match=r"with_layers takes layers such as metis.FedNova\(\), not <class"):
        sync_fedavg().with_layers(FedNova)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="which is not a layer"):
        Policy("mine", sync_fedavg().protocol, dataset_size, FullPass, (3,))  # type: ignore[arg-type]


def test_a_protocol_that_is_not_ready_at_its_own_deadline_is_refused() -> None:
    """It would be woken at the same moment for ever."""
    play = Play(Policy("mine", Asleep(), dataset_size, FullPass), cpu=0.3)
    with pytest.raises(DefinitionError, match="Asleep asked to be woken at 1 s; that moment has come"):
        play.run()


def test_tasks_are_budgets() -> None:
    """Numbers in their place are a slip too."""

    @dataclass
    class Numbers(BaseProtocol):
        def ready(self, roster: Any, now: float) -> bool:
            return bool(roster.waiting)

        def tasks(self, who: Any, roster: Any, moment: Any, measure: Any) -> Any:
            return dict.fromkeys([one.learner for one in who], 5)

    play = Play(Policy("mine", Numbers(), dataset_size, FullPass), cpu=0.3)
    with pytest.raises(
        DefinitionError, match=r"tasks of Numbers returned 5 for learner 'cpu'; it must be a Budget, such"
    ):
        play.run()


def test_a_solver_needs_a_step() -> None:
    """Known when a policy is put together with it."""

    class Empty(Solver):
        pass

    with pytest.raises(DefinitionError, match=r"the solver Empty has no method step\(weights, gradient"):
        sync_fedavg().for_solver(Empty())
    with pytest.raises(InternalError, match="Empty has no step"):
        Empty().step(None, None, None, None)
