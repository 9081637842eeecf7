"""Models in files, each named by the SHA-256 of its bytes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from metis.deployment.controller.disk import end_process, with_a_file, writing
from metis.deployment.storage import read_file, storage
from metis.deployment.wire.transfer import in_background
from metis.errors import DataError, DiskFull
from metis.files import sync
from metis.system import Lock, disk, monotonic, token_hex

_MANY = 4 << 20  # bytes that are worth a second thread
_AT_ONCE = 1 << 20  # bytes in one call; for more the system takes larger pages, which it may have given away
_HOLD_SECONDS = 600  # far more than an update waits for its turn to be journaled
_SHA256 = re.compile("[0-9a-f]{64}")
_PARTIAL = re.compile(r"partial\.[0-9]+\.[0-9a-f]{64}")


class BlobMismatch(ValueError):
    """What was received is not what was announced."""


class Digest(Protocol):
    """What gets all bytes of a model."""

    def update(self, data: bytes | memoryview, /) -> object: ...


class Blobs:
    """The files of a state folder that hold models; `lock` is that of the state."""

    def __init__(self, folder: Path, quarantine: Path, durable: bool, lock: Lock) -> None:
        self.folder, self._quarantine, self._durable, self._lock = folder, quarantine, durable, lock
        self._held: dict[str, float] = {}  # received and not yet journaled, and when
        self._fresh: set[str] = set()  # received or named since the last collection began
        self._partial: set[str] = set()  # names of files with the beginning of an update
        self._writing: set[str] = set()  # those of them that are being written

    def find_partial(self) -> None:
        """At the start: what was received of updates and may be continued."""
        self._partial = {path.name for path in self.folder.iterdir() if _PARTIAL.fullmatch(path.name)}

    def incoming(self, task: int | None = None, sha256: str = "") -> Incoming:
        """Somewhere to write a model that is being received.

        With its task and a valid SHA-256 it continues what was received of the same one before, and what was received
        of another one for this task goes.
        """
        name = f"partial.{task}.{sha256}"
        with self._lock:
            if task is None or not _SHA256.fullmatch(sha256) or name in self._writing:
                return Incoming(self, self._durable, held=True)
            self._forget({old for old in self._partial if old != name and old.startswith(f"partial.{task}.")})
            incoming = Incoming(self, self._durable, held=True, partial=name)
            self._partial.add(name)
            self._writing.add(name)
            return incoming

    def forget_partial(self, open_tasks: Collection[int]) -> None:
        """Delete what was received of updates whose task is not open any more."""
        closed = {name for name in tuple(self._partial) if int(name.split(".")[1]) not in open_tasks}
        if closed:
            with self._lock:
                self._forget(closed)

    def _forget(self, names: set[str]) -> None:
        for name in names - self._writing:
            with suppress(DiskFull), writing(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)
            self._partial.discard(name)

    def written(self, name: str, *, kept: bool) -> None:
        """Nobody writes to this partial file any more; it stays if it is `kept`."""
        with self._lock:
            self._writing.discard(name)
            if not kept:
                self._partial.discard(name)

    def put(
        self, parts: Iterable[memoryview], *, durable: bool | None = None, also: Digest | None = None
    ) -> str:  # fmt: skip
        """Keep these bytes and return their SHA-256; `durable` overrides the folder's level, `also` gets them too."""
        with Incoming(self, self._durable if durable is None else durable, held=False, also=also) as incoming:
            for part in parts:
                incoming.write(part)
            return incoming.commit(incoming.bytes, incoming.sha256)

    def adopt(self, path: Path, sha256: str, durable: bool, held: bool) -> None:
        """Give a file its name, also over an old one, which may be damaged."""
        target = self.folder / sha256
        with self._lock, writing(path):
            if self._durable and not durable and target.exists():
                sync(path)  # the old one may be durable, and promised
                durable = True
            self._fresh.add(sha256)
            if held:
                self._held[sha256] = monotonic()
            path.replace(target)
        if durable:
            self._sync_folder(self.folder)

    def _sync_folder(self, folder: Path) -> None:
        try:
            with_a_file(lambda: sync(folder))
        except OSError as problem:  # a full disk too: the new name is there already
            end_process(folder, problem.strerror)

    def sync(self, sha256: str) -> None:
        """Make a blob durable that was put without."""
        if self._durable:
            path = self.path(sha256)
            with writing(path):
                sync(path)
            self._sync_folder(self.folder)

    def path(self, sha256: str) -> Path:
        """The file of a blob that is there."""
        path = self.folder / sha256
        if not _SHA256.fullmatch(sha256) or not path.is_file():
            raise DataError(f"there is no model {sha256} in {self.folder}")
        return path

    def verify(self, sha256: str) -> bool:
        """Whether a blob is there and whole; what is not whole is moved to quarantine/."""
        path = self.folder / sha256
        try:
            file = self.path(sha256).open("rb", buffering=0)
        except (DataError, FileNotFoundError):
            return False
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
        with file:
            digest, offset = hashlib.sha256(), 0
            with suppress(OSError, DataError):  # a bad sector; or sealed, and not as it was written
                while chunk := storage().read(file.fileno(), 1 << 20, offset):
                    digest.update(chunk)
                    offset += len(chunk)
            if digest.hexdigest() == sha256:
                return True
            with self._lock, writing(path), suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # else a fresh one came meanwhile
                    path.replace(self._quarantine / sha256)
            return False

    # --- which are needed -----------------------------------------------------------------------

    def need(self, blobs: Iterable[str]) -> None:
        """Something durable names these; the next collection keeps them. The caller holds the lock."""
        for blob in blobs:
            self._fresh.add(blob)

    def release(self, blob: str | None) -> None:
        """An update is journaled, or was before: its model need not wait any longer. The caller holds the lock."""
        self._held.pop(blob or "", None)

    def begin_collection(self) -> set[str]:
        """What came since the last collection, and what was received and waits. The caller holds the lock."""
        waiting = monotonic() - _HOLD_SECONDS
        self._held = {name: since for name, since in self._held.items() if since > waiting}
        kept = {*self._fresh, *self._held}
        self._fresh = set()
        return kept

    def discard(self, name: str) -> None:
        """Delete a blob that nothing needs any more, also though the journal names it."""
        if _SHA256.fullmatch(name):
            with self._lock, writing(self.folder / name):
                (self.folder / name).unlink(missing_ok=True)

    def delete_others(self, kept: Collection[str]) -> int:
        """Delete all that are neither kept nor came meanwhile, and return how many."""
        with writing(self.folder):
            present = list(self.folder.iterdir())
        deleted = 0
        for path in present:
            if path.name in kept or path.name.startswith(("tmp.", "partial.")):
                continue
            with self._lock, writing(path):  # one at a time: others want to append
                if path.name not in self._fresh:  # the same bytes may have come again
                    path.unlink(missing_ok=True)
                    deleted += 1
        return deleted


