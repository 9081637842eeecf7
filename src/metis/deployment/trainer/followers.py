"""The other processes of a silo that trains in several: started, commanded and watched by the first one.

Each follower is a trainer like the first and gets the same commands. A missing answer, a failure that the first process
does not share, or the death of one ends all of them, so that none waits for ever for the others. The learner then
starts them again.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from metis.deployment.trainer.child import how_it_ended
from metis.errors import ChildFailed, ConfigError, described

Result = TypeVar("Result")

_GRACE_SECONDS = 10.0  # in which all processes must end a task in the same way


class Followers:
    """Processes 1, 2, ... of a silo; `lost` is called from another thread when one is dead or out of step."""

    def __init__(self, size: int, lost: Callable[[str], None]) -> None:
        self.size = size
        self._lost = lost
        self._folder = tempfile.TemporaryDirectory(prefix="metis-trainer-")
        self.meeting_point = str(Path(self._folder.name) / "meeting-point")
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.SimpleQueue[dict[str, Any]]] = []
        self._failing: dict[int, threading.Timer] = {}  # by rank
        for rank in range(1, size):
            arguments = ["--follow", str(rank), str(size), self.meeting_point]
            process = subprocess.Popen(
                [sys.executable, "-m", "metis.cli.trainer", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._processes.append(process)
            self._answers.append(queue.SimpleQueue())
            threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def send(self, command: Mapping[str, Any]) -> None:
        """The same command to each, with a device of its own."""
        for rank, process in enumerate(self._processes, start=1):
            line = {**command, **({"device": own_device(command, rank, self.size)} if "device" in command else {})}
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the thread that reads from it notices its death
                process.stdin.write(json.dumps(line).encode() + b"\n")
                process.stdin.flush()

    def all_do(self, command: Mapping[str, Any], own: Callable[[], Result]) -> Result:
        """Let all processes carry out a command; a failure of this process counts first, then that of another."""
        self.send(command)
        problem: Exception | None = None
        try:
            result = own()
        except Exception as raised:
            problem = raised
        # Making network and data may take any time; a task ends for all at the same batch.
        timeout = _GRACE_SECONDS if command["command"] == "train" else None
        failures = [self._failure_of(rank, timeout, problem) for rank in range(1, self.size)]
        if problem is not None:
            raise problem
        for failure in failures:
            if failure is not None:
                raise failure
        return result

    def _failure_of(self, rank: int, timeout: float | None, problem: Exception | None) -> ChildFailed | None:
        """How this process failed; None if it did not."""
        try:
            answer = self._answers[rank - 1].get(timeout=timeout)
        except queue.Empty:
            late = f"process {rank} of {self.size} did not end the task with the others"
            self._lost(late if problem is None else described(problem))
            raise AssertionError("the process has ended") from None
        timer = self._failing.pop(rank, None)
        if timer is not None:
            timer.cancel()
        if "failed" not in answer:
            return None
        text = f"process {rank} of {self.size}: {answer['failed']}"
        return ChildFailed(text, kind=answer["kind"], details=answer.get("details", ""))

    def _listen(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            if "failed" in answer:
                # If the first process fails as well, all is in order; otherwise it waits for this one in vain.
                reason = f"process {rank} of {self.size}: {answer['failed']}"
                timer = self._failing[rank] = threading.Timer(_GRACE_SECONDS, self._lost, [reason])
                timer.daemon = True
                timer.start()
            self._answers[rank - 1].put(answer)
        code = process.wait()
        if not self._closing:
            self._lost(f"process {rank} of {self.size}: {how_it_ended(code)}")

    def close(self) -> None:
        """Let them end; kill them if they do not."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
        self._folder.cleanup()


def own_device(command: Mapping[str, Any], rank: int, size: int) -> str | None:
    """The device of one of several processes: each GPU for one of them."""
    asked: str | None = command["device"]
    device = asked or command["settings"]["experiment"].get("training", {}).get("device", "cpu")
    if device == "cpu":
        return asked
    if ":" in device:
        raise ConfigError(
            f"the device is '{device}', but {size} processes need one each: write {device.partition(':')[0]}"
        )
    return f"{device}:{rank}"
