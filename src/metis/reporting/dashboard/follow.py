"""Following runs from another process: which runs a folder contains, and the lines they have written since."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from metis.deployment.controller.announcement import find
from metis.runs.run import SUMMARY
from metis.runs.setting import SETTING, Setting
from metis.runs.trace import EVENTS

COMPARISON = "comparison.json"
MAX_RUNS = 24
_DEPTH = 3  # folders below the given one in which runs are looked for
_MARK = 64  # bytes before the reading position that must still be the same
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class RunFolder:
    """Where a run is, or will be."""

    name: str  # unique among the runs of a folder
    folder: Path
    state: Path | None = None  # the state folder of a controller, if it is a real federation

    @property
    def alive(self) -> bool:
        """Whether a controller of this run is running, so that its time is the wall clock's."""
        announced = None if self.state is None else find(self.state)
        return announced is not None and not announced.gone


def runs_in(folder: Path) -> list[RunFolder]:
    """The runs in a folder: its own, a deployment's, those that a comparison plans, or else all below it."""
    if (folder / EVENTS).is_file():
        return [_run_folder(folder.resolve().name, folder)]
    if (folder / "controller.db").is_file():
        return [RunFolder(folder.resolve().name, folder / "run", folder)]
    try:
        planned = json.loads((folder / COMPARISON).read_text("utf-8"))["runs"]
        return [_run_folder(str(name), folder / str(name)) for name in planned][:MAX_RUNS]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = [file.parent for depth in range(1, _DEPTH + 1) for file in folder.glob("*/" * depth + EVENTS)]
    return [_run_folder(path.relative_to(folder).as_posix(), path) for path in sorted(found)][:MAX_RUNS]


def _run_folder(name: str, folder: Path) -> RunFolder:
    above = folder.resolve().parent
    return RunFolder(name, folder, above if (above / "controller.db").is_file() else None)


def setting_of(folder: Path) -> Setting:
    """The setting of a run; where it was not written, powers and the size of a model are unknown."""
    for name in (SETTING, SUMMARY):
        try:
            return Setting.from_summary(json.loads((folder / name).read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return Setting(folder.name, folder.name, 0, (), model_bytes=0, fills_the_period=False, metric="")


def setting_version(folder: Path) -> tuple[int, int]:
    """A value that changes whenever the setting is written again; the summary counts only without a setting."""
    for name in (SETTING, SUMMARY):
        try:
            status = (folder / name).stat()
            return status.st_ino, status.st_mtime_ns
        except OSError:
            continue
    return 0, 0


class Restarted(Exception):
    """The file was replaced or truncated: what was read from it is void."""


class Tail:
    """The lines of a growing file; an incomplete line is left until it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.changed_at = 0.0  # wall clock of the latest write
        self._reset()

    def _reset(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._size = 0
        self._mark = b""

    @property
    def behind(self) -> int:
        """Bytes that were there last time and are not read yet, including an incomplete line."""
        return self._size - self._offset

    def read(self, max_bytes: int = 1 << 16) -> list[bytes]:
        """The next complete lines, up to about this many bytes; raises `Restarted` once if the file was replaced."""
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
            # If the file was truncated and grew beyond its old length since, these bytes differ.
            file.seek(self._offset - len(self._mark))
            if file.read(len(self._mark)) != self._mark:
                self._restart()
            data = file.read(max_bytes)
            while b"\n" not in data and (more := file.read(max_bytes)):
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