class Incoming:
    """One model on its way into the folder, for one thread at a time.

    What is not committed leaves no trace, except for a partial one that ends before `whole` was called.
    """

    def __init__(
        self, blobs: Blobs, durable: bool, held: bool, also: Digest | None = None, *, partial: str | None = None
    ) -> None:
        self._blobs, self._durable, self._held, self._also = blobs, durable, held, also
        self._partial = partial
        self._path = blobs.folder / (partial or f"tmp.{token_hex(8)}")
        self._digest = hashlib.sha256()
        self.bytes = 0
        self._whole = self._committed = False
        with writing(self._path):
            self._file = self._path.open("xb" if partial is None else "a+b", buffering=0)
        self._writer = storage().writer(self._file)

    def resume(self, limit: int, check: Callable[[int, bytes], object] | None) -> int:
        """Read what is there already, at most `limit` bytes; `check` gets offsets and bytes. Returns how many."""
        if self._partial is None:
            return 0
        with writing(self._path):
            for piece in self._writer.resume(limit):
                self._digest.update(piece)
                if check is not None:
                    check(self.bytes, piece)
                self.bytes += len(piece)
        return self.bytes

    def whole(self) -> None:
        """Everything was received: from now on it is committed or goes."""
        self._whole = True

    @property
    def sha256(self) -> str:
        """Of what was written so far."""
        return self._digest.hexdigest()

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        """Append these bytes; many are hashed and written at the same time."""
        whole = memoryview(buffer)
        if not whole.nbytes:
            return  # some empty views cannot be cast
        whole = whole.cast("B")
        if len(whole) < _MANY:
            self.hash(whole)
            self.append(whole)
            return
        writing = in_background(self.append, whole)
        try:
            self.hash(whole)
        finally:
            writing.result()

    def hash(self, data: bytes | memoryview) -> None:
        """The half of `write` that needs no disk; another thread may do the other."""
        self._digest.update(data)

    def append(self, data: bytes | memoryview) -> None:
        """The half of `write` that needs the disk."""
        rest = memoryview(data)
        self.bytes += len(rest)
        with writing(self._path):
            for start in range(0, len(rest), _AT_ONCE):
                self._writer.write(rest[start : start + _AT_ONCE])
                if self._also is not None:
                    self._also.update(rest[start : start + _AT_ONCE])

    def content(self) -> bytes:
        """What was written; after it nothing can be."""
        with writing(self._path):
            self._writer.finish()
        return read_file(self._path)

    def commit(self, expected_bytes: int, expected_sha256: str) -> str:
        """Check what was written against what was announced and give it its name, durably; returns the SHA-256."""
        if self.bytes != expected_bytes:
            raise BlobMismatch(f"{self.bytes} bytes came, but {expected_bytes} were announced")
        if self.sha256 != expected_sha256:
            raise BlobMismatch(
                f"the bytes that came have the SHA-256 {self.sha256}, not {expected_sha256} as announced"
            )
        with writing(self._path):
            self._writer.finish()
            if self._durable:
                self._sync()
            self._file.close()
        self._blobs.adopt(self._path, self.sha256, self._durable, self._held)
        self._committed = True
        return self.sha256

    def _sync(self) -> None:
        try:
            disk().fsync(self._file.fileno())
        except OSError:  # what is not on the disk may still be shown, and called written: nobody may continue it
            with suppress(OSError):
                self._path.unlink()
            raise

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *reason: object) -> None:
        full = kind is not None and issubclass(kind, DiskFull)  # then half a model helps nobody
        kept = self._partial is not None and not (self._whole or full)
        if not self._committed:
            with suppress(DiskFull), writing(self._path):
                self._file.close()
                if not kept:
                    self._path.unlink(missing_ok=True)
        if self._partial is not None:
            self._blobs.written(self._partial, kept=kept)
