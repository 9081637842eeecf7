"""Models in files, each named by the checksum of its bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from metis.deployment.controller.disk import end_process, with_a_file, writing
from metis.deployment.storage import Digest, read_file, storage
from metis.deployment.wire.model_mac import checksum_in, digest_like, is_checksum, is_name, name_of
from metis.deployment.wire.transfer import in_background
from metis.errors import DataError, DiskFull
from metis.files import sync
from metis.system import Lock, disk, monotonic, token_hex

_MANY = 4 << 20  # bytes that are worth a second thread
_AT_ONCE = 1 << 20  # bytes in one call; for more the system takes larger pages, which it may have given away
_HOLD_SECONDS = 600  # far more than an update waits for its turn to be journaled
_LARGE = 1 << 20  # bytes for which room is found before they come
_PARTIAL = re.compile(r"partial\.[0-9]+\.(?:[0-9a-f]{64}|[0-9a-f]{96})")


class BlobMismatch(ValueError):
    """What was received is not what was announced."""


def mismatch(came: str, announced: str) -> BlobMismatch:
    return BlobMismatch(f"the bytes that came have the checksum {came}, not {announced} as announced")


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

    def incoming(self, task: int | None = None, checksum: str = "") -> Incoming:
        """Somewhere to write a model that is being received.

        With its task and a valid checksum it continues what was received of the same one before, and what was received
        of another one for this task goes.
        """
        name = f"partial.{task}.{checksum}"
        with self._lock:
            if task is None or not is_checksum(checksum) or name in self._writing:
                return Incoming(self, self._durable, held=True, like=checksum)
            self._forget({old for old in self._partial if old != name and old.startswith(f"partial.{task}.")})
            incoming = Incoming(self, self._durable, held=True, partial=name, like=checksum)
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
            return incoming.commit(incoming.bytes, incoming.checksum)

    def restore(self, name: str, content: bytes) -> None:
        """Make the file of a model that the journal holds; not durable, since the journal is."""
        path = self.folder / f"tmp.{token_hex(8)}"
        with writing(path):
            path.write_bytes(content)
            path.replace(self.folder / name)

    def adopt(self, path: Path, name: str, durable: bool, held: bool) -> None:
        """Give a file its name, also over an old one, which may be damaged."""
        target = self.folder / name
        with self._lock, writing(path):
            if self._durable and not durable and target.exists():
                sync(path)  # the old one may be durable, and promised
                durable = True
            self._fresh.add(name)
            if held:
                self._held[name] = monotonic()
            path.replace(target)
        if durable:
            self._sync_folder(self.folder)

    def _sync_folder(self, folder: Path) -> None:
        try:
            with_a_file(lambda: sync(folder))
        except OSError as problem:  # a full disk too: the new name is there already
            end_process(folder, problem.strerror)

    def sync(self, name: str) -> None:
        """Make a blob durable that was put without."""
        if self._durable:
            path = self.path(name)
            with writing(path):
                sync(path)
            self._sync_folder(self.folder)

    def path(self, name: str) -> Path:
        """The file of a blob that is there."""
        path = self.folder / name
        if not is_name(name) or not path.is_file():
            raise DataError(f"there is no model {name} in {self.folder}")
        return path

    def verify(self, name: str) -> bool:
        """Whether a blob is there and whole; what is not whole is moved to quarantine/."""
        path = self.folder / name
        try:
            file = self.path(name).open("rb", buffering=0)
        except (DataError, FileNotFoundError):
            return False
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
        with file:
            checksum, offset = checksum_in(name), 0
            digest = digest_like(checksum)
            with suppress(OSError, DataError):  # a bad sector; or sealed, and not as it was written
                while chunk := storage().read(file.fileno(), 1 << 20, offset):
                    digest.update(chunk)
                    offset += len(chunk)
            if digest.digest().hex() == checksum:
                return True
            with self._lock, writing(path), suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # else a fresh one came meanwhile
                    path.replace(self._quarantine / name)
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
        if is_name(name):
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
        self,
        blobs: Blobs,
        durable: bool,
        held: bool,
        also: Digest | None = None,
        *,
        partial: str | None = None,
        like: str = "",
    ) -> None:
        """It gets a checksum like this one."""
        self._blobs, self._durable, self._held, self._also = blobs, durable, held, also
        self._partial = partial
        self._path = blobs.folder / (partial or f"tmp.{token_hex(8)}")
        self._digest = digest_like(like)
        self._checksum = ""
        self.bytes = 0
        self._whole = self._committed = False
        with writing(self._path):
            self._file = self._path.open("xb" if partial is None else "a+b", buffering=0)
        self._writer = storage().writer(self._file)

    def resume(self, limit: int, check: Callable[[int, bytes], object] | None) -> int:
        """Read what is there already, at most `limit` bytes, and find room for the rest; returns how many there are.

        `check` gets offsets and bytes.
        """
        with writing(self._path):
            for piece in self._writer.resume(limit) if self._partial is not None else ():
                self._digest.update(piece)
                if check is not None:
                    check(self.bytes, piece)
                self.bytes += len(piece)
            if limit - self.bytes >= _LARGE:
                disk().reserve(self._file.fileno(), limit)
        return self.bytes

    def whole(self) -> None:
        """Everything was received: from now on it is committed or goes."""
        self._whole = True

    @property
    def checksum(self) -> str:
        """Of what was written; nothing can be written afterwards."""
        self._checksum = self._checksum or self._digest.digest().hex()
        return self._checksum

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

    def append_all(self, pieces: Sequence[bytes | memoryview]) -> None:
        """The half of `write` that needs the disk, for several."""
        for data in pieces:
            self.append(data)

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

    def commit(self, expected_bytes: int, expected_checksum: str) -> str:
        """Check what was written against what was announced and give it its name, durably; returns the name."""
        if self.bytes != expected_bytes:
            raise BlobMismatch(f"{self.bytes} bytes came, but {expected_bytes} were announced")
        if self.checksum != expected_checksum:
            raise mismatch(self.checksum, expected_checksum)
        with writing(self._path):
            self._writer.finish()
            if self._durable:
                self._sync()
            self._file.close()
        name = name_of(self.checksum)
        self._blobs.adopt(self._path, name, self._durable, self._held)
        self._committed = True
        return name

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
