"""The durable state folder of a controller: what `append` has returned for is on disk, exactly once.

    controller.db   the journal of events, what the run was begun with, the list of snapshots, small models
                    (SQLite with a WAL)
    blobs/CHECKSUM  models, each named by its bytes; blobs/tmp.* are still being received, blobs/partial.TASK.CHECKSUM
                    were received in part, and their rest may come after a cut or a restart
    snapshots/      arrays that spare replaying the journal from its first entry
    quarantine/     blobs whose bytes no longer give their name
    LOCK            held by the one controller that uses the folder
    ACKNOWLEDGED    how far controller.db had come

Every change is one transaction, so there is never half of one. A full disk raises `DiskFull` and changes nothing.
After any other error in writing nobody knows what is on the disk, and asking again is answered wrongly, so the process
ends; the next one reads what is really there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from metis.deployment.controller.blobs import Blobs, Incoming
from metis.deployment.controller.database import Database, row_checksum
from metis.deployment.controller.disk import RESTORE, writing
from metis.deployment.controller.journal import Entry, Journal, as_json
from metis.deployment.storage import Digest, storage
from metis.deployment.wire.model_mac import checksum_in, checksum_of
from metis.errors import DataError, DiskFull, DuplicateUpdate, LockHeld, StateError
from metis.files import sync, take_lock
from metis.system import disk, monotonic, new_lock, token_hex

if TYPE_CHECKING:
    from numpy.typing import NDArray

Durability: TypeAlias = Literal["power", "process"]  # what an acknowledged update survives the sudden end of


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where replaying may start."""

    seq: int  # the state after this entry
    arrays: str  # name of a file in snapshots/
    facts: dict[str, Any]
    blobs: tuple[str, ...]  # that the state needs; they are not collected before the snapshot goes


def _locked(folder: Path) -> int:
    try:
        return take_lock(folder / "LOCK")
    except LockHeld as held:
        raise StateError(
            f"{folder} is in use by a controller{' with ' * bool(held.holder)}{held.holder}; stop that one first, or "
            "choose another folder"
        ) from held


def _bytes_of(folder: Path) -> int:
    """Of the files in it, not below."""
    total = 0
    with writing(folder):
        paths = list(folder.iterdir())
    for path in paths:
        with suppress(FileNotFoundError):  # gone meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


