"""A disk that forgets: real files in memory, and next to them what was synced and what was done since.

At a loss of power any sectors that were not synced and any prefix of a folder's changes survive. A failed fsync
discards its changes, as Linux does: the pages count as clean, and what was in them is lost with the power. SQLite runs
on it by a VFS of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import itertools
import os
import pathlib
import random
import shutil
import sqlite3
import sys
from typing import Any, NoReturn

import apsw

from metis.system import Disk
from system.loop import BOOT, EPOCH, Boot, Crashed, World

_SECTOR = 512
_SPACE = 10**12  # bytes of each disk
_DISKS: dict[str, Machine] = {}  # by the folder that holds its files
_FULL = OSError(errno.ENOSPC, "No space left on device")


class _File:
    """What is on the platter, and what was written since."""

    __slots__ = ("changes", "lock", "synced")

    def __init__(self, synced: bytes = b"") -> None:
        self.synced = synced
        self.changes: list[tuple[int, bytes | None]] = []  # None: cut off there
        self.lock: Boot | None = None

    def after(self, changes: list[tuple[int, bytes | None]]) -> bytes:
        content = bytearray(self.synced)
        for offset, data in changes:
            end = offset if data is None else offset + len(data)
            if end > len(content):
                content.extend(bytes(end - len(content)))
            if data is None:
                del content[offset:]
            else:
                content[offset:end] = data
        return bytes(content)

    def sync(self) -> None:
        if self.changes:
            self.synced, self.changes = self.after(self.changes), []

    def survivors(self, chance: random.Random, only_synced: bool) -> bytes:
        if only_synced:
            return self.synced
        kept: list[tuple[int, bytes | None]] = []
        for offset, data in self.changes:
            if data is None:
                kept += [(offset, None)] * chance.randrange(2)
                continue
            edges = [0, *range(_SECTOR - offset % _SECTOR, len(data), _SECTOR), len(data)]
            kept += [(offset + a, data[a:b]) for a, b in itertools.pairwise(edges) if chance.randrange(4)]
        return self.after(kept)


class _Folder:
    __slots__ = ("changes", "names", "synced")

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.synced: dict[str, Any] = {}
        self.changes: list[tuple[str | None, str | None, Any]] = []  # the name that goes, the one that comes, for what

    def change(self, old: str | None, new: str | None, item: Any) -> None:
        self.changes.append((old, new, item))
        _apply(self.names, old, new, item)

    def sync(self) -> None:
        self.synced, self.changes = dict(self.names), []

    def survivors(self, chance: random.Random, only_synced: bool) -> dict[str, Any]:
        names = dict(self.synced)
        for change in self.changes[: 0 if only_synced else chance.randrange(len(self.changes) + 1)]:
            _apply(names, *change)
        return names


def _apply(names: dict[str, Any], old: str | None, new: str | None, item: Any) -> None:
    if old is not None:
        names.pop(old, None)
    if new is not None:
        names[new] = item


class Machine:
    """The disk of one machine; it outlives the processes."""

    def __init__(self, world: World, root: str) -> None:
        self.world, self.root, self.below, self._top = world, root, f"{root}/", _Folder()
        os.makedirs(root)
        _DISKS[root] = self
        self.calls = self.reads = 0
        self.strike_at: int | None = None  # at this call ...
        self.strike = "kill"  # ... this happens: kill, power, EIO, ENOSPC
        self.strike_sync: str | None = None  # or at the next one that syncs this
        self.full = False
        self.open_files: dict[int, tuple[Any, str]] = {}
        self.in_database = 0  # SQLite is on the stack, and cannot be entered again

    def close(self) -> None:
        """At the end of the simulation."""
        _DISKS.pop(self.root, None)
        for descriptor in list(self.open_files):
            os.close(descriptor)
        self.open_files.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    # --- every change passes here ---------------------------------------------------------------

    def pass_through(self, kind: str, path: str, *, changes: bool = True) -> None:
        """A call of the process that runs: it may be dead, or its fate may be sealed at this very call."""
        boot, world = BOOT.get(), self.world
        if world.over or boot is None or boot.dead:
            raise Crashed
        if not changes:
            return
        if world.worker is not None and not self.in_database:
            world.worker.maybe_pause()
        self.calls += 1
        world.note("disk", f"{kind} {path[len(self.root) :]}")
        there = self.strike_sync is None or (kind == "fsync" and path.endswith(self.strike_sync))
        if self.strike_at is not None and self.calls >= self.strike_at and there:
            self.strike_at = self.strike_sync = None
            world.sometimes(f"{self.strike} at {kind}")
            match self.strike:
                case "ENOSPC":
                    raise _FULL
                case "EIO":
                    world.disk_failed(boot, kind, path)  # type: ignore[attr-defined]
                    raise OSError(errno.EIO, "Input/output error")
            world.kill(boot, power=self.strike == "power")  # type: ignore[attr-defined]
            raise Crashed
        if self.full and kind in ("create", "write", "mkdir", "reserve"):
            world.sometimes("a full disk")
            raise _FULL

    def find(self, path: str) -> tuple[_Folder, str]:
        *parents, name = path[len(self.root) + 1 :].split("/")
        folder = self._top
        for parent in parents:
            folder = folder.names[parent]
        return folder, name

    def item(self, path: str) -> Any:
        """The file or folder of this path; None if there is nothing."""
        found: Any = self._top
        for name in path[len(self.below) :].split("/") if len(path) > len(self.root) else ():
            if type(found) is not _Folder:
                return None
            found = found.names.get(name)
        return found

    def create(self, path: str) -> _File:
        self.pass_through("create", path)
        folder, name = self.find(path)
        made = _File()
        folder.change(None, name, made)
        return made

    def write(self, item: _File, path: str, descriptor: int, data: Any, offset: int) -> int:
        self.pass_through("write", path)
        item.changes.append((offset, bytes(data)))
        written = os.pwrite(descriptor, data, offset)
        self._stamp(descriptor)
        return written

    def _stamp(self, file: int | str) -> None:
        """The date of a file is one of the simulated world."""
        os.utime(file, (EPOCH + self.world.loop.now,) * 2)

    def truncate(self, item: _File, path: str, descriptor: int, size: int) -> None:
        self.pass_through("truncate", path)
        item.changes.append((size, None))
        os.ftruncate(descriptor, size)

    def sync(self, item: Any, path: str) -> None:
        try:
            self.pass_through("fsync", path)
        except OSError:
            item.changes = []
            raise
        item.sync()

    # --- bad days -------------------------------------------------------------------------------

    def lose_power(self, chance: random.Random) -> None:
        only_synced = chance.randrange(3) == 0
        self.world.note("power", "only what was synced survives" if only_synced else "more than was synced survives")
        shutil.rmtree(self.root)
        self._top = self._settle(self._top, self.root, chance, only_synced)

    def _settle(self, folder: _Folder, path: str, chance: random.Random, only_synced: bool) -> _Folder:
        os.makedirs(path)
        settled = _Folder()
        for name, item in folder.survivors(chance, only_synced).items():
            below = f"{path}/{name}"
            if isinstance(item, _Folder):
                settled.names[name] = self._settle(item, below, chance, only_synced)
            else:
                content = item.survivors(chance, only_synced)
                pathlib.Path(below).write_bytes(content)
                self._stamp(below)
                settled.names[name] = _File(content)
        settled.synced = dict(settled.names)
        return settled

    def rot(self, chance: random.Random, below: str, pattern: str = "*") -> str | None:
        """Flip one bit of a file that is at rest under this folder; its path."""
        files = sorted(p for p in pathlib.Path(self.root, below).rglob(pattern) if p.is_file() and p.stat().st_size)
        if not files:
            return None
        path = files[chance.randrange(len(files))]
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        item = self.item(str(path))
        item.synced, item.changes = bytes(content), []
        return str(path)[len(self.root) :]


def _machine(path: object) -> Machine:
    text, boot = str(path), BOOT.get()
    if boot is not None and (own := boot.machine) is not None and text.startswith(own.below):
        machine: Machine = own
        return machine
    for root, machine in _DISKS.items():
        if text.startswith(root) and text[len(root) : len(root) + 1] in ("", "/"):
            return machine
    raise FileNotFoundError(errno.ENOENT, "No simulated disk", text)


class _OpenFile:
    """A file that is open for writing; unbuffered."""

    closed = False

    def __init__(self, machine: Machine, path: str, mode: str) -> None:
        item = machine.item(path)
        if item is None:
            item = machine.create(path)
        elif "x" in mode:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        self._machine, self._item, self._path = machine, item, path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        machine.open_files[self._descriptor] = (item, path)
        if "w" in mode and os.fstat(self._descriptor).st_size:
            machine.truncate(item, path, self._descriptor, 0)
        self._appends, self._at = "a" in mode, 0

    def write(self, data: Any) -> int:
        at = os.fstat(self._descriptor).st_size if self._appends else self._at
        written = self._machine.write(self._item, self._path, self._descriptor, data, at)
        self._at = at + written
        return written

    def read(self, count: int = -1) -> bytes:
        data = os.pread(self._descriptor, count if count >= 0 else 1 << 30, self._at)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (os.fstat(self._descriptor).st_size if whence == 2 else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        size = self._at if size is None else size
        self._machine.truncate(self._item, self._path, self._descriptor, size)
        return size

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self._machine.open_files.pop(self._descriptor, None) is not None:
                os.close(self._descriptor)

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


class _Raw(io.RawIOBase):
    """For text on top of an open file."""

    def __init__(self, file: _OpenFile) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class DiskPath(pathlib.PosixPath):
    """A path whose changes go through the simulated disk; reading is real."""

    def open(  # type: ignore[override]
        self, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None, newline: Any = None
    ) -> Any:
        machine = _machine(self)
        if set(mode) & set("wax+"):
            file = _OpenFile(machine, str(self), mode)
            if "b" in mode:
                return file
            return io.TextIOWrapper(_Raw(file), encoding=encoding or "utf-8", write_through=True, newline=newline)  # type: ignore[type-var]
        machine.pass_through("open", str(self), changes=False)
        return open(str(self), mode, buffering, encoding, errors, newline)

    def replace(self, target: Any) -> Any:
        machine, path, other = _machine(self), str(self), str(target)
        machine.pass_through("rename", path)
        (folder, name), (there, new) = machine.find(path), machine.find(other)
        if name not in folder.names:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        item = folder.names[name]
        if folder is there:
            folder.change(name, new, item)
        else:
            there.change(None, new, item)
            folder.change(name, None, None)
        os.replace(path, other)
        return DiskPath(target)

    rename = replace

    def unlink(self, missing_ok: bool = False) -> None:
        machine, path = _machine(self), str(self)
        machine.pass_through("unlink", path)
        folder, name = machine.find(path)
        if name not in folder.names:
            if missing_ok:
                return
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        folder.change(name, None, None)
        os.unlink(path)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        path = str(self)
        if os.path.isdir(path):
            if exist_ok:
                return
            raise FileExistsError(errno.EEXIST, "File exists", path)
        if parents:
            self.parent.mkdir(parents=True, exist_ok=True)
        machine = _machine(self)
        machine.pass_through("mkdir", path)
        folder, name = machine.find(path)
        folder.change(None, name, _Folder())
        os.mkdir(path)

    def chmod(self, mode: int, *, follow_symlinks: bool = True) -> None: ...

    # What is there is known without asking the system.

    def _item(self) -> Any:
        return _machine(self).item(str(self))

    def exists(self, **options: Any) -> bool:
        try:
            return self._item() is not None
        except FileNotFoundError:  # above all disks
            return super().exists(**options)

    def is_file(self, **options: Any) -> bool:
        return isinstance(self._item(), _File)

    def is_dir(self, **options: Any) -> bool:
        return isinstance(self._item(), _Folder)

    def iterdir(self) -> Any:
        folder = self._item()
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        if not isinstance(folder, _Folder):
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(self))
        found = [self / name for name in sorted(folder.names)]
        if (worker := _machine(self).world.worker) is not None:
            worker.maybe_pause()  # what was listed may be gone, or be something else, when it is used
        return iter(found)

    def glob(self, pattern: Any, **options: Any) -> Any:
        assert "/" not in pattern and "**" not in pattern, pattern
        folder = self._item()
        names = folder.names if isinstance(folder, _Folder) else ()
        return iter([self / name for name in sorted(fnmatch.filter(names, pattern))])

    if sys.version_info < (3, 12):

        def __truediv__(self, key: Any) -> Any:
            if type(key) is str and key and "/" not in key and key != ".":
                return self._from_parsed_parts(self._drv, self._root, [*self._parts, key])  # type: ignore[attr-defined]
            return super().__truediv__(key)


class VirtualDisk(Disk):
    """The disk as a process sees it."""

    def __init__(self, boot: Boot, machine: Machine) -> None:
        self._boot, self._machine = boot, machine
        boot.machine = machine

    def _of(self, descriptor: int) -> tuple[Any, str]:
        if self._boot.dead or self._boot.world.over:
            raise Crashed
        return self._machine.open_files[descriptor]

    def open(self, path: Any, flags: int, mode: int = 0o600) -> int:
        machine, text = self._machine, str(path)
        item = machine.item(text)
        if item is None and flags & os.O_CREAT:
            item = machine.create(text)
        elif item is not None and flags & os.O_EXCL and flags & os.O_CREAT:
            raise FileExistsError(errno.EEXIST, "File exists", text)
        else:
            machine.pass_through("open", text, changes=False)
        descriptor = os.open(text, flags & ~os.O_EXCL, mode)
        machine.open_files[descriptor] = (item, text)
        if flags & os.O_TRUNC and isinstance(item, _File):
            item.changes.append((0, None))
        return descriptor

    def close(self, descriptor: int) -> None:
        item, _ = self._of(descriptor)
        if isinstance(item, _File) and item.lock is self._boot:
            item.lock = None
        del self._machine.open_files[descriptor]
        os.close(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        item, path = self._of(descriptor)
        self._machine.truncate(item, path, descriptor, size)

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        if self._boot.dead or self._boot.world.over:  # a file that is only read may be open by itself
            raise Crashed
        return os.pread(descriptor, count, offset)

    def pread_cached(self, descriptor: int, buffer: memoryview, offset: int) -> bool:
        self._of(descriptor)
        self._machine.reads += 1  # what is in memory, and what is not, takes turns
        return self._machine.reads % 3 > 0 and os.preadv(descriptor, [buffer], offset) == len(buffer)

    def reserve(self, descriptor: int, size: int) -> None:
        _, path = self._of(descriptor)
        self._machine.pass_through("reserve", path)

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        item, path = self._of(descriptor)
        return self._machine.write(item, path, descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        item, path = self._of(descriptor)
        self._machine.sync(item, path)

    def file(self, descriptor: int, mode: str = "wb") -> Any:
        _, path = self._of(descriptor)
        del self._machine.open_files[descriptor]
        os.close(descriptor)
        return _OpenFile(self._machine, path, mode)

    def lock(self, descriptor: int) -> bool:
        item, _ = self._of(descriptor)
        if item.lock is not None and not item.lock.dead and item.lock is not self._boot:
            return False
        item.lock = self._boot
        return True

    def connect(self, path: Any) -> Any:
        return _Connection(self._boot, str(path))

    def space(self, folder: Any) -> tuple[int, int]:
        return _SPACE, 0 if self._machine.full else _SPACE // 2

    def end_process(self, code: int, text: str) -> NoReturn:
        boot, world = self._boot, self._boot.world
        if not (boot.dead or world.over):
            boot.exit_code = code
            world.sometimes(f"exit {code}")
            world.note("stderr", text.replace(self._machine.root, "").strip())
            world.kill(boot, power=False)  # type: ignore[attr-defined]
        raise Crashed


# --- SQLite --------------------------------------------------------------------------------------

_JOURNALS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL


class _VfsFile:
    """One file of a database; at its first sync a journal also syncs its folder, as in SQLite's VFS for Unix."""

    def __init__(self, boot: Boot, path: str, flags: int) -> None:
        self._folder_too = bool(flags & apsw.SQLITE_OPEN_CREATE and flags & _JOURNALS)
        self._boot, self._machine, self._path = boot, _machine(path), path
        item = self._machine.item(path)
        self._item = self._machine.create(path) if item is None else item
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def _guarded(self, work: Any, *arguments: Any) -> Any:
        if self._boot.dead or self._boot.world.over:
            raise apsw.IOError("dead")
        self._machine.in_database += 1
        try:
            return work(*arguments)
        except Crashed:
            raise apsw.IOError("dead") from None
        except OSError as problem:
            raise (apsw.FullError if problem.errno == errno.ENOSPC else apsw.IOError)(str(problem)) from None
        finally:
            self._machine.in_database -= 1

    def xRead(self, amount: int, offset: int) -> bytes:
        return os.pread(self._descriptor, amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._guarded(self._machine.write, self._item, self._path, self._descriptor, data, offset)

    def xTruncate(self, size: int) -> None:
        self._guarded(self._machine.truncate, self._item, self._path, self._descriptor, size)

    def xSync(self, flags: int) -> None:
        self._guarded(self._machine.sync, self._item, self._path)
        if self._folder_too:
            self._folder_too = False
            self._guarded(self._sync_folder)

    def _sync_folder(self) -> None:
        with contextlib.suppress(OSError):  # SQLite does not look at what comes of it
            self._machine.sync(self._machine.find(self._path)[0], os.path.dirname(self._path))

    def xFileSize(self) -> int:
        return os.fstat(self._descriptor).st_size

    def xLock(self, level: int) -> None: ...

    def xUnlock(self, level: int) -> None: ...

    def xCheckReservedLock(self) -> bool:
        return False

    def xFileControl(self, operation: int, pointer: int) -> bool:
        return False

    def xSectorSize(self) -> int:
        return 4096

    def xDeviceCharacteristics(self) -> int:
        return 0x1000  # SQLITE_IOCAP_POWERSAFE_OVERWRITE, as SQLite's own VFS for Unix says

    def xClose(self) -> None:
        os.close(self._descriptor)


class _Vfs(apsw.VFS):
    def __init__(self) -> None:
        super().__init__("metis-system", "", makedefault=False)

    def xOpen(self, name: Any, flags: list[int]) -> Any:
        path, boot = name.filename() if isinstance(name, apsw.URIFilename) else str(name), BOOT.get()
        assert boot is not None
        try:
            return _VfsFile(boot, path, flags[0])
        except Crashed:
            raise apsw.CantOpenError("dead") from None
        except OSError as problem:
            raise (apsw.FullError if problem.errno == errno.ENOSPC else apsw.IOError)(str(problem)) from None

    def xDelete(self, path: str, sync: bool) -> None:
        try:
            DiskPath(path).unlink()
            if sync:
                machine = _machine(path)
                machine.sync(machine.find(path)[0], path)
        except FileNotFoundError:
            raise apsw.IOError("gone") from None
        except (Crashed, OSError):
            raise apsw.IOError("dead") from None

    def xAccess(self, path: str, flags: int) -> bool:
        return os.path.exists(path)

    def xFullPathname(self, name: str) -> str:
        return os.path.abspath(name)

    def xRandomness(self, count: int) -> bytes:
        boot = BOOT.get()
        return random.Random(f"sqlite {boot.world.seed if boot else 0}").randbytes(count)


_VFS = _Vfs()
_TEXTS: dict[type[apsw.Error], tuple[type[sqlite3.Error], str]] = {
    apsw.FullError: (sqlite3.OperationalError, "database or disk is full"),
    apsw.IOError: (sqlite3.OperationalError, "disk I/O error"),
    apsw.CantOpenError: (sqlite3.OperationalError, "unable to open database file"),
    apsw.BusyError: (sqlite3.OperationalError, "database is locked"),
    apsw.CorruptError: (sqlite3.DatabaseError, "database disk image is malformed"),
    apsw.NotADBError: (sqlite3.DatabaseError, "file is not a database"),
    apsw.ConstraintError: (sqlite3.IntegrityError, "constraint failed"),
}


class _Rows:
    def __init__(self, connection: _Connection, cursor: Any) -> None:
        self._connection, self._cursor = connection, cursor

    def fetchall(self) -> list[Any]:
        try:
            return list(self._cursor)
        except (apsw.Error, UnicodeDecodeError) as problem:
            raise self._connection.translated(problem) from problem

    def fetchone(self) -> Any:
        rows = self.fetchall()
        return rows[0] if rows else None

    def __iter__(self) -> Any:
        return iter(self.fetchall())

    def close(self) -> None:
        self.fetchall()


class _Connection:
    """What Metis uses of `sqlite3.Connection`, with its errors."""

    def __init__(self, boot: Boot, path: str) -> None:
        self._boot = boot
        try:
            self._database = apsw.Connection(path, vfs="metis-system")
        except apsw.Error as problem:
            raise self.translated(problem) from problem
        boot.world.loop.kept.append(self._database)  # stays until the simulation is over

    def translated(self, problem: apsw.Error | UnicodeDecodeError) -> sqlite3.Error:
        if self._boot.dead or self._boot.world.over:
            raise Crashed
        if isinstance(problem, UnicodeDecodeError):
            return sqlite3.OperationalError("Could not decode to UTF-8 column")
        kind, text = _TEXTS.get(type(problem), (sqlite3.OperationalError, str(problem)))
        return kind(text)

    def execute(self, statement: str, values: Any = ()) -> _Rows:
        if self._boot.dead or self._boot.world.over:
            raise Crashed
        if self._boot.world.worker is not None:
            self._boot.world.worker.maybe_pause()
        try:
            return _Rows(self, self._database.execute(statement, values))
        except (apsw.Error, UnicodeDecodeError) as problem:
            raise self.translated(problem) from problem

    @property
    def in_transaction(self) -> bool:
        return bool(self._database.in_transaction)

    def rollback(self) -> None:
        self.execute("ROLLBACK")

    def close(self) -> None:
        with contextlib.suppress(apsw.Error):
            self._database.close()
