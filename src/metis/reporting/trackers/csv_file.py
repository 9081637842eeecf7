"""The tracker `csv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from metis.reporting.tables import csv_value
from metis.reporting.trackers.tracker import RECENT, scalars
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.setting import Setting


class CsvTracker:
    """`metrics.csv`: one line per evaluated community model, written at once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.csv"
        self._file: IO[str] | None = None
        self._rows: list[dict[str, Any]] = []
        self._starts: list[int] = []
        self._columns: list[str] = []

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", encoding="utf-8", newline="")

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        row = {"version": point.version, **scalars(point)}
        versions = [known["version"] for known in self._rows[-RECENT:]]
        index = len(self._rows)
        if point.version in versions:
            index += versions.index(point.version) - len(versions)
        self._rows[index : index + 1] = [row]
        missing = [name for name in row if name not in self._columns]
        self._columns += missing
        self._write_from(0 if missing else index)

    def _write_from(self, index: int) -> None:
        """Write the lines from this row on; those before it are already in the file, with the same columns."""
        assert self._file is not None
        writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
        if index < len(self._starts):
            self._file.seek(self._starts[index])
            self._file.truncate()
            del self._starts[index:]
        if index == 0:
            self._file.seek(0)
            self._file.truncate()
            writer.writeheader()
        for row in self._rows[index:]:
            self._starts.append(self._file.tell())
            writer.writerow({name: csv_value(value) for name, value in row.items()})
        self._file.flush()

    def end(self, fold: RunFold) -> None:
        assert self._file is not None
        self._file.close()
