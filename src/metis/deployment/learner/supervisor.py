"""The background tasks of a learner process, what it reports, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from metis.system import monotonic
from metis.text import printable

Report = Callable[[str, str], None]  # kind and text

_QUIET_SECONDS = 60.0  # between two warnings about the same problem


class Supervisor:
    """Runs the parts of the process; the first error in one of them, or a call of `end`, ends all of them."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._exit_code: asyncio.Future[int]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._warning: tuple[str, float] = ("", 0.0)  # the latest, and when

    def begin(self) -> None:
        """Call this in the event loop, before anything else."""
        self._exit_code = asyncio.get_running_loop().create_future()

    @property
    def ended(self) -> bool:
        return self._exit_code.done()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (problem := task.exception()) is not None and not self.ended:
            self._exit_code.set_exception(problem)  # a bug in here: better no learner than one that does nothing

    def end(self, code: int, kind: str, text: str) -> None:
        """Report how it ended and set the exit code; only the first call counts."""
        if not self.ended:
            self.report(kind, text)
            self._exit_code.set_result(code)

    async def exit_code(self) -> int:
        """Wait for the end."""
        return await self._exit_code

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self, kind: str, text: str) -> None:
        """One line for the operator; it may quote the controller's settings or the site's data."""
        self._report(kind, printable(text))

    def retrying(self, text: str) -> None:
        """Warn about something that is tried again for ever: the first time, when the text changes, once a minute."""
        last, at = self._warning
        now = monotonic()
        if text != last or now - at >= _QUIET_SECONDS:
            self._warning = (text, now)
            self.report("warning", f"{text}; trying again")

    def recovered(self) -> None:
        """The next problem is a new one."""
        self._warning = ("", 0.0)
