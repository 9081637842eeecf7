"""Files that are written whole or not at all, durable where it matters, and locks between processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from metis.errors import LockHeld
from metis.system import disk, monotonic, sleep

_NOTE_BYTES = 300  # of a lock file; a fixed size, so that a shorter note leaves nothing of a longer one


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk."""
    descriptor = disk().open(path, os.O_RDONLY)
    try:
        disk().fsync(descriptor)
    finally:
        disk().close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, so that their names survive a loss of power."""
    missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)


def sync_file(file: BinaryIO) -> None:
    """Wait until everything written to an open file is on disk."""
    file.flush()
    disk().fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` at the end of the block; if the block fails, `path` stays as it was."""
    new = path.with_name(f"{path.name}.new")
    try:
        yield new
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


@contextlib.contextmanager
def durable_file(path: Path, *, private: bool = False, synced: bool = True) -> Iterator[BinaryIO]:
    """A file to write to, which replaces `path` at the end of the block and, if it is synced, survives a loss of power.

    A private file can be read by its owner only, also while it is being written.
    """
    with replacing(path) as new:
        if private:
            new.unlink(missing_ok=True)  # a leftover would keep its permissions
        flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if private else os.O_TRUNC)
        with disk().file(disk().open(new, flags, 0o600 if private else 0o666)) as file:
            yield file
            if synced:
                sync_file(file)
    if synced:
        sync(path.parent)


def write_durable(path: Path, content: bytes | memoryview, *, private: bool = False) -> None:
    """Replace a file so that it survives a loss of power."""
    with durable_file(path, private=private) as file:
        file.write(content)


def write_text(path: Path, text: str) -> None:
    """Replace a text file; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def take_lock(path: Path, *, wait: float = 0.0, note: bool = True) -> int:
    """Lock a file for this process and return its descriptor; closing it, or the end of the process, frees the lock.

    Raises `LockHeld` if another process holds it for longer than `wait` seconds. The holder leaves a note in the file
    unless `note` is false.
    """
    descriptor = disk().open(path, (os.O_RDWR if note else os.O_RDONLY) | os.O_CREAT, 0o600)
    try:
        end = monotonic() + wait
        while not disk().lock(descriptor):
            if monotonic() >= end:
                raise LockHeld(path, disk().pread(descriptor, _NOTE_BYTES, 0).decode(errors="replace").strip())
            sleep(0.1)
        if note:
            text = f"process id {os.getpid()} on {socket.gethostname()}\n"
            disk().pwrite(descriptor, text.ljust(_NOTE_BYTES).encode(), 0)
    except BaseException:
        disk().close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def locked(path: Path, *, wait: float = 0.0, note: bool = True) -> Iterator[None]:
    """Hold the lock of a file during the block."""
    descriptor = take_lock(path, wait=wait, note=note)
    try:
        yield
    finally:
        disk().close(descriptor)
