"""What can go wrong when a state folder is written, and what follows from it."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from metis.errors import DiskFull, StateError
from metis.system import disk, sleep

_T = TypeVar("_T")

EXIT_DISK_FAILED = 74  # EX_IOERR
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_NO_FILES_PAUSE = 0.2  # seconds
RESTORE = "restore the folder from a copy, or begin a new run in another folder"


def end_process(path: Path, problem: object) -> NoReturn:
    """After a failed write nobody knows what is on the disk; the next process reads what is really there."""
    text = f"{path}: {problem}; the controller stops, because it cannot know what is on the disk. Everything that was "
    text += "acknowledged is safe: when the disk works again, restart with the same command.\n"
    disk().end_process(EXIT_DISK_FAILED, text)


def with_a_file(work: Callable[[], _T]) -> _T:
    """Do work that opens a file, in a thread, and again as long as this process may not open any more."""
    while True:
        try:
            return work()
        except OSError as problem:
            if problem.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        sleep(_NO_FILES_PAUSE)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Sort the errors of writing: a full disk, damage, and those after which the process must end."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in EXHAUSTED:
            end_process(path, problem.strerror)
        raise DiskFull(f"no room to write {path}: {problem.strerror}") from problem
    except sqlite3.Error as problem:
        if "disk is full" in str(problem):
            raise DiskFull(f"no room to write {path}: {problem}") from problem
        if "disk I/O error" in str(problem):
            end_process(path, problem)
        raise StateError(f"{path} cannot be written: {problem}; {RESTORE}") from problem
