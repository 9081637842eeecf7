"""Where a member keeps what must survive a crash: a few named values, each replaced whole."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from metis.files import make_folder, sync, write_durable


class Store(Protocol):
    """`write` returns when the value survives a loss of power; a crash leaves the old value or the new one."""

    def read(self, name: str) -> bytes | None: ...

    def write(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...


class MemoryStore:
    """For a simulation."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self.values.get(name)

    def write(self, name: str, data: bytes) -> None:
        self.values[name] = bytes(data)

    def delete(self, name: str) -> None:
        self.values.pop(name, None)


class FolderStore:
    """A file for each value, which only its owner can read."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        write_durable(self.path(name), data, private=True)

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)
        sync(self.folder)
