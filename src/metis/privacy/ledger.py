"""The ledger of a data set: every step of DP-SGD is reserved in it, durably, before it is made.

One line for each reservation, over all runs, in a chain of SHA-256; nothing is ever taken back, so what is spent is
never more than what is reserved, wherever a process is killed. How far the ledger is stands in a second place too, the
witness: a ledger that was restored from a backup is behind it, and is refused.

The first line fixes the order of the Renyi filter (see `accounting`), which must not change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from metis.errors import ConfigError
from metis.files import locked, make_folder, sync, sync_file, write_durable
from metis.privacy import accounting
from metis.privacy.accounting import Steps
from metis.privacy.records import Privacy, coarse, rate_at
from metis.system import disk, token_hex

_WAIT_SECONDS = 10.0  # for another process that is just reserving


class BudgetSpent(ConfigError):
    """The privacy budget of a data set does not allow what was asked for."""


class Entry(NamedTuple):
    """One reservation."""

    run: str
    task: int
    steps: Steps


class _Read(NamedTuple):
    identity: str
    order: float
    entries: list[Entry]
    heads: list[str]  # after the first line and after each entry
    length: int  # bytes of whole lines


def default_witness() -> Path:
    """A folder of this machine's user, apart from the site's own folders and their backups."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "metis" / "privacy"


