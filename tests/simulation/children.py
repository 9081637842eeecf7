"""Processes to interrupt and to kill, forked from a clean one that has torch imported already."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 600.0  # seconds until a wait is a failure, however busy the machine

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "metis.experiments.federation"])


@contextmanager
def child(target: Callable[..., None], *args: Any) -> Iterator[BaseProcess]:
    """A process that runs `target` and is gone afterwards."""
    process = _context.Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"waited {PATIENCE:g} seconds in vain")
        time.sleep(0.005)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_running(pid: int) -> bool:
    """Whether this process exists and has not ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
