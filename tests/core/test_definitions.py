"""Definitions that do not keep their contract are refused in a sentence that names them, before or as a run starts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from core.play import Play
from metis.core.contribution import dataset_size
from metis.core.events import Budget
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


@dataclass
class Whatever(BaseProtocol):
    """Gives everybody what a test says."""

    given: Any = None

    def ready(self, roster: Any, now: float) -> bool:
        return bool(roster.waiting)

    def tasks(self, who: Any, roster: Any, moment: Any, measure: Any) -> Any:
        return self.given


@dataclass
class Rejoined(Whatever):
    """Gives it to those who come back."""

    has_rounds = True

    def ready(self, roster: Any, now: float) -> bool:
        return len(roster.waiting) == roster.available_count

    def tasks(self, who: Any, roster: Any, moment: Any, measure: Any) -> Any:
        return {one.learner: Budget(100) for one in who}

    def joining(self, back: Any, now: float) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (None, "None; it must return a dict with a Budget for each learner"),
        ({"cpu": 5}, r"5 for learner 'cpu'; it must be a Budget, such as Budget\(steps=10\)"),
        ({"cpu": Budget()}, r"Budget\(.*\) for learner 'cpu'; such a task would not end"),
        ({"cpu": Budget(0)}, r"Budget\(.*\) for learner 'cpu'; its steps must be a whole number, 1 or more"),
        ({"cpu": Budget(2.5)}, r"Budget\(.*\) for learner 'cpu'; its steps must be a whole number"),  # type: ignore[arg-type]
        ({"bob": Budget(5)}, "a budget for learner 'bob', which is not in the federation"),
    ],
)
def test_tasks_are_a_budget_for_each_learner(given: Any, sentence: str) -> None:
    """Whatever else a protocol returns is refused before anybody gets a task; so where learners come back."""
    play = Play(Policy("mine", Whatever(given), dataset_size, FullPass), cpu=0.3)
    with pytest.raises(DefinitionError, match=f"^tasks of Whatever returned {sentence}"):
        play.run()
    play = Play(Policy("mine", Rejoined(given), dataset_size, FullPass), cpu=0.3, gpu=0.03)
    play.leave("cpu", at=1.0)
    play.join("cpu", at=2.0)
    with pytest.raises(DefinitionError, match=f"^joining of Rejoined returned {sentence}"):
        play.run()


def test_a_task_is_for_a_learner_that_waits() -> None:
    """One that trains already cannot have a second."""
    play = Play(Policy("mine", Whatever({"cpu": Budget(5)}), dataset_size, FullPass), cpu=0.3, gpu=0.03)
    play.leave("gpu", at=0.1)
    play.join("gpu", at=0.2)
    with pytest.raises(DefinitionError, match="returned a budget for learner 'cpu', which is not waiting for a task"):
        play.run()


def no_weight(request: Any, learner: Any, based_on: Any, current: Any) -> Any:
    return None


@pytest.mark.parametrize(("weighting", "called"), [(no_weight, "no_weight of"), (functools.partial(no_weight), "of")])
def test_a_weighting_returns_a_number(weighting: Any, called: str) -> None:
    """A forgotten return is named."""
    play = Play(Policy("mine", sync_fedavg().protocol, weighting, FullPass), cpu=0.3)
    with pytest.raises(DefinitionError, match=f"^the weighting {called} policy 'mine' returned None for learner 'cpu'"):
        play.run()


def test_a_solver_needs_a_step() -> None:
    """Known when a policy is put together with it."""

    class Empty(Solver):
        pass

    with pytest.raises(DefinitionError, match=r"the solver Empty has no method step\(weights, gradient"):
        sync_fedavg().for_solver(Empty())
    with pytest.raises(InternalError, match="Empty has no step"):
        Empty().step(None, None, None, None)


def test_a_solver_is_a_dataclass() -> None:
    """Without it, it has no settings that anybody could know."""

    class Plain(Solver):
        def step(self, weights: Any, gradient: Any, memory: Any, community: Any) -> None: ...

    with pytest.raises(DefinitionError, match="the solver Plain must be a @dataclass, for its settings"):
        sync_fedavg().for_solver(Plain())
