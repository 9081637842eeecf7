"""Where a member keeps what must survive a crash: a few named values, each replaced whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from metis.files import locked, make_folder, sync, write_durable

_WAIT_SECONDS = 60.0  # for another process of the same learner


class Store(Protocol):
    """`write` returns when the value survives a loss of power; a crash leaves the old value or the new one."""

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, data: bytes | memoryview) -> None: ...

    def delete(self, name: str) -> None: ...


class MemoryStore:
    """For a simulation."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self.values.get(name)

    def write(self, name: str, data: bytes | memoryview) -> None:
        self.values[name] = bytes(data)

    def delete(self, name: str) -> None:
        self.values.pop(name, None)


class FolderStore:
    """A file for each value, which only its owner can read."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.folder = folder

    def locked(self) -> AbstractContextManager[None]:
        """Only this process reads and writes here; two that change one value would forget what the other did."""
        return locked(self.folder / "lock", wait=_WAIT_SECONDS, note=False)

    def path(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes | memoryview) -> None:
        write_durable(self.path(name), data, private=True)

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)
        sync(self.folder)
