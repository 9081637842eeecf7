"""An administrator: the real client on the simulated network, and what whoever was answered may rely on.

A command whose answer is lost is given again, as a person would. What was answered holds from then on, over any crash,
until another command is sent that may change it.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from greenlet import getcurrent, greenlet

from metis.deployment.administrator import BY_NAME, RemoteController
from metis.deployment.controller.audit import read_audit
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.wire.protocol import network
from metis.errors import ConfigError, Unreachable

if TYPE_CHECKING:
    from system.federation import Federation

ADMIN, CONTROLLER = "a", "c"
NEWCOMER = "l3"  # not in the file: it may join when it was added
COMMANDS = ("pause", "resume", "extend", "rollback", "add", "remove", "revoke", "stop")
_ATTEMPTS = 8
_EVENTS = {  # how the journal names what a command does
    "pause": "paused",
    "resume": "resumed",
    "extend": "stop_rule_changed",
    "rollback": "rolled_back",
    "add": "member_added",
    "remove": "member_removed",
    "stop": "stop_requested",
}
_NOTHING = ("already", "is not paused", "is not a member")  # answers to a command that had nothing to do


# --- the blocking client in a world without threads ---------------------------------------------------


def _wait(awaitable: Awaitable[Any]) -> Any:
    """In a greenlet of `blocking`: what a thread would do that waits."""
    parent = getcurrent().parent
    assert parent is not None
    return parent.switch(awaitable)


async def blocking(work: Callable[[], Any]) -> Any:
    """Do work that waits for answers, while others go on."""
    running, context = greenlet(work), contextvars.copy_context()
    running.gr_context = context
    value = running.switch()
    while not running.dead:
        try:
            answer = await value
        except Exception as problem:
            running.parent = getcurrent()
            value = running.throw(problem)
        else:
            running.parent = getcurrent()
            value = running.switch(answer)
    return value


class _Channel:
    """The blocking functions of a grpc.Channel."""

    def __init__(self, listen: str) -> None:
        self._channel = network().insecure_channel(listen)

    def unary_unary(self, method: str, write: Any, read: Any) -> Any:
        begin = self._channel.unary_unary(method, write, read)

        async def ask(request: Any, timeout: float, metadata: Any) -> Any:
            call = begin(request, metadata=metadata)
            try:
                return await asyncio.wait_for(call, timeout)
            except asyncio.TimeoutError:
                call.cancel()
                late = grpc.StatusCode.DEADLINE_EXCEEDED
                raise grpc.aio.AioRpcError(late, grpc.aio.Metadata(), grpc.aio.Metadata(), "too late") from None

        return lambda request, timeout, metadata: _wait(ask(request, timeout, metadata))

    def unary_stream(self, method: str, write: Any, read: Any) -> Any:
        begin = self._channel.unary_stream(method, write, read)

        def ask(request: Any, metadata: Any) -> Iterator[Any]:
            call = begin(request, metadata=metadata)
            while (message := _wait(call.read())) is not grpc.aio.EOF:
                yield message

        return ask

    def close(self) -> None:
        _wait(self._channel.close())


# --- who gives the commands ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """A command that somebody wants to give; `number` determines the rest of it."""

    command: str
    number: int = 0
    learner: str | None = None
    attempts: int = _ATTEMPTS
    version: int | None = None  # of a rollback; -1 is the latest


class Office:
    """The administrator's desk: what is to be done, what was answered, and what therefore must be."""

    def __init__(self, world: Federation, learners: tuple[str, ...], limit: tuple[str, int]) -> None:
        self._world, self._learners, self._limit = world, learners, limit
        self._orders: deque[Order] = deque()
        self._more = asyncio.Event()
        self.asked: Counter[str] = Counter()  # commands, each once however often it was sent
        self._answered: list[tuple[str, str]] = []  # and with which text
        self._effective: Counter[str] = Counter()  # answered as done
        self._rolled_back: list[tuple[int, int]] = []  # to a version, which is now another one
        # what holds; None while that is not known
        self.paused: bool | None = False
        self._tasks_when_paused = 0
        self._ended: bool | None = None
        self._rule: dict[str, int] | None = None
        self.removed: dict[str, bool | None] = {NEWCOMER: True}
        self.removed_at: dict[str, float] = {}
        self.revoked: dict[str, float] = {}
        self.hang_up: float | None = None  # so long after the next command was sent its connection breaks

    def order(self, order: Order) -> None:
        self._orders.append(order)
        self._more.set()

    def out(self, learner: str) -> bool:
        """Whether it may be that this learner does not belong to the federation, or cannot prove that it does."""
        return self.removed.get(learner, False) is not False or learner in self.revoked

    def settle(self) -> None:
        """At the end of all faults: let the federation come to its end, when what still waits here is done."""
        self.order(Order("settle"))

    def _settle(self) -> None:
        if self.asked["pause"]:
            self.order(Order("resume", attempts=100))
        if all(self.out(name) for name in self._learners):
            left = next(name for name in self._learners if name not in self.revoked)
            self.order(Order("add", learner=left, attempts=100))

    async def work(self, listen: str) -> int:
        while True:
            while not self._orders:
                self._more.clear()
                await self._more.wait()
            order = self._orders.popleft()
            if order.command == "settle":
                self._settle()
            else:
                await self._carry_out(order, listen)

    async def _carry_out(self, order: Order, listen: str) -> None:
        world, rng = self._world, random.Random(order.number)
        learner = order.learner or rng.choice((NEWCOMER, *self._learners) if order.command == "add" else self._learners)
        arguments: dict[str, Any] | None = None
        for attempt in range(order.attempts):
            try:
                if arguments is None:
                    arguments = await self._arguments(order, learner, rng, listen)
                    if arguments is None:
                        return
                    self.asked[order.command] += 1
                self._sent(order.command, learner)
                world.note("command", f"{order.command} {arguments}")
                if self.hang_up is not None:
                    world.loop.call_later(self.hang_up, self._break)
                    self.hang_up = None
                document = await self._ask(listen, order.command, arguments)
            except Unreachable as problem:
                world.note("no answer", str(problem))
                world.sometimes("a command was not answered")
                await asyncio.sleep(rng.uniform(0.3, 4.0))
            except ConfigError as refused:
                world.note("refused", str(refused))
                world.sometimes(f"{order.command} was refused")
                if order.command == "rollback" and "rolled back since" in str(refused):
                    world.sometimes("a rollback was not made twice")
                return
            else:
                text = document["text"]
                world.note("answer", text)
                if attempt and any(said in text for said in _NOTHING):
                    world.sometimes("a command whose answer was lost was done")
                self._take(order.command, learner, arguments, document)
                return

    def _break(self) -> None:
        """The connection, while a command is under way: its answer is lost, and what became of it is not known."""
        for connection in list(self._world.network.line(ADMIN).connections):
            self._world.sometimes("a command lost its caller")
            connection.reset()

    async def _arguments(self, order: Order, learner: str, rng: random.Random, listen: str) -> dict[str, Any] | None:
        match order.command:
            case "add":
                return {"learner": learner}
            case "remove":
                return {"learner": learner, "withdraw": rng.random() < 0.5}
            case "extend":
                key, limit = self._limit
                return {key: limit + rng.randrange(1, 4)}
            case "rollback":
                known = await self._ask(listen, "versions", {})
                if not {0, known["version"]} <= {*known["kept"]}:
                    self._world.violated(f"A5: the first or the latest of {known['version']} models is not kept")
                kept = sorted(known["kept"])
                version = rng.choice(known["kept"]) if order.version is None else kept[order.version]
                return {"version": version, "after": known["version"]}
        return {}

    async def _ask(self, listen: str, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            with RemoteController(listen, _Channel(listen), BY_NAME) as remote:  # type: ignore[arg-type]
                return remote.command(command, **arguments)

        answer: dict[str, Any] = await blocking(ask)
        return answer

    # --- what holds -----------------------------------------------------------------------------------

    def _sent(self, command: str, learner: str) -> None:
        """From now on it may have an effect."""
        match command:
            case "pause" if self.paused is False:
                self.paused = None
            case "resume":
                self.paused = None
            case "extend":
                self._rule = self._ended = None
            case "add" | "remove" if self.removed.get(learner, False) is not (command == "remove"):
                self.removed[learner] = None

    def _take(self, command: str, learner: str, arguments: dict[str, Any], document: dict[str, Any]) -> None:
        """It was answered: now it holds."""
        text, process, world = document["text"], self._world.process, self._world
        done = not any(said in text for said in _NOTHING)
        world.sometimes(f"{command} was answered")
        self._answered.append((command, text))
        self._effective[command] += done
        match command:
            case "pause":
                self.paused = True
                if process is not None:
                    self._tasks_when_paused = process._writer.controller._tasks_sent
            case "resume":
                self.paused = False
            case "stop":
                self._ended = True
            case "extend":
                self._rule = arguments
            case "rollback":
                self._rolled_back.append((arguments["version"], document["version"]))
            case "add" | "remove":
                self.removed[learner] = command == "remove"
                self.removed_at[learner] = world.loop.now

    def revoke(self, learner: str) -> None:
        """On the controller's machine, without a command."""
        self._world.sometimes("revoke was answered")
        self.revoked.setdefault(learner, self._world.loop.now)

    # --- checkers -------------------------------------------------------------------------------------

    def task_sent(self, learner: str, number: int) -> None:
        if self.paused and number > self._tasks_when_paused:
            self._world.violated(f"A1: task {number} is handed out by a federation that is paused")
        if self.removed.get(learner) is True:
            self._world.violated(f"A4: task {number} is handed out to {learner}, which was removed")

    def welcomed(self, learner: str) -> None:
        if self.removed.get(learner) is True:
            self._world.violated(f"A4: {learner} is welcomed, which was removed")
        if learner in self.revoked:
            self._world.violated(f"A4: {learner} is welcomed, whose certificate was revoked")

    def committed(self, learner: str, begun: float) -> None:
        """An update counts for the first time whose upload began then."""
        removed = self.removed.get(learner) is True and begun > self.removed_at.get(learner, 0.0)
        if removed or begun > self.revoked.get(learner, begun):
            self._world.violated(f"A4: an update of {learner} counts, which was removed or revoked before it was sent")

    def check_start(self, process: ControllerProcess) -> None:
        """A2: what was answered is still so after a crash."""
        standing, controller, violated = process._view.standing, process._writer.controller, self._world.violated
        if self.paused is not None and standing.on_hold != self.paused:
            violated(f"A2: a start {'forgets' if self.paused else 'invents'} a pause")
        if self._ended and not standing.finished:
            violated("A2: a start forgets that the federation was stopped")
        for key, limit in (self._rule or {}).items():
            if getattr(controller.stop, key) != limit:
                violated(f"A2: a start forgets that {key} was extended to {limit}")
        for learner, removed in self.removed.items():
            if removed is not None and (learner in process._members) == removed:
                violated(f"A2: a start forgets that {learner} was {'removed' if removed else 'added'}")

    def check_end(self, records: list[dict[str, Any]], versions: dict[int, str], audit: Path) -> None:
        """A2, A3, A5, A6: the journal, the models and the audit log agree with what was answered."""
        violated = self._world.violated
        happened = Counter(record.get("event") for record in records if record.get("by", "somebody"))
        for command, event in _EVENTS.items():
            if not self._effective[command] <= happened[event]:
                violated(f"A2: {self._effective[command]} times '{command}' was answered, {happened[event]} happened")
            if happened[event] > self.asked[command]:
                violated(f"A3: '{command}' was given {self.asked[command]} times and happened {happened[event]} times")
        for version, now in self._rolled_back:
            if versions[version] != versions[now]:
                violated(f"A5: community model {now} is not community model {version} again")
        lines = list(read_audit(audit))
        for line in lines:
            if line.problem is not None:
                violated(f"A6: line {line.number} of the audit log: {line.problem}")
        if self._world.starts[CONTROLLER] == 1:  # else it may have ended in the middle of a command
            for line in lines:
                if line.record.get("result") == "failed":
                    violated(f"A7: '{line.record.get('command')}' was given up in the middle")
        listed = Counter((line.record.get("command"), line.record.get("result")) for line in lines)
        for (command, text), times in Counter(self._answered).items():
            if listed[command, text[:500]] < times:
                violated(f"A6: the audit log does not list '{command}', which was answered with: {text}")
