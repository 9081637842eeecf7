"""The journal in a state folder's database: events in their order, and the small models that belong to them.

What `append` has returned for is on disk, exactly once. Several entries can wait for the disk together: nobody outside
finds one of them before all are there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from metis.deployment.controller.database import Database, row_checksum
from metis.errors import DuplicateUpdate
from metis.system import Lock

_PAGE = 256  # entries read at once
_WEIGHT = 4096  # bytes of a small model that count as one more change


@dataclass(frozen=True, slots=True)
class Entry:
    """One journaled event."""

    seq: int  # 1, 2, 3, ...
    at: float  # on the run's clock
    record: dict[str, Any]  # `trace.to_record` of it
    update: int | None  # number of the task that it answers with a model; no two entries have the same
    blob: str | None  # name of that model


def as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    from metis.runs.trace import plain_number  # numpy is slow to import, and seldom needed here

    return plain_number(value)


class Journal:
    """Appends to the tables `journal` and `content`; `lock` is that of the state."""

    def __init__(self, database: Database, lock: Lock, durable: Callable[[Sequence[Entry]], None]) -> None:
        """`durable` hears of entries that no loss of power can take back."""
        self._db, self._lock, self._durable = database, lock, durable
        ((entries, first, last),) = database.select("SELECT count(*), min(seq), max(seq) FROM journal")
        if entries and (first, last) != (1, entries):
            raise database.damaged(f"it has {entries} entries, from {first} to {last}")
        self.last: int = entries  # number of the newest entry
        self._answered = {task for (task,) in database.select("SELECT task FROM journal WHERE task IS NOT NULL")}
        self.contents = {name for (name,) in database.select("SELECT name FROM content")}  # small models, by name
        self._together: list[Entry] | None = None  # entries of a transaction that is not over
        self._added: set[str] = set()  # to `contents`, in that transaction

    @contextmanager
    def together(self, *, synced: bool = True) -> Iterator[None]:
        """See `State.together`."""
        with self._lock:
            last, entries = self.last, list[Entry]()
            try:
                with self._transaction(synced):
                    self._together = entries
                    yield
            except BaseException:
                self.last = last
                raise
            finally:
                self._together = None
            if synced:
                self._note(entries)

    def append(
        self,
        at: float,
        record: dict[str, Any],
        update: int | None,
        blob: str | None,
        content: bytes | None,
        synced: bool,
    ) -> int:
        """See `State.append`; the caller holds the lock."""
        at, text = float(at) + 0.0, as_json(record)  # SQLite knows no -0.0
        if update is not None:
            known = self.find(update) or next((e for e in self._together or () if e.update == update), None)
            if known is not None:
                raise DuplicateUpdate(known)
        values = (self.last + 1, at, text, update, blob)
        with self._transaction(synced):
            if content is not None and blob is not None:
                self._insert(blob, content)
            insert = "INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)"
            self._db.change(insert, *values, row_checksum("journal", *values))
        self.last += 1
        entry = Entry(self.last, at, record, update, blob)
        if self._together is not None:
            self._together.append(entry)
        elif synced:
            self._note([entry])
        return entry.seq

    @contextmanager
    def _transaction(self, synced: bool) -> Iterator[None]:
        """A new one, unless one is open."""
        if self._together is not None:
            yield
            return
        self._added = set()
        try:
            with self._db.transaction(synced=synced):
                yield
        except BaseException:
            self.contents -= self._added
            raise

    def _note(self, entries: Sequence[Entry]) -> None:
        self._answered.update(entry.update for entry in entries if entry.update is not None)
        if entries:
            self._durable(entries)

    def find(self, update: int) -> Entry | None:
        """The entry that answers this task; also when its model has long been collected."""
        if update not in self._answered:
            return None
        rows = self._db.select("SELECT * FROM journal WHERE task = ?", update)
        return self._entry(rows[0]) if rows else None

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries with a greater number, also those that are appended meanwhile."""
        while rows := self._db.select("SELECT * FROM journal WHERE seq > ? ORDER BY seq LIMIT ?", after, _PAGE):
            for row in rows:
                entry = self._entry(row)
                if entry.seq != after + 1:
                    raise self._db.damaged(f"entry {after + 1} is missing")
                after = entry.seq
                yield entry

    def _entry(self, row: tuple[Any, ...]) -> Entry:
        seq, at, record, update, blob, checksum = row
        if checksum != row_checksum("journal", seq, at, record, update, blob):
            raise self._db.damaged(f"entry {seq} is not as it was written")
        return Entry(seq, at, json.loads(record), update, blob)

    # --- small models -----------------------------------------------------------------------------

    def put(self, name: str, content: bytes) -> None:
        """Keep a small model, durable with the next entry that is synced; the caller holds the lock."""
        with self._transaction(synced=False):
            self._insert(name, content)

    def _insert(self, name: str, content: bytes) -> None:
        insert, weight = "INSERT OR REPLACE INTO content VALUES (?, ?)", 1 + len(content) // _WEIGHT
        self._db.change(insert, name, content, weight=weight)
        if name not in self.contents:
            self.contents.add(name)
            self._added.add(name)

    def content(self, name: str) -> bytes | None:
        """The bytes of a small model; None if it is in a file, or nowhere."""
        if name not in self.contents:
            return None
        rows = self._db.select("SELECT bytes FROM content WHERE name = ?", name)
        return bytes(rows[0][0]) if rows else None

    def delete_contents(self, names: Collection[str]) -> None:
        """Delete models that nothing needs any more; the caller holds the lock."""
        if names:
            with self._db.transaction(synced=False):
                for name in sorted(names):
                    self._db.change("DELETE FROM content WHERE name = ?", name)
            self.contents.difference_update(names)
