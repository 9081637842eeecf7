"""The parent's side of the trainer: starts the child process, sends it commands, notices how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Sequence
from typing import Any

from metis.deployment.storage import storage
from metis.errors import Abandoned, ChildDied, ChildFailed
from metis.system import spawn

_LONGEST_LINE = 64 << 20  # the layout of a very deep network


class Child:
    """One trainer process at a time; `call` starts it when there is none."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], Callable[[int], None] | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def call(self, command: str, *, progress: Callable[[int], None] | None = None, **arguments: Any) -> Any:
        """What the child answers; raises `ChildFailed`, `Abandoned` or `ChildDied`."""
        process = await self._running()
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (answer, progress)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"id": number, "command": command, **arguments}).encode() + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the reader notices how it ended
        try:
            return await answer
        except asyncio.CancelledError:
            if self.alive:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(json.dumps({"id": number, "command": "abandon"}).encode() + b"\n")
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self, seconds: float = 2.0) -> None:
        """Let the child end; kill it if it does not."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    def kill(self) -> None:
        """At once, whatever it is doing."""
        if self.alive:
            assert self._process is not None
            self._process.kill()

    async def _running(self) -> asyncio.subprocess.Process:
        if not self.alive:
            self._process = await spawn(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
                **({} if storage().environment is None else {"env": storage().environment}),
            )
            self._reader = asyncio.create_task(self._read(self._process))
        assert self._process is not None
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = json.loads(line)
            answer, progress = self._waiting.get(message["id"], (None, None))
            if answer is None or answer.done():
                continue
            if "progress" in message:
                if progress is not None:
                    progress(message["progress"]["steps"])
            elif "done" in message:
                answer.set_result(message["done"])
            elif "abandoned" in message:
                answer.set_exception(Abandoned("the training was abandoned"))
            else:
                answer.set_exception(
                    ChildFailed(
                        message["failed"],
                        message.get("steps", 0),
                        message.get("seconds", 0.0),
                        message["kind"],
                        message.get("details", ""),
                    )
                )
        code = await process.wait()
        for answer, _ in self._waiting.values():
            if not answer.done():
                answer.set_exception(ChildDied(how_it_ended(code)))


def how_it_ended(code: int) -> str:
    """A sentence for the exit code of a process that trains."""
    if code == -signal.SIGKILL:
        return "the training process was killed (SIGKILL): out of memory?"
    if code < 0:
        return f"the training process was ended by {signal.Signals(-code).name}"
    return f"the training process ended with exit code {code}"
