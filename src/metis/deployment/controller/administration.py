"""Remote administration, on the learners' port: who may ask for what, one command at a time, everything audited.

A command that changes the federation is one journaled event: after a crash it has happened or it has not.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from metis.core.events import (
    ControllerAway,
    LearnerId,
    MemberAdded,
    MemberRemoved,
    Paused,
    Resumed,
    StopRequested,
    StopRuleChanged,
)
from metis.core.stop import StopRule
from metis.deployment.controller.audit import AUDIT, AuditLog
from metis.deployment.controller.callers import Administrator, Administrators
from metis.deployment.controller.members import Members
from metis.deployment.controller.session import Context, Refused, address_of
from metis.deployment.controller.settings import FederationPlan, Report
from metis.deployment.controller.state import State
from metis.deployment.controller.timekeeper import Timekeeper
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Writer
from metis.deployment.security.identity import check_name
from metis.deployment.storage import storage
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.models import model_bytes
from metis.deployment.wire.protocol import PROTOCOL
from metis.errors import ConfigError, DataError, DiskFull
from metis.runs.rounds import round_report
from metis.runs.setting import SETTING
from metis.runs.trace import EVENTS, plain_number, read_trace
from metis.system import disk, monotonic
from metis.text import json_text, listed, plural

Document = dict[str, Any]

_CODE = grpc.StatusCode
_MAX_ARGUMENTS = 4096  # characters of JSON
_MAX_WAITING = 8  # commands that wait for their turn; more are refused
_CLOSE_SECONDS = 5.0  # that commands under way have to end when the process ends
_BURST, _PER_SECOND = 60.0, 10.0  # calls of one administrator
_PIECE = 1 << 18  # bytes of a file sent at once
_MAX_READ = 64 << 20  # bytes in one call; what is left is asked for again
_UNLISTED = "its audit log does not list this yet, so give the command again when there is room"
KEPT_LINES = 1000  # of the log


class Administered(Protocol):
    """What the process itself does for an administrator."""

    recent: deque[tuple[float, str, str]]  # what was reported: time, kind, text

    async def status(self) -> Document: ...

    async def rollback(self, version: int, after: int | None = None) -> int: ...

    async def kept_versions(self) -> list[int]: ...


@dataclass(frozen=True)
class _Command:
    role: str  # that suffices: viewer or admin
    run: Callable[[Administrator, Document], Awaitable[Document]]
    changes: bool = False


class Administration:
    """The service `metis.Administration`; its commands are in one table."""

    def __init__(
        self,
        process: Administered,
        plan: FederationPlan,
        state: State,
        folder: Path,
        writer: Writer,
        view: View,
        members: Members,
        timekeeper: Timekeeper,
        audit: AuditLog,
        identify: Administrators,
        refuse: Callable[[Context, Refused], Awaitable[None]],  # end a call, and report it
        report: Report,
    ) -> None:
        self._process, self._plan, self._state, self._folder = process, plan, state, folder
        self._writer, self._view, self._members, self._time = writer, view, members, timekeeper
        self._audit, self._identify, self._refuse, self._report = audit, identify, refuse, report
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[Document]] = set()
        self.ended = False  # the controller takes no more commands
        self._allowance: dict[str, tuple[float, float]] = {}  # by name: calls that are left, and as of when
        self._looked: set[tuple[str, str]] = set()  # who has read what since the start
        self._commands = {
            "status": _Command("viewer", self._status),
            "members": _Command("viewer", self._list_members),
            "rounds": _Command("viewer", self._rounds),
            "log": _Command("viewer", self._log),
            "setting": _Command("viewer", self._setting),
            "model": _Command("admin", self._model),
            "pause": _Command("admin", self._pause, changes=True),
            "resume": _Command("admin", self._resume, changes=True),
            "stop": _Command("admin", self._stop, changes=True),
            "extend": _Command("admin", self._extend, changes=True),
            "versions": _Command("viewer", self._versions),
            "rollback": _Command("admin", self._rollback, changes=True),
            "add": _Command("admin", self._add, changes=True),
            "remove": _Command("admin", self._remove, changes=True),
        }
        self._files: dict[str, tuple[str, Callable[[Document], Awaitable[Path]]]] = {
            "trace": ("viewer", self._trace_path),
            "audit": ("viewer", self._audit_path),
            "model": ("admin", self._model_path),
        }

    # --- the calls --------------------------------------------------------------------------------

    async def command(self, content: bytes, context: Context) -> pb.AdminAnswer:
        try:
            caller, name, arguments = self._request(content, context)
            command = self._commands.get(name)
            if command is None:
                raise Refused(_CODE.UNIMPLEMENTED, f"{name[:40]!r} is not a command; use {listed([*self._commands])}")
            self._check_role(caller, command.role, name)
            if self.ended:
                raise Refused(_CODE.UNAVAILABLE, "the federation has ended, and its controller stops")
            if len(self._under_way) > _MAX_WAITING:
                raise Refused(_CODE.RESOURCE_EXHAUSTED, "too many commands are waiting for their turn; try again")
            # It runs to its end though its caller is gone: what is half done must not meet the next command.
            work = asyncio.create_task(self._in_turn(caller, name, command, arguments, address_of(context)))
            self._under_way.add(work)
            work.add_done_callback(self._ended)
            document = await asyncio.shield(work)
            return pb.AdminAnswer(document=json_text(document, indent=None, default=plain_number))
        except Refused as refused:
            await self._refuse(context, refused)
        raise AssertionError("abort raises")

    async def settle(self) -> None:
        """Let the commands end that are under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def close(self) -> None:
        """Let the commands end that are under way, or give them up."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_CLOSE_SECONDS)
        for work in self._under_way:
            work.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _ended(self, work: asyncio.Task[Document]) -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # for its caller, who may be gone

    async def _in_turn(
        self, caller: Administrator, name: str, command: _Command, arguments: Document, address: str
    ) -> Document:
        async with self._turn:
            return await self._run(caller, name, command, arguments, address)

    async def read(self, content: bytes, context: Context) -> AsyncIterator[pb.Chunk]:
        try:
            caller, name, arguments = self._request(content, context)
            if name not in self._files:
                raise Refused(_CODE.UNIMPLEMENTED, f"{name[:40]!r} cannot be read; use {listed([*self._files])}")
            role, find = self._files[name]
            self._check_role(caller, role, name)
            offset = _number(arguments, "offset") or 0
            path = await find(arguments)
            if offset == 0:
                about = {"version": arguments.get("version")} if name == "model" else {}
                self._note_read(caller, f"read {name}", address_of(context), **about)
            file = disk().open(path, os.O_RDONLY)
            read = storage().read if name == "model" else disk().pread
        except Refused as refused:
            await self._refuse(context, refused)
            return
        except OSError as problem:
            await self._refuse(context, Refused(_CODE.NOT_FOUND, f"{name} cannot be read: {problem.strerror}"))
            return
        try:
            end = offset + _MAX_READ
            while offset < end and (data := await asyncio.to_thread(read, file, _PIECE, offset)):
                yield pb.Chunk(offset=offset, data=data)
                offset += len(data)
        finally:
            disk().close(file)

    def _request(self, content: bytes, context: Context) -> tuple[Administrator, str, Document]:
        caller = self._identify(context)
        now = monotonic()
        left, since = self._allowance.get(caller.name, (_BURST, now))
        left = min(_BURST, left + (now - since) * _PER_SECOND)
        if left < 1:
            raise Refused(_CODE.RESOURCE_EXHAUSTED, f"{caller} calls too often; at most {_PER_SECOND:g} times a second")
        self._allowance[caller.name] = (left - 1, now)
        return caller, *_decoded(content)

    def _check_role(self, caller: Administrator, role: str, name: str) -> None:
        if role == "admin" and caller.role != "admin":
            raise Refused(_CODE.PERMISSION_DENIED, f"{caller} may only read; '{name[:40]}' needs the role admin")

    async def _run(
        self, caller: Administrator, name: str, command: _Command, arguments: Document, address: str
    ) -> Document:
        if not command.changes:
            self._note_read(caller, name, address)
        result, noted = "failed", True
        try:
            document = await command.run(caller, arguments)
            result = str(document.get("text", "done"))
        except ConfigError as problem:
            result = f"refused: {problem}"
            raise Refused(_CODE.INVALID_ARGUMENT, str(problem)) from problem
        except Refused as refused:
            result = f"refused: {refused.reason}"
            raise
        except DiskFull as problem:
            result = "refused: the disk is full"
            raise Refused(
                _CODE.RESOURCE_EXHAUSTED, "the disk of the controller is full; nothing was changed"
            ) from problem
        finally:
            if command.changes:
                self._note(caller, name, address, arguments=arguments, result=result)
                noted = await self._audit.flushed()
        if not noted:  # what is answered is in the audit log, also after a loss of power
            raise Refused(_CODE.RESOURCE_EXHAUSTED, f"the disk of the controller is full, and {_UNLISTED}: {result}")
        if command.changes:
            self._report("info", f"{caller}: {result}")
        return document

    def _note(self, caller: Administrator, command: str, address: str, **facts: Any) -> None:
        self._audit.note(
            "command", who=caller.name, role=caller.role, serial=caller.serial, address=address, command=command,
            **facts,
        )  # fmt: skip

    def _note_read(self, caller: Administrator, command: str, address: str, **facts: Any) -> None:
        """Once for each reader since the start; a dashboard asks every second. A model each time."""
        if (caller.name, command) not in self._looked or facts:
            self._looked.add((caller.name, command))
            self._note(caller, command, address, **facts)

    # --- reading ----------------------------------------------------------------------------------

    async def _status(self, caller: Administrator, arguments: Document) -> Document:
        return await self._process.status()

    async def _list_members(self, caller: Administrator, arguments: Document) -> Document:
        of_file = self._members.of_file
        return {
            "members": [
                {"name": name, "added": of_file is not None and name not in of_file} for name in self._members.names
            ],
            "removed": [name for name in self._members.known if self._members.removed(name)],
            "everybody": of_file is None,
        }

    async def _rounds(self, caller: Administrator, arguments: Document) -> Document:
        path, number, site = self._folder / EVENTS, _number(arguments, "round"), arguments.get("site")
        return await asyncio.to_thread(lambda: round_report(read_trace(path), number, site))

    async def _log(self, caller: Administrator, arguments: Document) -> Document:
        lines = _number(arguments, "lines") or KEPT_LINES
        recent = list(self._process.recent)[-lines:]
        return {"lines": [{"at": at, "kind": kind, "text": text} for at, kind, text in recent]}

    async def _setting(self, caller: Administrator, arguments: Document) -> Document:
        text = (self._folder / SETTING).read_text("utf-8")
        return {"start": self._state.epoch, "run": self._state.run, "setting": json.loads(text)}

    async def _trace_path(self, arguments: Document) -> Path:
        if arguments.get("start") not in (None, self._state.epoch):
            raise Refused(_CODE.FAILED_PRECONDITION, "the controller was started again; read from the beginning")
        return self._folder / EVENTS

    async def _audit_path(self, arguments: Document) -> Path:
        await self._audit.flushed()
        return self._state.folder / AUDIT

    async def _model(self, caller: Administrator, arguments: Document) -> Document:
        version = self._view.best_version if arguments.get("best") is True else _number(arguments, "version")
        if version is None:
            version = self._view.standing.version
        await self._model_path({"version": version})
        sha256 = await self._writer.ask(lambda: self._writer.durable.hashes[version])
        layout = self._plan.initial_model.layout
        return {"version": version, "sha256": sha256, "bytes": model_bytes(layout), "layout": layout.to_json()}

    async def _model_path(self, arguments: Document) -> Path:
        version = _number(arguments, "version")

        def find() -> Path:
            try:
                return self._state.blob_path(self._writer.durable.hashes[-1 if version is None else version])
            except (KeyError, DataError):
                latest = self._view.standing.version
                text = f"the controller does not have community model {version} any more"
                if version is not None and version > latest:
                    text = f"there is no community model {version} yet; the latest is {latest}"
                raise Refused(_CODE.NOT_FOUND, text) from None

        return await self._writer.ask(find)

    # --- changing ---------------------------------------------------------------------------------

    async def _pause(self, caller: Administrator, arguments: Document) -> Document:
        if self._view.standing.finished:
            raise Refused(_CODE.FAILED_PRECONDITION, "the federation has ended")
        if self._view.standing.on_hold:
            return {"text": "the federation is paused already"}
        await self._writer.perform(Paused(caller.name))
        tasks = plural(len(self._view.tasks), "open task")
        return {"text": f"paused: no new task is sent, {tasks} may end, and the run's clock stands still"}

    async def _resume(self, caller: Administrator, arguments: Document) -> Document:
        if not self._view.standing.on_hold:
            return {"text": "the federation is not paused"}
        if self._view.tasks and (seconds := self._time.held_for()):
            await self._writer.perform(ControllerAway(seconds))
        await self._writer.perform(Resumed(caller.name))
        return {"text": "resumed"}

    async def _stop(self, caller: Administrator, arguments: Document) -> Document:
        if self._view.standing.finished:
            return {"text": "the federation has ended already"}
        await self._writer.perform(StopRequested(f"stopped by {caller}", publish=True))
        return {"text": f"stopped; the last community model is {self._view.standing.version}"}

    async def _extend(self, caller: Administrator, arguments: Document) -> Document:
        limits: Document = {name: _number(arguments, name) for name in ("rounds", "update_requests", "steps")}
        seconds = arguments.get("seconds")
        if seconds is not None and not (_is_number(seconds) and 0 < seconds < 2**53):
            raise ConfigError(f"seconds is {str(seconds)[:40]}; it must be a number greater than 0")
        given = {name: limit for name, limit in {**limits, "seconds": seconds}.items() if limit is not None}
        if arguments.get("no_target") is True:
            given |= {"target": None, "patience": None}
        if not given:
            raise ConfigError("say until when: rounds, seconds, update_requests or steps")

        def check() -> StopRule:
            """In the writer."""
            controller = self._writer.controller
            rule = replace(controller.stop, **given)
            stamp, steps = controller.community.stamp, controller.community.committed_steps
            reason = rule.spent(stamp.version, controller.update_requests, steps)
            if rule.out_of_time(self._writer.now()):
                reason = f"{rule.seconds:g} seconds have passed"
            if reason is not None:
                more = (
                    "raise that limit as well" if controller.finished else "limits count from the beginning; see stop"
                )
                raise ConfigError(f"by that rule there is nothing left to do: {reason}; {more}")
            return rule

        rule = await self._writer.ask(check)
        ended = self._view.standing.finished
        if not ended and rule == await self._writer.ask(lambda: self._writer.controller.stop):
            return {"text": f"the federation runs until {rule_in_words(rule)} already"}
        await self._writer.perform(StopRuleChanged(rule, caller.name))
        how = "goes on" if ended else "runs"
        return {"text": f"the federation {how} until {rule_in_words(rule)}"}

    async def _versions(self, caller: Administrator, arguments: Document) -> Document:
        return {"version": self._view.standing.version, "kept": await self._process.kept_versions()}

    async def _rollback(self, caller: Administrator, arguments: Document) -> Document:
        version = _number(arguments, "version")
        if version is None:
            raise ConfigError("say to which community model: one of those that are kept")
        now = await self._process.rollback(version, _number(arguments, "after"))
        return {"text": f"rolled back: community model {now} is community model {version} again", "version": now}

    async def _add(self, caller: Administrator, arguments: Document) -> Document:
        learner = _name(arguments)
        if learner in self._members:
            return {"text": f"'{learner}' is a member already"}
        of_file = self._members.of_file or ()
        if learner not in of_file and self._plan.settings_of_added is None:
            raise ConfigError(
                "this federation divides a built-in data set among the learners of its file, so no other can be added"
            )
        await self._writer.perform(member_added(learner, arguments))
        return {"text": f"'{learner}' may join; it needs a certificate of the same CA with this name"}

    async def _remove(self, caller: Administrator, arguments: Document) -> Document:
        learner = _name(arguments)
        if learner not in self._members:
            if not self._members.removed(learner):
                raise ConfigError(self._members.stranger(learner))
            return {"text": f"'{learner}' is not a member"}
        withdraw = arguments.get("withdraw") is True
        contributed = await self._writer.ask(lambda: self._writer.controller.roster.get(learner) is not None)
        await self._writer.perform(MemberRemoved(learner, withdraw))
        kept = "its last contribution is taken out of" if withdraw else "its last contribution stays in"
        kept = f"{kept} the community model" if contributed else "it has never joined"
        left, minimum = len(self._members.names), self._plan.deployment.minimum
        few = (
            f"; {plural(left, 'member')} left, but deployment.minimum is {minimum}: it pauses" if left < minimum else ""
        )
        return {"text": f"'{learner}' was removed and may not join any more; {kept}{few}"}


def member_added(learner: LearnerId, arguments: Mapping[str, Any]) -> MemberAdded:
    """The event, with the power that the arguments name: `watts` and `idle_watts`, or `epsilon` and `idle_epsilon`."""
    key = "watts" if "watts" in arguments else "epsilon"
    active, idle = arguments.get(key, 1.0), arguments.get(f"idle_{key}")
    for value in (active, idle):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ConfigError(f"a power must be a number that is 0 or more, not {str(value)[:40]}")
    return MemberAdded(learner, active, idle, "watt" if key == "watts" else "epsilon")


def rule_in_words(rule: StopRule) -> str:
    """When a federation ends."""
    limits = [
        None if rule.rounds is None else plural(rule.rounds, "round") + " are done",
        None if rule.seconds is None else f"{rule.seconds:g} s have passed",
        None if rule.update_requests is None else plural(rule.update_requests, "update request") + " were made",
        None if rule.steps is None else plural(rule.steps, "step") + " were made",
        None if rule.target is None else f"{rule.target.metric} has reached {rule.target.value:g}",
        None
        if rule.patience is None
        else f"{rule.patience.metric} has not improved in {rule.patience.evaluations} evaluations",
    ]
    return " or ".join(limit for limit in limits if limit) or "somebody stops it"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _decoded(content: bytes) -> tuple[str, Document]:
    """The command of a request and its arguments."""
    try:
        request = pb.AdminRequest.FromString(content)
    except DecodeError:
        raise Refused(_CODE.INVALID_ARGUMENT, "the request could not be decoded") from None
    if request.protocol != PROTOCOL:
        raise Refused(
            _CODE.FAILED_PRECONDITION,
            f"version {request.protocol} of the protocol was used, this controller has version {PROTOCOL}: install "
            "the same version of Metis at both ends",
        )
    try:
        arguments = json.loads(request.arguments or "{}") if len(request.arguments) <= _MAX_ARGUMENTS else None
        json.dumps(arguments, ensure_ascii=False).encode()  # half a surrogate pair cannot be written anywhere
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(_CODE.INVALID_ARGUMENT, f"arguments must be a JSON object of at most {_MAX_ARGUMENTS} letters")
    return request.command, arguments


def _number(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53):
        raise Refused(_CODE.INVALID_ARGUMENT, f"{name} must be a whole number that is 0 or more")
    return value


def _name(arguments: Mapping[str, Any]) -> LearnerId:
    return check_name(str(arguments.get("learner", "")))