class State:
    """A controller's durable memory. Any thread may call anything; changes happen one after the other."""

    epoch: int  # how often the folder was opened; fences off messages of an earlier controller
    run: str  # made at random when the folder was made

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.folder = folder
        self._durable = durability == "power"
        self._path, self._snapshots, self._quarantine = (
            folder / name for name in ("controller.db", "snapshots", "quarantine")
        )
        self._database: Database | None = None
        self._lock = new_lock()
        self.blobs = Blobs(folder / "blobs", self._quarantine, self._durable, self._lock)
        self._collecting = new_lock()  # a second collection would forget what is fresh to the first
        self._descriptors: list[int] = []  # of LOCK and ACKNOWLEDGED
        self._marks = [0, 0, 0, 0]  # epoch, whether begun, number of the newest snapshot, last entry: none ever falls

    # --- opening and closing ------------------------------------------------------------------------

    @staticmethod
    def open(folder: Path, durability: Durability = "power") -> State:
        """Make the folder, or recover what is in it; a StateError says why that is impossible."""
        state = State(folder, durability)
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state._descriptors.append(_locked(folder))
            state._recover()
            if durability == "power":
                for path in (folder / "ACKNOWLEDGED", folder, *(made.parent for made in missing)):
                    sync(path)
        except (OSError, sqlite3.Error, DiskFull) as problem:
            state._release()
            raise StateError(f"the state folder {folder} cannot be opened: {problem}") from problem
        except BaseException:
            state._release()
            raise
        return state

    def _recover(self) -> None:
        acknowledged = self.folder / "ACKNOWLEDGED"
        blobs = self.blobs.folder
        begun = acknowledged.exists() or (blobs.is_dir() and any(blobs.iterdir()))
        if begun and not (self._path.exists() and self._path.stat().st_size):
            raise StateError(f"{self._path} is missing or empty, but {self.folder} holds a run: {RESTORE}")
        for folder in (blobs, self._snapshots, self._quarantine):
            folder.mkdir(exist_ok=True)
        self._database = Database(self._path, self._durable, self._lock, begun=begun)
        epoch, facts = self._read_run()
        self.journal = Journal(self._db, self._lock, self._journaled)
        entries = self.journal.last
        self.snapshots()  # are as they were written
        listed = dict(self._db.select("SELECT arrays, number FROM snapshot"))
        marks = [epoch, int(facts is not None), max(listed.values(), default=0), entries]
        descriptor = disk().open(acknowledged, os.O_RDWR | os.O_CREAT, 0o600)
        self._descriptors.append(descriptor)
        seen = self._read_marks(disk().pread(descriptor, 500, 0))
        if any(have < once for have, once in zip(marks, seen, strict=True)):
            raise StateError(
                f"{self._path} has lost what was acknowledged: it ends with entry {entries} of epoch {epoch}, and "
                f"once ended with entry {seen[3]} of epoch {seen[0]}; {RESTORE}, or delete {acknowledged} to go on "
                "with what is left"
            )
        copies = [path for path in blobs.iterdir() if path.name in self.journal.contents]  # never synced
        for path in [*blobs.glob("tmp.*"), *copies, *(p for p in self._snapshots.iterdir() if p.name not in listed)]:
            path.unlink()
        self.blobs.find_partial()
        self._marks = marks
        self.epoch = epoch + 1
        self._write_run(self.epoch, facts)
        self._mark(0, self.epoch)

    def close(self) -> None:
        """Tidy the folder and release it for the next controller."""
        with self._lock:
            if self._database is not None:
                self._database.checkpoint("TRUNCATE")
            self._release()

    def _release(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        while self._descriptors:
            disk().close(self._descriptors.pop())

    @property
    def _db(self) -> Database:
        assert self._database is not None, "the state is closed"
        return self._database

    def __enter__(self) -> State:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    # --- ACKNOWLEDGED -----------------------------------------------------------------------------

    def _mark(self, which: int, value: int) -> None:
        """Note outside SQLite what was reached. Not synced: it may be behind, it is never ahead."""
        self._marks[which] = value
        line = " ".join(f"{mark:019d}" for mark in self._marks) + f" {row_checksum(self.run, *self._marks)}\n"
        with suppress(DiskFull), writing(self.folder / "ACKNOWLEDGED"):
            disk().pwrite(self._descriptors[1], line.encode(), 0)

    def _read_marks(self, line: bytes) -> list[int]:
        """As `_mark` wrote them; of a damaged file nothing, since it only has what controller.db has."""
        with suppress(ValueError):
            *marks, checksum = line.decode().split()
            numbers = [int(mark) for mark in marks]
            if checksum == row_checksum(self.run, *numbers):
                return numbers
        return [0, 0, 0, 0]

    # --- what the run was begun with ------------------------------------------------------------------

    def _read_run(self) -> tuple[int, str | None]:
        rows = self._db.select("SELECT run, epoch, facts, seal FROM run")
        if len(rows) != 1 or rows[0][3] != row_checksum("run", *rows[0][:3]):
            raise self._db.damaged("the row of the run is not as it was written")
        self.run, epoch, facts, _ = rows[0]
        return epoch, facts

    def _write_run(self, epoch: int, facts: str | None) -> None:
        checksum = row_checksum("run", self.run, epoch, facts)
        self._db.change("UPDATE run SET epoch = ?, facts = ?, seal = ?", epoch, facts, checksum)

    def facts(self) -> dict[str, Any] | None:
        """What the run was begun with; None before that."""
        facts = self._read_run()[1]
        return None if facts is None else cast("dict[str, Any]", json.loads(facts))

    def begin(self, facts: dict[str, Any]) -> None:
        """Note for ever what the run is begun with."""
        with self._lock:
            if self.facts() is not None:
                raise ValueError(f"the run in {self.folder} was already begun")
            self._write_run(self.epoch, as_json(facts))
            self._mark(1, 1)

    # --- the journal ----------------------------------------------------------------------------------

    def together(self, *, synced: bool = True) -> AbstractContextManager[None]:
        """What is appended in the block is durable when it ends, after one wait for the disk; if it raises, nothing is.

        Until then nobody outside finds it. What need not be `synced` is durable with the next entry that must be.
        """
        return self.journal.together(synced=synced)

    def append(
        self,
        at: float,
        record: dict[str, Any],
        *,
        update: int | None = None,
        blob: str | None = None,
        content: bytes | None = None,
        synced: bool = True,
    ) -> int:
        """Journal one event, durably, and return its number; an update that is there already: `DuplicateUpdate`.

        With its `content` a small local model is in the journal too, and needs no file. What need not be `synced` is
        durable together with the next entry that must be.
        """
        with self._lock:
            if blob is not None and content is None:
                self.blob_path(blob)
            try:
                return self.journal.append(at, record, update, blob, content, synced)
            except DuplicateUpdate:
                self.blobs.release(blob)
                raise

    def find(self, update: int) -> Entry | None:
        """The entry that answers this task; also when its blob has long been collected."""
        return self.journal.find(update)

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries with a greater number, also those that are appended meanwhile."""
        return self.journal.entries(after)

    def last_seq(self) -> int:
        """Number of the newest entry; 0 if there is none."""
        return self.journal.last

    def _journaled(self, entries: Sequence[Entry]) -> None:
        """These are in the journal for good."""
        for entry in entries:
            if entry.blob is not None:
                self.blobs.need([entry.blob])
                self.blobs.release(entry.blob)
        self._mark(3, entries[-1].seq)

    # --- blobs ----------------------------------------------------------------------------------------

    def incoming(self, task: int | None = None, checksum: str = "") -> Incoming:
        """Somewhere to write a model that is being received; what was received of this one before is continued."""
        return self.blobs.incoming(task, checksum)

    def put_blob(
        self, parts: Iterable[memoryview], *, durable: bool | None = None, also: Digest | None = None
    ) -> str:  # fmt: skip
        """Keep these bytes and return their SHA-256; `durable` overrides the folder's level, `also` gets them too."""
        return self.blobs.put(parts, durable=durable, also=also)

    def put_small(self, content: bytes) -> str:
        """Keep the bytes of a small model in the journal and return their SHA-256."""
        name = hashlib.sha256(content).hexdigest()
        with self._lock:
            self.journal.put(name, content)
            self.blobs.need([name])
        return name

    def has_blob(self, name: str) -> bool:
        """Whether it is there, in the journal or as a file."""
        return name in self.journal.contents or (self.blobs.folder / name).is_file()

    def sync_blob(self, name: str) -> None:
        """Make a blob durable that was put without; what is in the journal is."""
        if name not in self.journal.contents:
            self.blobs.sync(name)

    def blob_path(self, name: str) -> Path:
        """The file of a blob that is there; made now if it is in the journal."""
        content = None if (self.blobs.folder / name).is_file() else self.journal.content(name)
        if content is not None:
            self.blobs.restore(name, content)
        return self.blobs.path(name)

    def verify_blob(self, name: str) -> bool:
        """Whether a blob is there and whole; what is not whole is moved to quarantine/."""
        content = self.journal.content(name)
        return self.blobs.verify(name) if content is None else checksum_of(content, name) == checksum_in(name)

    def collect(self, keep: Collection[str]) -> int:
        """Delete the blobs that nobody needs and return how many.

        Kept are those in `keep`, those that the snapshots need, those of entries after the older snapshot, from which
        replaying may have to start, those that came since the last collection, and, for a time, those that were
        received and are not yet journaled.
        """
        with self._collecting:
            with self._lock:
                snapshots = self.snapshots()
                oldest = snapshots[1].seq if len(snapshots) > 1 else 0
                journaled = self._db.select("SELECT blob FROM journal WHERE seq > ? AND blob IS NOT NULL", oldest)
                kept = {*keep, *self.blobs.begin_collection(), *(name for (name,) in journaled)}
                kept.update(name for snapshot in snapshots for name in snapshot.blobs)
                with suppress(DiskFull):  # then the next collection does it
                    self.journal.delete_contents(self.journal.contents - kept)
            return self.blobs.delete_others(kept)

    # --- snapshots ------------------------------------------------------------------------------------

    def write_snapshot(
        self, seq: int, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any], blobs: Collection[str] = ()
    ) -> None:
        """Keep the state after entry `seq`, durably; of earlier snapshots one stays, in case this one is damaged."""
        text, needed = as_json(facts), json.dumps(sorted(blobs))
        with self._lock:
            if not max((known.seq for known in self.snapshots()), default=0) <= seq <= self.last_seq():
                raise ValueError(f"a snapshot after entry {seq} is older than the last one, or newer than the journal")
            for blob in blobs:
                if blob not in self.journal.contents:
                    self.blob_path(blob)
            self.blobs.need(blobs)
        for blob in sorted(blobs):
            self.sync_blob(blob)
        path = self._snapshots / f"{seq:012d}-{token_hex(4)}.safetensors"
        try:
            with writing(path):
                storage().save_arrays(path, arrays, {"run": self.run, "seq": str(seq)})
                if self._durable:
                    sync(path)
                    sync(self._snapshots)
            with self._lock:
                number = self._marks[2] + 1
                checksum = row_checksum("snapshot", number, seq, path.name, text, needed)
                values = (number, seq, path.name, text, needed, checksum)
                self._db.change("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?, ?, 0)", *values)
                self._mark(2, number)
        except DiskFull:
            for left in (path, path.with_name(path.name + ".new")):
                with suppress(OSError):  # then it goes when the folder is opened next
                    left.unlink()
            raise
        self._forget_snapshots()

    def _forget_snapshots(self) -> None:
        """All before the last two that are not known to be damaged."""
        before = "number < (SELECT number FROM snapshot WHERE NOT damaged ORDER BY number DESC LIMIT 1 OFFSET 1)"
        with self._lock, suppress(DiskFull):  # then the next snapshot does it
            names = self._db.select(f"SELECT arrays FROM snapshot WHERE {before}")
            if names:
                self._db.change(f"DELETE FROM snapshot WHERE {before}")
            for (name,) in names:
                with writing(self._snapshots / name):
                    (self._snapshots / name).unlink(missing_ok=True)

    def snapshots(self) -> list[Snapshot]:
        """The newest first; at most two."""
        sound = []
        for *values, checksum, damaged in self._db.select("SELECT * FROM snapshot ORDER BY number DESC"):
            if checksum != row_checksum("snapshot", *values):
                raise self._db.damaged(f"snapshot {values[0]} is not as it was written")
            if not damaged:
                _, seq, arrays, facts, blobs = values
                sound.append(Snapshot(seq, arrays, json.loads(facts), tuple(json.loads(blobs))))
        return sound[:2]

    def load_snapshot(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        """Its arrays, mapped; a DataError says that they are damaged, and then it is not offered again."""
        path = self._snapshots / snapshot.arrays
        try:
            arrays, metadata = storage().load_arrays(path, mapped=True)
            if metadata != {"run": self.run, "seq": str(snapshot.seq)}:
                raise DataError(f"{path} is damaged: it is not the snapshot after entry {snapshot.seq} of this run")
        except DataError:
            with self._lock, suppress(DiskFull):
                self._db.change("UPDATE snapshot SET damaged = 1 WHERE arrays = ?", snapshot.arrays)
            raise
        return arrays

    # --- the disk -------------------------------------------------------------------------------------

    def usage(self) -> int:
        """Bytes of all files."""
        return sum(map(_bytes_of, (self.folder, self.blobs.folder, self._snapshots, self._quarantine)))

    def measure_commit(self) -> float:
        """Seconds that one durable change takes on this disk, without a blob."""
        seconds = []
        for _ in range(5):
            with self._lock:
                start = monotonic()
                self._db.change("UPDATE run SET probe = probe + 1")
                seconds.append(monotonic() - start)
        return statistics.median(seconds)
