"""The durable state folder of a controller: what `append` has returned for is on disk, exactly once.

    controller.db   the journal of events, what the run was begun with, the list of snapshots (SQLite with a WAL)
    blobs/SHA256    models, each named by its bytes; blobs/tmp.* are still being received
    snapshots/      arrays that spare replaying the journal from its first entry
    quarantine/     blobs whose bytes no longer give their name
    LOCK            held by the one controller that uses the folder
    ACKNOWLEDGED    how far controller.db had come

Every change is one SQLite statement, so there is never half of one. SQLite itself would not notice a flipped bit in
a row, and takes a damaged end of its WAL for one that was never written; hence a seal on every row, and ACKNOWLEDGED.
A full disk raises `DiskFull` and changes nothing. After any other error in writing nobody knows what is on the disk,
and asking again is answered wrongly, so the process ends; the next one reads what is really there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import sqlite3
import statistics
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias, cast

from metis.deployment.wire.transfer import in_background
from metis.errors import ConfigError, DataError, LearnerError, MetisError
from metis.files import LockHeld, sync, take_lock

if TYPE_CHECKING:
    from numpy.typing import NDArray

Durability: TypeAlias = Literal["power", "process"]  # what an acknowledged update survives the sudden end of

EXIT_DISK_FAILED = 74  # EX_IOERR
_FORMAT = 1
_APPLICATION = 0x4D657469  # "Meti"
_TABLES = (
    "CREATE TABLE run (run TEXT, epoch INTEGER, facts TEXT, seal TEXT, probe INTEGER)",
    "CREATE TABLE journal (seq INTEGER PRIMARY KEY, at REAL, record TEXT, task INTEGER UNIQUE, blob TEXT, seal TEXT)",
    "CREATE TABLE snapshot (number INTEGER PRIMARY KEY, seq INTEGER, arrays TEXT, facts TEXT, blobs TEXT, seal TEXT,"
    " damaged INTEGER)",
)
_PAGE = 256  # entries read at once
_MANY = 4 << 20  # bytes that are worth a second thread
_AT_ONCE = 1 << 20  # bytes in one call; for more the system takes larger pages, which it may have given away
_CHECKPOINT_EVERY = 256  # changes; keeps the WAL at a few MB
_HOLD_SECONDS = 600  # far more than an update waits for its turn to be journaled
EXHAUSTED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_SHA256 = re.compile("[0-9a-f]{64}")
RESTORE = "restore the folder from a copy, or begin a new run in another folder"


class StateError(ConfigError):
    """A state folder cannot be used: another controller has it, another version made it, or it is damaged."""


class DiskFull(MetisError):
    """There was no room; nothing has changed, and it works again when there is."""


class DuplicateUpdate(LearnerError):
    """This task was already answered, by the entry that this carries."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(f"task {entry.update} was already answered by entry {entry.seq} of the journal")
        self.entry = entry


class BlobMismatch(ValueError):
    """What was received is not what was announced."""


class Digest(Protocol):
    """What gets all bytes of a model."""

    def update(self, data: bytes | memoryview, /) -> object: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One journaled event."""

    seq: int  # 1, 2, 3, ...
    at: float  # on the run's clock
    record: dict[str, Any]  # `trace.to_record` of it
    update: int | None  # number of the task that it answers with a model; no two entries have the same
    blob: str | None  # SHA-256 of that model's bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where replaying may start."""

    seq: int  # the state after this entry
    arrays: str  # name of a file in snapshots/
    facts: dict[str, Any]
    blobs: tuple[str, ...]  # that the state needs; they are not collected before the snapshot goes


