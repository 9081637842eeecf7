"""Pull the plug: replay what a controller did to its disk, and keep only what the disk had promised to keep.

    python tests/deployment/power_loss.py      # every moment; a minute or two

One run of crash_driver.py is recorded by strace. At any moment of it the disk may hold, of each file, what was last
synced and any part of what was written since; and of each folder, the names that were last synced and any beginning of
the changes since. The folder made of that must open, hold every update acknowledged until then, and go on working.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = "openat,close,write,pwrite64,fsync,fdatasync,rename,renameat,unlink,ftruncate,mkdir"
SECTOR = 512


@dataclass(eq=False)
class File:
    """Bytes that were synced, and what was done since; None is a truncation."""

    synced: bytes = b""
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def after(self, changes: list[tuple[int, bytes | None]]) -> bytes:
        content = bytearray(self.synced)
        for offset, data in changes:
            if data is None:
                del content[offset:]
            content.extend(bytes(max(0, offset + len(data or b"") - len(content))))
            if data is not None:
                content[offset : offset + len(data)] = data
        return bytes(content)

    def sync(self) -> None:
        self.synced, self.changes = self.after(self.changes), []

    def survivors(self, chance: random.Random | None) -> bytes:
        """Of the changes nothing (None), or any sectors in any order of arrival."""
        if chance is None:
            return self.synced
        kept: list[tuple[int, bytes | None]] = []
        for offset, data in self.changes:
            if data is None:
                kept += [(offset, None)] * chance.randrange(2)
                continue
            edges = [0, *range(SECTOR - offset % SECTOR, len(data), SECTOR), len(data)]
            pieces = itertools.pairwise(edges)
            kept += [(offset + start, data[start:stop]) for start, stop in pieces if chance.randrange(4)]
        return self.after(kept)


Change = Callable[[dict[str, "File | Folder"]], None]


@dataclass(eq=False)
class Folder:
    """Names that were synced, and what was done since."""

    synced: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def after(self, changes: list[Change]) -> dict[str, File | Folder]:
        names = dict(self.synced)
        for change in changes:
            change(names)
        return names

    def sync(self) -> None:
        self.synced, self.changes = self.after(self.changes), []

    def survivors(self, chance: random.Random | None) -> dict[str, File | Folder]:
        kept = 0 if chance is None else chance.randrange(len(self.changes) + 1)
        return self.after(self.changes[:kept])

    def write_to(self, path: Path, chance: random.Random | None) -> None:
        """Make what the power loss leaves."""
        path.mkdir()
        for name, item in self.survivors(chance).items():
            if isinstance(item, Folder):
                item.write_to(path / name, chance)
            else:
                (path / name).write_bytes(item.survivors(chance))


class Disk:
    """Follows a recording, call by call."""

    def __init__(self, root: Path) -> None:
        self._root, self.top = root, Folder()
        self._open: dict[int, tuple[File | Folder, list[int]]] = {}  # with the position in the file
        self.acknowledged: list[tuple[int, str]] = []

    def _find(self, path: str) -> tuple[Folder, str] | None:
        """The folder that a path is in, and its name there; None outside."""
        try:
            *parents, name = Path(path).relative_to(self._root).parts or ("",)
        except ValueError:
            return None
        folder = self.top
        for parent in parents:
            below = folder.after(folder.changes)[parent]
            assert isinstance(below, Folder)
            folder = below
        return folder, name

    def _change(self, folder: Folder, change: Change) -> None:
        change(folder.after(folder.changes))  # it must be possible
        folder.changes.append(change)

    def follow(self, call: str, strings: list[bytes], numbers: list[int], flags: str, answer: int) -> bool:
        """Do as the recorded process did; whether it may matter to the disk."""
        entries = [self._find(string.decode()) for string in strings] if call not in {"write", "pwrite64"} else []
        if call == "openat" and entries[0]:
            folder, name = entries[0]
            names = folder.after(folder.changes)
            if name and name not in names:
                file = File()
                self._change(folder, lambda names: names.__setitem__(name, file))
                names = folder.after(folder.changes)
            item = names[name] if name else folder
            if "O_TRUNC" in flags and isinstance(item, File):
                item.changes.append((0, None))
            self._open[answer] = (item, [0])
        elif call == "close":
            self._open.pop(numbers[0], None)
            return False
        elif call == "mkdir" and entries[0]:
            folder, name = entries[0]
            made = Folder()
            self._change(folder, lambda names: names.__setitem__(name, made))
        elif call == "unlink" and entries[0]:
            folder, name = entries[0]
            self._change(folder, lambda names: names.__delitem__(name))
        elif call in {"rename", "renameat"} and entries[0] and entries[1]:
            (folder, old), (other, new) = entries[0], entries[1]
            assert folder is other, "between folders is not followed"
            self._change(folder, lambda names: names.__setitem__(new, names.pop(old)))
        elif call == "write" and numbers[0] == 1 and strings[0].startswith(b"ACK"):
            _, number, blob = strings[0].split()
            self.acknowledged.append((int(number), blob.decode()))
            return True
        elif numbers and numbers[0] in self._open:
            item, position = self._open[numbers[0]]
            if call in {"fsync", "fdatasync"}:
                item.sync()
            elif isinstance(item, File) and call == "pwrite64":
                item.changes.append((numbers[-1], strings[0][:answer]))
            elif isinstance(item, File) and call == "write":
                item.changes.append((position[0], strings[0][:answer]))
                position[0] += answer
            elif isinstance(item, File) and call == "ftruncate":
                item.changes.append((numbers[-1], None))
        else:
            return False
        return True


def follow(log: Path, root: Path) -> Iterator[Disk]:
    """The disk after every call that may matter."""
    disk = Disk(root)
    for line in log.read_text().splitlines():
        found = re.match(r"(\w+)\((.*)\) += (-?\d+)", line)
        if found is None or int(found[3]) < 0:
            continue
        strings = [bytes.fromhex(text.replace("\\x", "")) for text in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', found[2])]
        rest = re.sub(r'"[^"]*"', "", found[2])
        numbers = [int(number) for number in re.findall(r"(?<![\w|])\d+", rest)]
        if disk.follow(found[1], strings, numbers, rest, int(found[3])):
            yield disk


@dataclass(frozen=True, slots=True)
class Result:
    """What was found after one power loss."""

    moment: int
    acknowledged: int
    lost: int
    problem: str = ""


def enumerate_power_losses(workspace: Path, every: int = 1, durability: str = "power") -> Iterator[Result]:
    """Lose power after every call, or every few: once with nothing kept that was not synced, twice with a part."""
    from deployment.crash_points import examine, run_driver

    root, log = workspace / "disk", workspace / "recording"
    root.mkdir()
    options = ("-xx", "-s", "1000000", "-o", str(log), "-e", f"trace={CALLS}")
    done = run_driver(root / "state", *options, durability=durability)
    if done.returncode:
        raise RuntimeError(f"the driver fails by itself: {done.stderr}")
    for moment, disk in enumerate(follow(log, root)):
        if moment % every:
            continue
        for attempt in range(3):
            left = workspace / "left"
            disk.top.write_to(left, random.Random(f"{moment} {attempt}") if attempt else None)
            try:
                lost = examine(left / "state", disk.acknowledged)
                yield Result(moment, len(disk.acknowledged), lost)
            except Exception as failure:
                yield Result(moment, len(disk.acknowledged), 0, f"not recovered: {failure!r}")
            shutil.rmtree(left)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        results = list(enumerate_power_losses(Path(name)))
    for result in results:
        if result.lost or result.problem:
            print(result)
    lost, failed = sum(result.lost for result in results), sum(bool(result.problem) for result in results)
    print(
        f"{len(results)} power losses at {len({result.moment for result in results})} moments, "
        f"{sum(result.acknowledged for result in results)} updates acknowledged, {lost} lost, "
        f"{failed} failed recoveries"
    )
    return 1 if lost or failed else 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    sys.exit(main())
