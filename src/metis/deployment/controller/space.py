"""The room on the disk of the state folder: how much is left, and since when nothing could be written."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from metis.system import disk, utc_now
from metis.text import size

_MODELS = 4  # with room for fewer the disk is nearly full
_MAX_RESERVE = 20 * 10**9  # bytes; 5 % of a large disk are more than anybody needs
_CLEAR = 1.2  # times the reserve must be free before the disk is not nearly full any more


class DiskSpace:
    """Full from the first write that found no room until there is room for a model again."""

    def __init__(self, folder: Path, model_bytes: int) -> None:
        self._folder, self._model = folder, model_bytes
        self._trial = folder / "room.tmp"
        self._since: datetime | None = None
        self._reason = ""
        self.free: int | None = None  # bytes; None if the file system does not say
        self.nearly_full = False
        self._remove_trial()
        self.look()

    @property
    def full(self) -> bool:
        return self._since is not None

    def refused(self, reason: str) -> None:
        """A write found no room."""
        self._since, self._reason = self._since or utc_now(), reason

    def look(self) -> None:
        """Measure, and after a refused write try whether there is room again; may take as long as the disk does."""
        try:
            total, free = disk().space(self._folder)
        except OSError:
            self.free = None
        else:
            self.free = free
            reserve = max(_MODELS * self._model, min(total // 20, _MAX_RESERVE))
            self.nearly_full = free < (_CLEAR * reserve if self.nearly_full else reserve)
        if self.full and self._has_room():
            self._since = None

    def _has_room(self) -> bool:
        """Free bytes alone do not say it: there are quotas, and limits on the size of a file."""
        try:
            file = disk().open(self._trial, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(file, 0, self._model + (1 << 16))  # the update, and its entry in the journal
            finally:
                disk().close(file)
        except OSError:
            return False
        finally:
            self._remove_trial()
        return True

    def _remove_trial(self) -> None:
        with contextlib.suppress(OSError):
            self._trial.unlink()

    @property
    def sentence(self) -> str:
        """What an operator should know; empty if there is enough room."""
        left = "" if self.free is None else f", {size(self.free)} free"
        if self._since is not None:
            since = f"{self._since:%Y-%m-%d %H:%M:%S} UTC"
            return f"the disk of {self._folder} is full since {since}{left}: the federation is on hold until there " \
                f"is space ({self._reason})"  # fmt: skip
        return f"the disk of {self._folder} is nearly full{left}; make room before it stops the federation" \
            if self.nearly_full else ""  # fmt: skip

    def document(self) -> dict[str, Any]:
        return {
            "free_bytes": self.free,
            "nearly_full": self.nearly_full,
            "full": self.full,
            "since": None if self._since is None else self._since.isoformat(timespec="seconds"),
            "sentence": self.sentence,
        }
