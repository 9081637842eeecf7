"""One learner's stream, and the refusal of a call."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc

from metis.deployment.wire import wire_pb2 as pb
from metis.system import monotonic

MAX_CHANGES = 60  # messages of a learner in a minute by which it joins or leaves
Context = Any  # grpc.aio.ServicerContext; its stubs are generic in ways that help nobody


def address_of(context: Context) -> str:
    """Where a call comes from, as a person would write it."""
    kind, _, rest = unquote(str(context.peer())).partition(":")
    return rest if kind in ("ipv4", "ipv6") else f"{kind}:{rest}"


class Refused(Exception):
    """A call that ends here, with a status and a sentence for the operator of the site."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(eq=False)
class Session:
    """One learner's stream."""

    learner: str
    instance: str
    address: str
    epoch: int
    outbox: asyncio.Queue[pb.ToLearner | None] = field(default_factory=asyncio.Queue)
    last_heard: float = field(default_factory=monotonic)
    ready: pb.Ready | None = None
    held_task: int | None = None  # the one that the learner reports to be working on
    steps: int = 0

    @property
    def evaluates(self) -> bool:
        """Whether the learner has examples to measure a model on."""
        return self.ready is not None and self.ready.evaluation_examples > 0

    def send(self, **message: Any) -> None:
        self.outbox.put_nowait(pb.ToLearner(**message))

    def close(self) -> None:
        self.outbox.put_nowait(None)


class ChangeLimit:
    """Each coming and going may be journaled and logged: no learner does so all the time."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_CHANGES))

    def note(self, learner: str) -> None:
        """The learner comes or goes; raises `Refused` if it does so too often."""
        times, now = self._times[learner], monotonic()
        if len(times) == MAX_CHANGES and now - times[0] < 60:
            reason = f"learner '{learner}' comes and goes more than {MAX_CHANGES} times a minute"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        times.append(now)
