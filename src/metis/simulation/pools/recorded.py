"""A pool that replays the events of a recorded run without any weights."""

from __future__ import annotations

from collections.abc import Iterable

from metis.core.events import Action, Evaluated, Event, TaskFailed, UpdateRequest
from metis.core.layers import Memory
from metis.core.model import Model
from metis.errors import Diverged, InternalError
from metis.learning import Trained
from metis.simulation.pools.local import Fetch, Known, Measured, Ticket

_BEYOND = InternalError("the recorded events end before this result")


class RecordedPool:
    """Answers every task and evaluation with what the recorded events say."""

    def __init__(self, events: Iterable[tuple[float, Event | Action]]) -> None:
        self._updates: dict[int, UpdateRequest | TaskFailed] = {}
        self._metrics: dict[int, Measured] = {}
        for _, item in events:
            if isinstance(item, (UpdateRequest, TaskFailed)):
                self._updates[item.task] = item
            elif isinstance(item, Evaluated):
                self._metrics[item.version] = (item.metrics, item.by_learner)

    def train(
        self,
        due: float,
        learner: int,
        model: Fetch,
        task: int,
        steps: int,
        memory: Memory | None,
        rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Ticket[Trained]:
        match self._updates.get(task):
            case UpdateRequest(steps=done, loss=loss, notes=notes):
                return Known(Trained(Model.empty(), done, loss, notes=notes))
            case TaskFailed(reason=reason):
                return Known(Diverged(reason))
            case _:
                return Known(_BEYOND)

    def evaluate(self, due: float, model: Model, memories: object = None) -> Ticket[Measured]:
        # The simulator asks in the order of versions, and the controller's model carries no weights here,
        # so the version is the number of evaluations asked for before among those recorded.
        version = next(iter(self._metrics), None)
        return Known(_BEYOND if version is None else self._metrics.pop(version))

    def close(self) -> None:
        pass
