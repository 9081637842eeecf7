"""The SQLite database of a state folder: every row carries a checksum, or in its name that of the model that it holds.

SQLite itself would not notice a flipped bit in a row, and takes a damaged end of its WAL for one that was never
written; hence the checksums here, and the file ACKNOWLEDGED next to it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from metis.deployment.controller.disk import RESTORE, writing
from metis.errors import DiskFull, StateError
from metis.system import Lock, disk, token_hex

_FORMAT = 3
_READABLE = (1, 2, 3)  # in format 1 every model is named by a SHA-256; format 3 adds small local models, as a table
_APPLICATION = 0x4D657469  # "Meti"
_TABLES = (
    "CREATE TABLE run (run TEXT, epoch INTEGER, facts TEXT, seal TEXT, probe INTEGER)",
    "CREATE TABLE journal (seq INTEGER PRIMARY KEY, at REAL, record TEXT, task INTEGER UNIQUE, blob TEXT, seal TEXT)",
    "CREATE TABLE snapshot (number INTEGER PRIMARY KEY, seq INTEGER, arrays TEXT, facts TEXT, blobs TEXT, seal TEXT,"
    " damaged INTEGER)",
    "CREATE TABLE content (name TEXT PRIMARY KEY, bytes BLOB)",
)
_CHECKPOINT_EVERY = 256  # changes, one of which may be a small model for each 4 KiB; keeps the WAL at a few MB


def row_checksum(*values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


class Database:
    """controller.db; `lock` is that of the state."""

    def __init__(self, path: Path, durable: bool, lock: Lock, *, begun: bool) -> None:
        """Open the database, or make one for a run that is not `begun`."""
        self.path, self._durable, self._lock = path, durable, lock
        self._changes = self._checkpointed = 0
        self._together = False  # a transaction of several statements is open
        self._connection: sqlite3.Connection | None = disk().connect(path)
        try:
            self._prepare(self._connection, begun)
        except BaseException:
            self.close()
            raise

    def _prepare(self, db: sqlite3.Connection, begun: bool) -> None:
        """Check that this is a whole journal of this version, or make an empty one."""

        def pragma(text: str) -> Any:
            return db.execute(f"PRAGMA {text}").fetchone()[0]

        try:
            pragma("locking_mode=EXCLUSIVE")  # before the WAL is touched: so it needs no shared memory
            mode = pragma("journal_mode=WAL")  # which can fail without an error
            if mode != "wal":
                raise StateError(f"{self.path} is in SQLite's mode {mode!r} and cannot be put in 'wal'")
            for setting in ("wal_autocheckpoint=0", "temp_store=MEMORY", "trusted_schema=OFF", "cell_size_check=ON"):
                db.execute(f"PRAGMA {setting}").close()
            db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}").close()
            made = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
            tables = tuple(sql for (sql,) in made)
            if not tables and not begun:
                self._make_tables(db)
                return
            if not tables:
                raise self.damaged("its tables are missing")
            application, version = pragma("application_id"), pragma("user_version")
            if application != _APPLICATION:
                raise StateError(f"{self.path} is not the journal of a controller: {RESTORE}")
            if version not in _READABLE:
                age = "a newer" if version > _FORMAT else "an older"
                raise StateError(
                    f"{self.path} was made by {age} version of Metis (format {version}; this one reads {_FORMAT}): "
                    "use that version, or begin a new run in another folder"
                )
            if tables != (_TABLES if version == _FORMAT else _TABLES[:3]):
                raise self.damaged("its tables are not those that were made")
            answer = pragma("integrity_check(1)")
            if answer != "ok":
                raise self.damaged(answer)
            # After a failed write the system may show what it never wrote, and call it written. So nothing is built on
            # the WAL of an earlier process: the database is written from it, and that is waited for.
            with writing(self.path):
                if version != _FORMAT:
                    db.execute("BEGIN IMMEDIATE")
                    db.execute(_TABLES[3])
                    db.execute(f"PRAGMA user_version={_FORMAT}").close()
                    db.execute("COMMIT")
                busy = pragma("wal_checkpoint(TRUNCATE)")
            if busy:
                raise StateError(f"{self.path} is open in another program; close that first")
        except sqlite3.OperationalError as problem:
            if "locked" in str(problem):
                raise StateError(f"{self.path} is open in another program; close that first") from problem
            raise
        except sqlite3.DatabaseError as problem:
            raise self.damaged(problem) from problem

    def _make_tables(self, db: sqlite3.Connection) -> None:
        run = token_hex(8)
        db.execute("BEGIN IMMEDIATE")
        for sql in _TABLES:
            db.execute(sql)
        checksum = row_checksum("run", run, 0, None)
        db.execute("INSERT INTO run VALUES (?, 0, NULL, ?, 0)", (run, checksum))
        db.execute(f"PRAGMA application_id={_APPLICATION}")
        db.execute(f"PRAGMA user_version={_FORMAT}")
        db.execute("COMMIT")

    def damaged(self, what: object) -> StateError:
        reason = str(what).strip().splitlines()[-1]  # SQLite has a heading
        return StateError(f"{self.path} is damaged ({reason}); {RESTORE}")

    def select(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            assert self._connection is not None, "the state is closed"
            try:
                return self._connection.execute(sql, values).fetchall()
            except sqlite3.Error as problem:
                raise self.damaged(problem) from problem

    def change(self, sql: str, *values: object, weight: int = 1) -> None:
        """One statement; durable when this returns, or with the transaction around it. The caller holds the lock."""
        assert self._connection is not None, "the state is closed"
        assert self._connection.in_transaction == self._together, "SQLite has given the transaction up"
        try:
            self._execute(sql, values)
        finally:
            if not self._together:
                self._undo()
        self._changes += weight
        if not self._together:
            self._checkpoint_soon()

    @contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[None]:
        """The changes in the block are durable together when it ends; if it raises, none was made.

        Those that are not `synced` are durable with the next ones that are. The caller holds the lock.
        """
        lazy = self._durable and not synced
        if lazy:
            self._execute("PRAGMA synchronous=NORMAL")
        try:
            self._execute("BEGIN IMMEDIATE")
            self._together = True
            yield
            self._execute("COMMIT")
        finally:
            self._together = False
            self._undo()
            if lazy:
                self._execute("PRAGMA synchronous=FULL")
        self._checkpoint_soon()

    def _execute(self, sql: str, values: tuple[object, ...] = ()) -> None:
        assert self._connection is not None, "the state is closed"
        with writing(self.path):
            self._connection.execute(sql, values).close()

    def _undo(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            self._connection.rollback()

    def _checkpoint_soon(self) -> None:
        if self._changes - self._checkpointed >= _CHECKPOINT_EVERY:
            self._checkpointed = self._changes
            self.checkpoint("PASSIVE")

    def checkpoint(self, mode: str) -> None:
        """Move the WAL into the database; not by SQLite's own hook, which hides errors."""
        assert self._connection is not None
        with suppress(DiskFull), writing(self.path):  # then it stays in the WAL, which is as good
            self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()

    @property
    def open(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
