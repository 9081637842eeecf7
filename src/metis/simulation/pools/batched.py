"""A pool in front of another: small learners that start from the same model train as one computation there."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from metis.core.layers import Memory
from metis.core.model import Model
from metis.errors import InternalError
from metis.learning import Trained, kind_of
from metis.simulation.pools.local import Fetch, Measured, Memories, RealPool, Ticket, Workplace


class BatchedPool:
    """Who trains together is settled when the first result is wanted: by virtual time, not by what workers do."""

    def __init__(self, pool: RealPool, workplace: Workplace, max_learners: int) -> None:
        self._pool, self._max_learners = pool, max_learners
        self._waiting: dict[Hashable, list[_Share]] = {}
        self._kind = functools.cache(
            lambda learner, steps: kind_of(workplace.engine, workplace.learners[learner], steps)
        )

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
        kind = None if memory else self._kind(learner, steps)
        if kind is None:
            return self._pool.train(due, learner, model, task, steps, memory, rate, batches_per_step)
        share = _Share(self, due, learner, model, task, steps, rate)
        self._waiting.setdefault((kind, model, rate), []).append(share)
        return share

    def evaluate(self, due: float, model: Model, memories: Memories | None = None) -> Ticket[Measured]:
        return self._pool.evaluate(due, model, memories)

    def close(self) -> None:
        self._pool.close()

    def settle(self) -> None:
        """Hand all waiting learners to the pool."""
        for shares in self._waiting.values():
            wanted = [share for share in shares if not share.cancelled]
            for start in range(0, len(wanted), self._max_learners):
                _Group(self._pool, wanted[start : start + self._max_learners])
        self._waiting.clear()


class _Share:
    """One learner's part of a group."""

    def __init__(
        self, pool: BatchedPool, due: float, learner: int, model: Fetch, task: int, steps: int, rate: float
    ) -> None:
        self._pool = pool
        self.due, self.learner, self.model, self.task, self.steps, self.rate = due, learner, model, task, steps, rate
        self.cancelled = False
        self.group: _Group | None = None

    def result(self) -> Trained:
        if self.group is None:
            self._pool.settle()
        if self.group is None:
            raise InternalError("a result was asked for that was cancelled before")
        return self.group.result(self)

    def cancel(self) -> None:
        self.cancelled = True
        if self.group is not None:
            self.group.forget(self)


class _Group:
    """Learners that train together; the first result that is asked for waits for all."""

    def __init__(self, pool: RealPool, shares: list[_Share]) -> None:
        self._shares = shares
        self._wanted = set(shares)
        self._outcomes: dict[_Share, Trained | Exception] | None = None
        first = shares[0]
        self._ticket = pool.train_batched(
            min(share.due for share in shares),
            [share.learner for share in shares],
            first.model,
            [share.task for share in shares],
            first.steps,
            first.rate,
        )
        for share in shares:
            share.group, share.model = self, Model.empty

    def result(self, share: _Share) -> Trained:
        if self._outcomes is None:
            outcomes = zip(self._shares, self._ticket.result(), strict=True)
            self._outcomes = {one: outcome for one, outcome in outcomes if one in self._wanted}
        outcome = self._outcomes.pop(share)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def forget(self, share: _Share) -> None:
        """Its model need not be kept; when no result is wanted any more, the training is cancelled."""
        self._wanted.discard(share)
        if self._outcomes is not None:
            self._outcomes.pop(share, None)
        elif not self._wanted:
            self._ticket.cancel()
