"""A remote run as a folder on this machine: its setting and its trace, kept up to date by the remote controller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from metis.deployment.administrator import RemoteController, StartedAgain
from metis.errors import ConfigError, Unreachable
from metis.runs.setting import SETTING
from metis.runs.trace import EVENTS, write_json

_SECONDS = 1.0  # between two looks


class Mirror:
    """Copies what is new; the dashboard follows the folder as it would one on this machine."""

    def __init__(self, remote: RemoteController, folder: Path) -> None:
        self._remote, self._folder = remote, folder
        self._start, self._offset = -1, 0
        self.update()

    def update(self) -> None:
        """Copy what was added since the last time; everything if the controller was started again."""
        try:
            if self._start < 0:
                self._begin()
            while self._copy():
                pass
        except StartedAgain:
            self._start = -1

    def _begin(self) -> None:
        about = self._remote.command("setting")
        (self._folder / EVENTS).unlink(missing_ok=True)  # another file: who follows it notices
        write_json(self._folder / SETTING, about["setting"])
        self._start, self._offset = int(about["start"]), 0

    def _copy(self) -> bool:
        before = self._offset
        with (self._folder / EVENTS).open("ab") as file:
            for data in self._remote.read("trace", start=self._start, offset=self._offset):
                self._offset += file.write(data)
        return self._offset > before

    def follow(self, ended: threading.Event, report: Callable[[str], None]) -> None:
        """Until the event is set; a controller that does not answer is reported once and asked again."""
        reachable = True
        while not ended.wait(_SECONDS if reachable else 5 * _SECONDS):
            try:
                self.update()
                reachable = True
            except Unreachable as problem:
                if reachable:
                    report(str(problem))
                reachable = False
            except ConfigError as problem:  # revoked, say
                report(str(problem))
                return