def _seal(*values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    from metis.runs.trace import plain_number  # numpy is slow to import, and seldom needed here

    return plain_number(value)


def _end_process(path: Path, problem: object) -> NoReturn:
    text = f"{path}: {problem}; the controller stops, because it cannot know what is on the disk. "
    text += "It goes on from all that was acknowledged: restart with the same command when the disk is well.\n"
    with suppress(OSError):
        os.write(2, text.encode())
    os._exit(EXIT_DISK_FAILED)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Sort the errors of writing: no room, damage, and those after which nobody may go on."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in EXHAUSTED:
            _end_process(path, problem.strerror)
        raise DiskFull(f"no room to write {path}: {problem.strerror}") from problem
    except sqlite3.Error as problem:
        if "disk is full" in str(problem):
            raise DiskFull(f"no room to write {path}: {problem}") from problem
        if "disk I/O error" in str(problem):
            _end_process(path, problem)
        raise StateError(f"{path} cannot be written: {problem}; {RESTORE}") from problem


class State:
    """A controller's durable memory. Any thread may call anything; changes happen one after the other."""

    epoch: int  # how often the folder was opened; fences whatever an earlier controller still says
    run: str  # made at random when the folder was made

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.folder = folder
        self._durable = durability == "power"
        self._journal, self._blobs = folder / "controller.db", folder / "blobs"
        self._snapshots, self._quarantine = folder / "snapshots", folder / "quarantine"
        self._db: sqlite3.Connection | None = None
        self._lock = threading.RLock()
        self._collecting = threading.Lock()  # a second collection would forget what is fresh to the first
        self._descriptors: list[int] = []  # of LOCK and ACKNOWLEDGED
        self._marks = [0, 0, 0, 0]  # epoch, whether begun, number of the newest snapshot, last entry: none ever falls
        self._changes = 0
        self._held: dict[str, float] = {}  # blobs that were received and not yet journaled, and when
        self._fresh: set[str] = set()  # blobs that came or were named since the last collection began

    # --- opening and closing ------------------------------------------------------------------------

    @staticmethod
    def open(folder: Path, durability: Durability = "power") -> State:
        """Make the folder, or recover what is in it; a StateError says why that cannot be."""
        state = State(folder, durability)
        try:
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state._take_lock()
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

    def _take_lock(self) -> None:
        try:
            self._descriptors.append(take_lock(self.folder / "LOCK"))
        except LockHeld as held:
            raise StateError(
                f"{self.folder} is in use by a controller{' with ' * bool(held.holder)}{held.holder}; "
                "stop that one first, or give this one another folder"
            ) from held

    def _recover(self) -> None:
        acknowledged = self.folder / "ACKNOWLEDGED"
        begun = acknowledged.exists() or (self._blobs.is_dir() and any(self._blobs.iterdir()))
        if begun and not (self._journal.exists() and self._journal.stat().st_size):
            raise StateError(f"{self._journal} is missing or empty, but {self.folder} holds a run: {RESTORE}")
        for folder in (self._blobs, self._snapshots, self._quarantine):
            folder.mkdir(exist_ok=True)
        self._db = sqlite3.connect(self._journal, timeout=1, isolation_level=None, check_same_thread=False)
        self._prepare_database(self._db, begun)
        epoch, facts = self._read_run()
        ((entries, first, last),) = self._select("SELECT count(*), min(seq), max(seq) FROM journal")
        if entries and (first, last) != (1, entries):
            raise self._damaged(f"it has {entries} entries, from {first} to {last}")
        self.snapshots()  # are as they were written
        listed = dict(self._select("SELECT arrays, number FROM snapshot"))
        marks = [epoch, int(facts is not None), max(listed.values(), default=0), entries]
        descriptor = os.open(acknowledged, os.O_RDWR | os.O_CREAT, 0o600)
        self._descriptors.append(descriptor)
        seen = self._read_marks(os.pread(descriptor, 500, 0))
        if any(have < once for have, once in zip(marks, seen, strict=True)):
            raise StateError(
                f"{self._journal} has lost what was acknowledged: it ends with entry {entries} of epoch {epoch}, and "
                f"once ended with entry {seen[3]} of epoch {seen[0]}; {RESTORE}, or delete {acknowledged} to go on "
                "with what is left"
            )
        for path in [*self._blobs.glob("tmp.*"), *(p for p in self._snapshots.iterdir() if p.name not in listed)]:
            path.unlink()
        self._marks = marks
        self.epoch = epoch + 1
        self._write_run(self.epoch, facts)
        self._mark(0, self.epoch)

    def _prepare_database(self, db: sqlite3.Connection, begun: bool) -> None:
        """Check that this is a whole journal of this version, or make an empty one."""

        def pragma(text: str) -> Any:
            return db.execute(f"PRAGMA {text}").fetchone()[0]

        try:
            pragma("locking_mode=EXCLUSIVE")  # before the WAL is touched: so it needs no shared memory
            mode = pragma("journal_mode=WAL")  # which can fail without an error
            if mode != "wal":
                raise StateError(f"{self._journal} is in SQLite's mode {mode!r} and cannot be put in 'wal'")
            for setting in ("wal_autocheckpoint=0", "temp_store=MEMORY", "trusted_schema=OFF", "cell_size_check=ON"):
                db.execute(f"PRAGMA {setting}").close()
            db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}").close()
            made = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
            tables = tuple(sql for (sql,) in made)
            if not tables and not begun:
                self._make_tables(db)
                return
            if not tables:
                raise self._damaged("its tables are missing")
            application, version = pragma("application_id"), pragma("user_version")
            if application != _APPLICATION:
                raise StateError(f"{self._journal} is not the journal of a controller: {RESTORE}")
            if version != _FORMAT:
                age = "a newer" if version > _FORMAT else "an older"
                raise StateError(
                    f"{self._journal} was made by {age} version of Metis (format {version}; this one reads {_FORMAT}): "
                    "use that version, or begin a new run in another folder"
                )
            if tables != _TABLES:
                raise self._damaged("its tables are not those that were made")
            answer = pragma("integrity_check(1)")
            if answer != "ok":
                raise self._damaged(answer)
        except sqlite3.OperationalError as problem:
            if "locked" in str(problem):
                raise StateError(f"{self._journal} is open in another program; close that first") from problem
            raise
        except sqlite3.DatabaseError as problem:
            raise self._damaged(problem) from problem

    def _make_tables(self, db: sqlite3.Connection) -> None:
        self.run = secrets.token_hex(8)
        db.execute("BEGIN IMMEDIATE")
        for sql in _TABLES:
            db.execute(sql)
        seal = _seal("run", self.run, 0, None)
        db.execute("INSERT INTO run VALUES (?, 0, NULL, ?, 0)", (self.run, seal))
        db.execute(f"PRAGMA application_id={_APPLICATION}")
        db.execute(f"PRAGMA user_version={_FORMAT}")
        db.execute("COMMIT")

    def close(self) -> None:
        """Leave the folder tidy, and to the next controller."""
        with self._lock:
            if self._db is not None:
                self._checkpoint("TRUNCATE")
            self._release()

    def _release(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> State:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    # --- SQLite ---------------------------------------------------------------------------------------

    def _damaged(self, what: object) -> StateError:
        reason = str(what).strip().splitlines()[-1]  # SQLite has a heading
        return StateError(f"{self._journal} is damaged ({reason}); {RESTORE}")

    def _select(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            assert self._db is not None, "the state is closed"
            try:
                return self._db.execute(sql, values).fetchall()
            except sqlite3.Error as problem:
                raise self._damaged(problem) from problem

    def _change(self, sql: str, *values: object) -> None:
        """One statement, which is one transaction; durable when this returns. The caller holds the lock."""
        assert self._db is not None, "the state is closed"
        with _writing(self._journal):
            try:
                self._db.execute(sql, values)
            finally:
                if self._db.in_transaction:
                    self._db.rollback()
        self._changes += 1
        if self._changes % _CHECKPOINT_EVERY == 0:
            self._checkpoint("PASSIVE")

    def _checkpoint(self, mode: str) -> None:
        """Move the WAL into the database; not by SQLite's own hook, which hides errors."""
        assert self._db is not None
        with suppress(DiskFull), _writing(self._journal):  # then it stays in the WAL, which is as good
            self._db.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()

    def _mark(self, which: int, value: int) -> None:
        """Note outside SQLite what was reached. Not synced: it may be behind, it is never ahead."""
        self._marks[which] = value
        line = " ".join(f"{mark:019d}" for mark in self._marks) + f" {_seal(self.run, *self._marks)}\n"
        with suppress(DiskFull), _writing(self.folder / "ACKNOWLEDGED"):
            os.pwrite(self._descriptors[1], line.encode(), 0)

    def _read_marks(self, line: bytes) -> list[int]:
        """As `_mark` wrote them; of a damaged file nothing, since it only has what controller.db has."""
        with suppress(ValueError):
            *marks, seal = line.decode().split()
            numbers = [int(mark) for mark in marks]
            if seal == _seal(self.run, *numbers):
                return numbers
        return [0, 0, 0, 0]

    # --- what the run was begun with ------------------------------------------------------------------

    def _read_run(self) -> tuple[int, str | None]:
        rows = self._select("SELECT run, epoch, facts, seal FROM run")
        if len(rows) != 1 or rows[0][3] != _seal("run", *rows[0][:3]):
            raise self._damaged("the row of the run is not as it was written")
        self.run, epoch, facts, _ = rows[0]
        return epoch, facts

    def _write_run(self, epoch: int, facts: str | None) -> None:
        seal = _seal("run", self.run, epoch, facts)
        self._change("UPDATE run SET epoch = ?, facts = ?, seal = ?", epoch, facts, seal)

    def facts(self) -> dict[str, Any] | None:
        """What the run was begun with; None before that."""
        facts = self._read_run()[1]
        return None if facts is None else cast("dict[str, Any]", json.loads(facts))

    def begin(self, facts: dict[str, Any]) -> None:
        """Note for ever what the run is begun with."""
        with self._lock:
            if self.facts() is not None:
                raise ValueError(f"the run in {self.folder} was already begun")
            self._write_run(self.epoch, _json(facts))
            self._mark(1, 1)

    # --- the journal ----------------------------------------------------------------------------------

    def append(self, at: float, record: dict[str, Any], *, update: int | None = None, blob: str | None = None) -> int:
        """Journal one event, durably, and return its number; an update that is there already: `DuplicateUpdate`."""
        at, text = float(at) + 0.0, _json(record)  # SQLite knows no -0.0
        with self._lock:
            if update is not None and (known := self.find(update)):
                self._held.pop(blob or "", None)
                raise DuplicateUpdate(known)
            if blob is not None:
                self.blob_path(blob)
            seq = self.last_seq() + 1
            seal = _seal("journal", seq, at, text, update, blob)
            self._change("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", seq, at, text, update, blob, seal)
            if blob is not None:
                self._fresh.add(blob)
                self._held.pop(blob, None)
            self._mark(3, seq)
            return seq

    def find(self, update: int) -> Entry | None:
        """The entry that answers this task; also when its blob has long been collected."""
        if not -(2**63) <= update < 2**63:
            return None
        rows = self._select("SELECT * FROM journal WHERE task = ?", update)
        return self._entry(rows[0]) if rows else None

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries with a greater number, also those that are appended meanwhile."""
        while rows := self._select("SELECT * FROM journal WHERE seq > ? ORDER BY seq LIMIT ?", after, _PAGE):
            for row in rows:
                entry = self._entry(row)
                if entry.seq != after + 1:
                    raise self._damaged(f"entry {after + 1} is missing")
                after = entry.seq
                yield entry

    def last_seq(self) -> int:
        """Number of the newest entry; 0 if there is none."""
        ((last,),) = self._select("SELECT coalesce(max(seq), 0) FROM journal")
        return int(last)

    def _entry(self, row: tuple[Any, ...]) -> Entry:
        seq, at, record, update, blob, seal = row
        if seal != _seal("journal", seq, at, record, update, blob):
            raise self._damaged(f"entry {seq} is not as it was written")
        return Entry(seq, at, json.loads(record), update, blob)

    # --- blobs ----------------------------------------------------------------------------------------

    def incoming(self) -> Incoming:
        """Somewhere to write a model that is being received."""
        return Incoming(self, self._durable, held=True)

    def put_blob(
        self, parts: Iterable[memoryview], *, durable: bool | None = None, seal: Digest | None = None
    ) -> str:  # fmt: skip
        """Keep these bytes and return their SHA-256; `durable` overrides the folder's level, `seal` gets them too."""
        with Incoming(self, self._durable if durable is None else durable, held=False, seal=seal) as incoming:
            for part in parts:
                incoming.write(part)
            return incoming.commit(incoming.bytes, incoming.sha256)

    def _adopt(self, path: Path, sha256: str, durable: bool, held: bool) -> None:
        """Give a file its name, also over an old one, which may be damaged."""
        target = self._blobs / sha256
        with self._lock, _writing(path):
            if self._durable and not durable and target.exists():
                sync(path)  # the old one may be durable, and promised
                durable = True
            self._fresh.add(sha256)
            if held:
                self._held[sha256] = time.monotonic()
            path.replace(target)
        if durable:
            self._sync_folder(self._blobs)

    def _sync_folder(self, folder: Path) -> None:
        try:
            sync(folder)
        except OSError as problem:  # a full disk too: the new name is there already
            _end_process(folder, problem.strerror)

    def sync_blob(self, sha256: str) -> None:
        """Make a blob durable that was put without."""
        if self._durable:
            path = self.blob_path(sha256)
            with _writing(path):
                sync(path)
            self._sync_folder(self._blobs)

    def blob_path(self, sha256: str) -> Path:
        """The file of a blob that is there."""
        path = self._blobs / sha256
        if not _SHA256.fullmatch(sha256) or not path.is_file():
            raise DataError(f"there is no model {sha256} in {self._blobs}")
        return path

    def verify_blob(self, sha256: str) -> bool:
        """Whether a blob is there and whole; what is not whole is moved to quarantine/."""
        path = self._blobs / sha256
        try:
            file = self.blob_path(sha256).open("rb", buffering=0)
        except (DataError, FileNotFoundError):
            return False
        except OSError as problem:
            raise DataError(f"{path} cannot be read: {problem.strerror}") from problem
        with file:
            digest = hashlib.sha256()
            with suppress(OSError):  # a bad sector
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            if digest.hexdigest() == sha256:
                return True
            with self._lock, _writing(path), suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):  # else a fresh one came meanwhile
                    path.replace(self._quarantine / sha256)
            return False

    def collect(self, keep: Collection[str]) -> int:
        """Delete the blobs that nobody needs and return how many.

        Kept are those in `keep`, those that the snapshots need, those of entries after the older snapshot, from which
        replaying may have to start, those that came since the last collection, and, for a time, those that were
        received and are not yet journaled.
        """
        with self._collecting:
            return self._collect(keep)

    def _collect(self, keep: Collection[str]) -> int:
        with self._lock:
            waiting = time.monotonic() - _HOLD_SECONDS
            self._held = {name: since for name, since in self._held.items() if since > waiting}
            snapshots = self.snapshots()
            oldest = snapshots[1].seq if len(snapshots) > 1 else 0
            journaled = self._select("SELECT blob FROM journal WHERE seq > ? AND blob IS NOT NULL", oldest)
            kept = {*keep, *self._fresh, *self._held, *(name for (name,) in journaled)}
            kept.update(name for snapshot in snapshots for name in snapshot.blobs)
            self._fresh = set()
        with _writing(self._blobs):
            present = list(self._blobs.iterdir())
        deleted = 0
        for path in present:
            if path.name in kept or path.name.startswith("tmp."):
                continue
            with self._lock, _writing(path):  # one at a time: others want to append
                if path.name not in self._fresh:  # the same bytes may have come again
                    path.unlink(missing_ok=True)
                    deleted += 1
        return deleted

    # --- snapshots ------------------------------------------------------------------------------------

    def write_snapshot(
        self, seq: int, arrays: Mapping[str, NDArray[Any]], facts: dict[str, Any], blobs: Collection[str] = ()
    ) -> None:
        """Keep the state after entry `seq`, durably; of earlier snapshots one stays, in case this one is damaged."""
        from safetensors import SafetensorError

        from metis.runs.storage import save_arrays

        text, needed = _json(facts), json.dumps(sorted(blobs))
        with self._lock:
            if not max((known.seq for known in self.snapshots()), default=0) <= seq <= self.last_seq():
                raise ValueError(f"a snapshot after entry {seq} is older than the last one, or newer than the journal")
            for blob in blobs:
                self.blob_path(blob)
            self._fresh.update(blobs)
        for blob in blobs:
            self.sync_blob(blob)
        path = self._snapshots / f"{seq:012d}-{secrets.token_hex(4)}.safetensors"
        try:
            with _writing(path):
                try:
                    save_arrays(path, arrays, {"run": self.run, "seq": str(seq)})
                except SafetensorError as problem:
                    code = re.search(r"os error (\d+)", str(problem))
                    raise OSError(int(code[1]) if code else errno.EIO, str(problem)) from problem
                if self._durable:
                    sync(path)
                    sync(self._snapshots)
            with self._lock:
                number = self._marks[2] + 1
                seal = _seal("snapshot", number, seq, path.name, text, needed)
                values = (number, seq, path.name, text, needed, seal)
                self._change("INSERT INTO snapshot VALUES (?, ?, ?, ?, ?, ?, 0)", *values)
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
            names = self._select(f"SELECT arrays FROM snapshot WHERE {before}")
            if names:
                self._change(f"DELETE FROM snapshot WHERE {before}")
            for (name,) in names:
                with _writing(self._snapshots / name):
                    (self._snapshots / name).unlink(missing_ok=True)

    def snapshots(self) -> list[Snapshot]:
        """The newest first; at most two."""
        sound = []
        for *values, seal, damaged in self._select("SELECT * FROM snapshot ORDER BY number DESC"):
            if seal != _seal("snapshot", *values):
                raise self._damaged(f"snapshot {values[0]} is not as it was written")
            if not damaged:
                _, seq, arrays, facts, blobs = values
                sound.append(Snapshot(seq, arrays, json.loads(facts), tuple(json.loads(blobs))))
        return sound[:2]

    def load_snapshot(self, snapshot: Snapshot) -> dict[str, NDArray[Any]]:
        """Its arrays; a DataError says that they are damaged, and then it is not offered again."""
        from metis.runs.storage import load_arrays

        path = self._snapshots / snapshot.arrays
        try:
            arrays, metadata = load_arrays(path)
            if metadata != {"run": self.run, "seq": str(snapshot.seq)}:
                raise DataError(f"{path} is damaged: it is not the snapshot after entry {snapshot.seq} of this run")
        except DataError:
            with self._lock, suppress(DiskFull):
                self._change("UPDATE snapshot SET damaged = 1 WHERE arrays = ?", snapshot.arrays)
            raise
        return arrays

    # --- the disk -------------------------------------------------------------------------------------

    def usage(self) -> int:
        """Bytes of all files."""
        total = 0
        for folder in (self.folder, self._blobs, self._snapshots, self._quarantine):
            with _writing(folder):
                paths = list(folder.iterdir())
            for path in paths:
                with suppress(FileNotFoundError):  # gone meanwhile
                    total += path.stat().st_size if path.is_file() else 0
        return total

    def measure_commit(self) -> float:
        """Seconds that one durable change takes on this disk, without a blob."""
        seconds = []
        for _ in range(5):
            with self._lock:
                start = time.perf_counter()
                self._change("UPDATE run SET probe = probe + 1")
                seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


class Incoming:
    """One model on its way into the folder; what is not committed leaves no trace. For one thread at a time."""

    def __init__(self, state: State, durable: bool, held: bool, seal: Digest | None = None) -> None:
        self._state, self._durable, self._held, self._seal = state, durable, held, seal
        self._path = state.folder / "blobs" / f"tmp.{secrets.token_hex(8)}"
        self._digest = hashlib.sha256()
        self.bytes = 0
        self._committed = False
        with _writing(self._path):
            self._file = self._path.open("xb", buffering=0)

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
        with _writing(self._path):
            while rest:
                written = self._file.write(rest[:_AT_ONCE])
                if self._seal is not None:
                    self._seal.update(rest[:written])
                rest = rest[written:]

    def content(self) -> bytes:
        """What was written so far."""
        return self._path.read_bytes()

    def commit(self, expected_bytes: int, expected_sha256: str) -> str:
        """Check what was written against what was announced and give it its name, durably; returns the SHA-256."""
        if self.bytes != expected_bytes:
            raise BlobMismatch(f"{self.bytes} bytes came, but {expected_bytes} were announced")
        if self.sha256 != expected_sha256:
            raise BlobMismatch(
                f"the bytes that came have the SHA-256 {self.sha256}, not {expected_sha256} as announced"
            )
        with _writing(self._path):
            if self._durable:
                os.fsync(self._file.fileno())
            self._file.close()
        self._state._adopt(self._path, self.sha256, self._durable, self._held)
        self._committed = True
        return self.sha256

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *reason: object) -> None:
        if not self._committed:
            with suppress(DiskFull), _writing(self._path):
                self._file.close()
                self._path.unlink(missing_ok=True)
