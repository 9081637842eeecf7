"""`controller.json` in the state folder: where a running controller is found. A killed one leaves it behind."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from metis.files import write_text
from metis.system import utc_now

ANNOUNCEMENT = "controller.json"


@dataclass(frozen=True)
class Announcement:
    """What `controller.json` says."""

    pid: int
    host: str
    born: str | None  # when the process began, by the kernel: ids are reused
    listen: str
    http: str | None
    run: str
    started: str

    @property
    def gone(self) -> bool:
        """Whether that process certainly does not run any more; False for one on another machine."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
        return self.born is not None and _born(self.pid) != self.born


_TEXT_OR_NONE = (str, type(None))
_KINDS: dict[str, Any] = {
    "pid": int, "host": str, "born": _TEXT_OR_NONE, "listen": str, "http": _TEXT_OR_NONE, "run": str, "started": str,
}  # fmt: skip


def announce(folder: Path, *, listen: str, http: str | None, run: str) -> None:
    """Write to the state folder where this controller is found."""
    started = utc_now().isoformat(timespec="seconds")
    content = Announcement(os.getpid(), socket.gethostname(), _born(os.getpid()), listen, http, run, started)
    write_text(folder / ANNOUNCEMENT, json.dumps(asdict(content), indent=2) + "\n")


def withdraw(folder: Path) -> None:
    """Remove what this process announced; the announcement of another process stays."""
    found = find(folder)
    if found is not None and (found.pid, found.host) == (os.getpid(), socket.gethostname()):
        (folder / ANNOUNCEMENT).unlink(missing_ok=True)


def find(folder: Path) -> Announcement | None:
    """The latest announcement that was not withdrawn; None also if it cannot be read."""
    try:
        content = json.loads((folder / ANNOUNCEMENT).read_text("utf-8"))
        if all(isinstance(content[name], kind) for name, kind in _KINDS.items()):
            return Announcement(**{name: content[name] for name in _KINDS})
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass
    return None


def in_use(folder: Path) -> bool:
    """Whether a process holds the lock of this state folder, without touching it; False if that cannot be known."""
    try:
        held = (folder / "LOCK").stat()
        mark = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
        return any("FLOCK" in line and mark in line.split() for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False


def _born(pid: int) -> str | None:
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]  # a zombie has ended
    except (OSError, ValueError, IndexError):
        return None
