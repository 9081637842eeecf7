"""Notifications: a command, a webhook or both hear of what the operator of a federation should know.

They are delivered by a thread of their own, each within a time limit; the federation never waits for one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metis.deployment.controller.settings import NotifySettings, Report
from metis.files import write_text
from metis.system import sleep, utc_now
from metis.text import printable

MEMORY = "notified.json"
_WAITING = 100  # notifications; what comes on top is dropped
_COMMAND_SECONDS = 30.0
_WEBHOOK_SECONDS = 10.0
_WEBHOOK_WAITS = (2.0, 10.0)  # seconds before the second and the third attempt
_OUTPUT = 2000  # bytes of a command's output that are read
_MAX_TEXT = 4000
_CLOSE_SECONDS = 15.0


@dataclass(frozen=True)
class _Item:
    document: dict[str, Any] | None  # None: a condition has ended, and nobody hears of it
    condition: str | None = None


class Notifier:
    """Delivers each event once, and each condition once until it is over, also over restarts of the controller."""

    def __init__(
        self,
        settings: NotifySettings,
        folder: Path,
        about: Mapping[str, Any],
        report: Report,
        waits: Sequence[float] = _WEBHOOK_WAITS,
    ) -> None:
        self._settings, self._about, self._report, self._waits = settings, dict(about), report, waits
        self._memory = folder / MEMORY
        self._delivered = _read(self._memory)
        self._conditions = set(self._delivered)  # that somebody has heard of, or will from what waits
        self._queue: queue.Queue[_Item | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        if settings.command or settings.webhook:
            self._thread = threading.Thread(target=self._work, name="metis-notify", daemon=True)
            self._thread.start()

    def notify(self, kind: str, text: str, **facts: Any) -> None:
        """Something has happened."""
        if kind in self._settings.events:
            self._put(_Item(notification(kind, text, {**self._about, **facts})))

    def began(self, kind: str, key: str, text: str, **facts: Any) -> None:
        """A condition holds; called again and again, it is notified once until it is over."""
        condition = f"{kind} {key}"
        if condition not in self._conditions and kind in self._settings.events:
            self._conditions.add(condition)
            self._put(_Item(notification(kind, text, {**self._about, **facts}), condition))

    def over(self, kind: str, key: str) -> bool:
        """The condition does not hold; whether it did."""
        condition = f"{kind} {key}"
        if condition not in self._conditions:
            return False
        self._conditions.remove(condition)
        self._put(_Item(None, condition))
        return True

    def close(self) -> None:
        """Deliver what waits, for some seconds."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=1.0)
            self._thread.join(_CLOSE_SECONDS)

    def _put(self, item: _Item) -> None:
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._report("warning", f"{_WAITING} notifications wait to be delivered; another one is dropped")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if item.document is not None:
                for problem in deliver(self._settings, item.document, self._waits):
                    self._report("warning", f"the notification '{item.document['kind']}' was not delivered: {problem}")
            if item.condition is not None:
                # Only now: one that was not delivered before the end of the process is sent by the next one.
                (self._delivered.discard if item.document is None else self._delivered.add)(item.condition)
                with contextlib.suppress(OSError):  # on a full disk the next process may repeat some
                    write_text(self._memory, json.dumps(sorted(self._delivered)))


def notification(kind: str, text: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The document that a command reads and a webhook gets."""
    return {
        "kind": kind,
        "text": printable(text)[:_MAX_TEXT],
        "at": utc_now().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "facts": dict(facts),
    }


def deliver(
    settings: NotifySettings, document: Mapping[str, Any], waits: Sequence[float] = _WEBHOOK_WAITS
) -> list[str]:
    """Deliver a notification in every way that is configured; one sentence for each that failed."""
    content = json.dumps(document, default=str).encode()
    problems = [_run(settings.command, content)] if settings.command else []
    if settings.webhook:
        problems.append(_post(settings.webhook, content, waits))
    return [problem for problem in problems if problem is not None]


def _run(command: Sequence[str], content: bytes) -> str | None:
    """Run the command with the document as its input; what was wrong, or None."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it starts itself ends with it
        )
    except OSError as problem:
        return f"the command {command[0]} cannot be run: {problem.strerror}"
    assert process.stdin is not None and process.stdout is not None
    late = threading.Event()

    def kill() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(_COMMAND_SECONDS, kill)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it need not read its input
            process.stdin.write(content)
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        output = process.stdout.read(_OUTPUT)
        process.stdout.close()
        code = process.wait()
    finally:
        timer.cancel()
    if late.is_set():
        return f"the command {command[0]} did not end within {_COMMAND_SECONDS:g} s and was killed"
    if code == 0:
        return None
    said = printable(" ".join(output.decode("utf-8", "replace").split()))[-300:]
    return f"the command {command[0]} ended with {code}{f': {said}' if said else ''}"


def _post(url: str, content: bytes, waits: Sequence[float]) -> str | None:
    """Send the document to a webhook, three times at most; what was wrong, or None. The URL may be a secret."""
    import urllib.error
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    opener = urllib.request.build_opener(NoRedirect())
    headers = {"Content-Type": "application/json", "User-Agent": "metis"}
    problem = ""
    for wait in (*waits, None):
        request = urllib.request.Request(url, content, headers, method="POST")
        try:
            with opener.open(request, timeout=_WEBHOOK_SECONDS):
                return None
        except urllib.error.HTTPError as refused:
            problem = f"the webhook answers {refused.code} {printable(refused.reason)}"
            refused.close()
            if refused.code < 500 and refused.code not in (408, 429):
                return problem
        except (OSError, ValueError) as failed:
            problem = f"the webhook cannot be reached: {printable(getattr(failed, 'reason', failed))}"
        except Exception as failed:  # http.client raises more than OSError for an answer that is not HTTP
            problem = f"the webhook does not answer as HTTP does: {type(failed).__name__}"
        if wait is not None:
            sleep(wait)
    return problem


def _read(path: Path) -> set[str]:
    try:
        return {str(condition) for condition in json.loads(path.read_text("utf-8"))}
    except (OSError, ValueError, TypeError):
        return set()
