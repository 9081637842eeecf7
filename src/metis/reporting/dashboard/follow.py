"""Following runs from outside: which ones a folder holds, and the lines that they have written since last time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from metis.deployment.controller.announcement import find
from metis.runs.run import SUMMARY
from metis.runs.setting import SETTING, Setting
from metis.runs.trace import EVENTS

COMPARISON = "comparison.json"
MOST_RUNS = 24
_DEPTH = 3  # folders below the given one in which runs are looked for
_MARK = 64  # bytes before the place of reading that must still be the same
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Place:
    """Where a run is, or will be."""

    name: str  # unique among the places of a folder
    folder: Path
    state: Path | None = None  # the state folder of a controller, if it is a real federation

    @property
    def alive(self) -> bool:
        """Whether a controller of this run is at work, so that the clock of the run is the wall's."""
        said = None if self.state is None else find(self.state)
        return said is not None and not said.gone


def places(folder: Path) -> list[Place]:
    """The runs in a folder: its own, a deployment's, those that a comparison plans, or else all below it."""
    if (folder / EVENTS).is_file():
        return [_place(folder.resolve().name, folder)]
    if (folder / "controller.db").is_file():
        return [Place(folder.resolve().name, folder / "run", folder)]
    try:
        planned = json.loads((folder / COMPARISON).read_text("utf-8"))["runs"]
        return [_place(str(name), folder / str(name)) for name in planned][:MOST_RUNS]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = [file.parent for depth in range(1, _DEPTH + 1) for file in folder.glob("*/" * depth + EVENTS)]
    return [_place(path.relative_to(folder).as_posix(), path) for path in sorted(found)][:MOST_RUNS]


def _place(name: str, folder: Path) -> Place:
    above = folder.resolve().parent
    return Place(name, folder, above if (above / "controller.db").is_file() else None)


def setting_of(folder: Path) -> Setting:
    """What the events are folded with; where it is not written down, powers and the size of a model are not known."""
    for name in (SETTING, SUMMARY):
        try:
            return Setting.from_summary(json.loads((folder / name).read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return Setting(folder.name, folder.name, 0, (), model_bytes=0, fills_the_period=False, metric="")


def setting_version(folder: Path) -> tuple[int, int]:
    """Another value whenever the setting was written anew; the summary counts only where there is no setting."""
    for name in (SETTING, SUMMARY):
        try:
            status = (folder / name).stat()
            return status.st_ino, status.st_mtime_ns
        except OSError:
            continue
    return 0, 0


class Restarted(Exception):
    """The file is another one than before, or was cut: what was read of it is void."""


class Tail:
    """The lines of a file that grows; half a line is left until its end is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed_at = 0.0  # wall clock of the latest writing
        self._reset()

    def _reset(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._size = 0
        self._mark = b""

    @property
    def behind(self) -> int:
        """Bytes that were there last time and are not read yet, half a line included."""
        return self._size - self._offset

    def read(self, most: int = 1 << 16) -> list[bytes]:
        """The next whole lines, about so many bytes of them; `Restarted` once if the file is not the old one."""
        try:
            status = self.path.stat()
        except OSError:
            if self._identity is not None:
                self._restart()
            return []
        identity = (status.st_dev, status.st_ino)
        if self._identity not in (None, identity) or status.st_size < self._offset:
            self._restart()
        self._identity, self.changed_at, self._size = identity, status.st_mtime, status.st_size
        if self._size == self._offset:
            return []
        with self.path.open("rb") as file:
            # Cut and written anew beyond the old length between two looks: then these bytes are others.
            file.seek(self._offset - len(self._mark))
            if file.read(len(self._mark)) != self._mark:
                self._restart()
            data = file.read(most)
            while b"\n" not in data and (more := file.read(most)):
                data += more
                if len(data) > _LONGEST_LINE:
                    raise ValueError(f"a line is longer than {_LONGEST_LINE} bytes")
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._mark = (self._mark + whole)[-_MARK:]
        return whole.splitlines()

    def _restart(self) -> None:
        self._reset()
        raise Restarted