class Ledger:
    """Of one data set, by its name; used by one process at a time, read again before each reservation."""

    def __init__(self, folder: Path, data: str, witness: Path | None = None) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", data):
            raise ConfigError(f"privacy: data is '{data}'; a data set's name has letters, digits and . _ - only")
        self.path = folder / f"{data}.ledger"
        self._data, self._witness = data, (witness or default_witness()) / f"{data}.json"

    # --- what it says -----------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """All reservations, oldest first."""
        read = self._read()
        return [] if read is None else read.entries

    def order(self) -> float | None:
        """Of the Renyi filter; None before the first reservation."""
        read = self._read()
        return None if read is None else read.order

    def epsilon(self, delta: float, *, tight: bool = False) -> float:
        """Of everything that is reserved, by RDP, or by PLD where that is tighter."""
        done = [entry.steps for entry in self.entries()]
        return accounting.tight_epsilon(done, delta) if tight else accounting.epsilon(done, delta)

    def steps_left(self, privacy: Privacy, rate: float, run: str) -> int | None:
        """As the site tells it: what was left when the run began, to two digits, less what the run has reserved.

        A number that was rounded each time would give the exact one away after a few rounds.
        """
        if privacy.budget is None:
            return None
        entries = self.entries()
        order = self.order() or accounting.best_order(rate, privacy.noise, privacy.budget, privacy.delta)
        each = accounting.cost(order, rate, privacy.noise)
        allowed = accounting.allowance(order, privacy.budget, privacy.delta)

        def spent(which: Iterator[Entry]) -> float:
            return sum(one.steps.steps * accounting.cost(order, one.steps.rate, one.steps.noise) for one in which)

        before = accounting.steps_within(allowed - spent(e for e in entries if e.run != run), each)
        now = accounting.steps_within(allowed - spent(iter(entries)), each)
        return max(0, min(now, coarse(before) - sum(entry.steps.steps for entry in entries if entry.run == run)))

    # --- reservations -----------------------------------------------------------------------------

    def reserve(
        self, privacy: Privacy, rate: float, run: str, task: int, steps: int, batches_per_step: int = 1
    ) -> Privacy:
        """Reserve the steps of a task durably; returns the settings to train with. Raises `BudgetSpent`.

        A task that is trained again, after a crash, is reserved again.
        """
        make_folder(self.path.parent)
        make_folder(self._witness.parent)
        with locked(self.path.with_suffix(".lock"), wait=_WAIT_SECONDS):
            read = self._read() or self._begin(privacy, rate)
            used = Privacy(
                privacy.noise, privacy.clip, privacy.budget, privacy.delta, privacy.larger_batches, read.order
            )
            wanted = Steps(rate_at(rate, batches_per_step), used.noise_at(rate, batches_per_step), steps)
            if privacy.budget is not None:
                total = sum(_cost(read.order, entry.steps) for entry in (*read.entries, Entry(run, task, wanted)))
                if total > accounting.allowance(read.order, privacy.budget, privacy.delta):
                    raise BudgetSpent(
                        f"the privacy budget of '{self._data}', epsilon {privacy.budget:g} at delta {privacy.delta:g}, "
                        f"does not allow {steps} more steps"
                    )
            line = _line(
                number=len(read.entries) + 1, previous=read.heads[-1], run=run, task=task, steps=steps,
                rate=wanted.rate, noise=wanted.noise,
            )  # fmt: skip
            self._append(line, read.length)
            self._note(read.identity, len(read.entries) + 1, _hash(line))
        return used

    def _begin(self, privacy: Privacy, rate: float) -> _Read:
        # Without a budget there is no best order yet; any one is right, and 8 lasts long for usual settings.
        order = 8.0
        if privacy.budget is not None:
            order = accounting.best_order(rate, privacy.noise, privacy.budget, privacy.delta)
        identity = token_hex(16)
        line = _line(ledger=identity, data=self._data, order=order)
        self._append(line, 0)
        self._note(identity, 0, _hash(line))
        return _Read(identity, order, [], [_hash(line)], len(line))

    def _append(self, line: bytes, length: int) -> None:
        """After the whole lines; half a line of an earlier attempt is overwritten."""
        new = not self.path.exists()
        with disk().file(disk().open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.seek(length)
            file.write(line)
            file.truncate()
            sync_file(file)
        if new:
            sync(self.path.parent)

    def _note(self, identity: str, number: int, head: str) -> None:
        content = json.dumps({"ledger": identity, "number": number, "head": head}).encode()
        write_durable(self._witness, content, private=True)

    # --- reading ------------------------------------------------------------------------------------

    def _read(self) -> _Read | None:
        """The ledger, if it is whole and as far as its witness says; None if there was never one."""
        witness = self._read_witness()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            content = b""
        read = self._parsed(content)
        if read is None:
            if witness is not None and witness["number"] > 0:
                raise ConfigError(
                    f"the privacy ledger {self.path} is gone, but {self._witness} knows of {witness['number']} "
                    "reservations in it; bring it back"
                )
            return None
        if witness is None:
            if not read.entries:
                return read  # killed before the first note
            raise ConfigError(
                f"the privacy ledger {self.path} has {len(read.entries)} reservations, but its witness "
                f"{self._witness} is gone; if the data set has moved to this machine, bring both files"
            )
        if witness["ledger"] != read.identity:
            if not read.entries and not witness["number"]:
                return read  # killed between the first line and its note
            raise ConfigError(f"the privacy ledger {self.path} is not the one that {self._witness} belongs to")
        number = witness["number"]
        if number >= len(read.heads) or read.heads[number] != witness["head"]:
            raise ConfigError(
                f"the privacy ledger {self.path} lacks reservations that were made: it has {len(read.entries)}, and "
                f"{self._witness} knows of {number}; it was restored from a backup or changed, and cannot be used"
            )
        return read

    def _read_witness(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._witness.read_text("utf-8"))
            if not (isinstance(found["ledger"], str) and isinstance(found["head"], str)):
                raise TypeError
            found["number"] = int(found["number"])
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{self._witness}, the witness of a privacy ledger, cannot be read") from None

    def _parsed(self, content: bytes) -> _Read | None:
        lines = content.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # killed while it was written: nothing was trained for it
        if not lines:
            return None
        entries: list[Entry] = []
        try:
            first = json.loads(lines[0])
            identity, order = str(first["ledger"]), float(first["order"])
            heads = [_hash(lines[0])]
            for number, line in enumerate(lines[1:], start=1):
                found = json.loads(line)
                if (found["number"], found["previous"]) != (number, heads[-1]):
                    raise ValueError
                steps = Steps(float(found["rate"]), float(found["noise"]), int(found["steps"]))
                entries.append(Entry(str(found["run"]), int(found["task"]), steps))
                heads.append(_hash(line))
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"the privacy ledger {self.path} was changed or is damaged; it cannot be used") from None
        return _Read(identity, order, entries, heads, sum(map(len, lines)))


def _cost(order: float, part: Steps) -> float:
    return part.steps * accounting.cost(order, part.rate, part.noise)


def _line(**content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
