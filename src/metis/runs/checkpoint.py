"""A checkpoint: the weights of an interrupted run, which with its events give the run back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from metis.core.events import Action, Event
from metis.errors import DataError
from metis.runs.run import is_finished
from metis.runs.storage import load_arrays, save_arrays
from metis.runs.trace import EVENTS, read_trace

CHECKPOINT = "checkpoint.safetensors"
_FORMAT = "2"  # 2: the identity of a policy is that of its layers


@dataclass(frozen=True)
class Checkpoint:
    """The arrays of a simulator after a number of events, and the time it had taken."""

    arrays: Mapping[str, NDArray[Any]]
    events: int
    wall_seconds: float

    def save(self, folder: Path, identity: Mapping[str, str]) -> None:
        """Write it; `identity` is a digest of each thing that must be the same when the run is resumed."""
        metadata = {"format": _FORMAT, "events": str(self.events), "wall_seconds": repr(self.wall_seconds), **identity}
        save_arrays(folder / CHECKPOINT, self.arrays, metadata)

    @staticmethod
    def load(folder: Path, identity: Mapping[str, str]) -> Checkpoint:
        """Read what `save` wrote; refused unless the identity is the same."""
        if not (folder / CHECKPOINT).exists():
            if is_finished(folder):
                raise DataError(f"{folder} contains a finished run; there is nothing to resume")
            raise DataError(f"{folder} has no checkpoint to resume from; start the run again")
        arrays, metadata = load_arrays(folder / CHECKPOINT)
        if metadata.get("format") != _FORMAT:
            raise DataError(f"{folder} cannot be resumed: another version of Metis wrote it; start the run again")
        for part, digest in identity.items():
            if metadata.get(part) != digest:
                raise DataError(f"{folder} cannot be resumed: it was started with a different {part}")
        return Checkpoint(arrays, int(metadata["events"]), float(metadata["wall_seconds"]))

    def recorded(self, folder: Path) -> list[tuple[float, Event | Action]]:
        """The events up to this checkpoint."""
        events = [event for _, event in zip(range(self.events), read_trace(folder / EVENTS), strict=False)]
        if len(events) < self.events:
            raise DataError(f"{folder / EVENTS} has {len(events)} events, but the checkpoint needs {self.events}")
        return events

    def cut(self, folder: Path) -> None:
        """Cut off the events written after this checkpoint: the run writes them again."""
        with (folder / EVENTS).open("rb+") as file:
            file.truncate(sum(len(line) for _, line in zip(range(self.events), file, strict=False)))
