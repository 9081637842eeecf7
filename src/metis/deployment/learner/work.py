"""The folder in which a learner keeps what must outlive its process: updates that were not acknowledged yet.

LOCK              held by the process that uses the folder
membership.json   which run it takes part in, under which name, with which layout
spool/            a trained update: TASK.model, and TASK.json once it is whole; both go when it is acknowledged
models/           community models by their SHA-256; `.part` while they are on their way
network.json      the network's layout, where models travel encrypted
memory/           what the learner keeps between tasks; written by the trainer
sums/             of masked sums: keys, votes, what was masked, and the latest local model of windows that want it again
"""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from metis.deployment.storage import file_sha256, storage
from metis.deployment.trainer.masking import LOCAL
from metis.deployment.wire.chunks import travels_inside
from metis.deployment.wire.model_mac import checker, has_checksum
from metis.errors import ConfigError, DataError, LockHeld
from metis.files import make_folder, sync, sync_file, take_lock, write_durable
from metis.system import disk


@dataclass(frozen=True)
class Update:
    """A local model that waits for its acknowledgement, and what it took to train it."""

    run: str
    task: int
    steps: int
    seconds: float
    time_per_batch: float
    loss: float
    sha256: str
    bytes: int
    compression_error: float | None = None  # the share of it that is left out for now; None: it is whole
    seal: str = ""  # a MAC of the bytes, in hexadecimal digits; then there is no SHA-256
    again: bool = False  # for a window: what an earlier one had, masked once more

    @property
    def checksum(self) -> str:
        return self.seal or self.sha256


class WorkFolder:
    """One learner's folder; locked from `__enter__` on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run, self.learner, self.layout = "", "", ""
        self._lock: int | None = None
        self._waiting: dict[int, Update] | None = None  # what is in the spool; None before it was looked at
        self.unsynced: set[int] = set()  # tasks whose updates a loss of power may still take

    def __enter__(self) -> WorkFolder:
        try:
            for name in ("spool", "models", "memory"):
                make_folder(self.folder / name)
            self._lock = take_lock(self.folder / "LOCK")
        except LockHeld as held:
            raise ConfigError(
                f"another learner ({held.holder or 'an unknown process'}) uses {self.folder}; give each learner its "
                "own --work folder"
            ) from None
        except OSError as problem:
            raise _unusable(self.folder, problem) from None
        try:
            known = json.loads((self.folder / "membership.json").read_text("utf-8"))
            self.run, self.learner, self.layout = known["run"], known["learner"], known["layout"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it never took part, or was killed before it had written that for the first time
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                for task in tuple(self.unsynced):
                    self.sync(task)
            disk().close(self._lock)

    def begin(self, run: str, learner: str, layout: str) -> None:
        """Take part in this run from now on; files of another one are dropped."""
        if (run, learner, layout) == (self.run, self.learner, self.layout):
            return
        if (run, learner) != (self.run, self.learner):
            for folder in ("spool", "models", "memory"):
                for path in (self.folder / folder).iterdir():
                    path.unlink()
            forget_local_models(self.folder / "sums")
            self._waiting = None
            self.unsynced.clear()
        self.run, self.learner, self.layout = run, learner, layout
        write_durable(
            self.folder / "membership.json", json.dumps({"run": run, "learner": learner, "layout": layout}).encode()
        )

    def keep_network(self, layout: Any) -> None:
        """Remember what is in the envelope of an encrypted model, for one that is fetched when nothing is trained."""
        if self.network() != layout:
            write_durable(self.folder / "network.json", json.dumps(layout).encode())

    def network(self) -> Any:
        """The layout that was kept; None if there is none."""
        try:
            return json.loads((self.folder / "network.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None

    @property
    def memory(self) -> Path:
        return self.folder / "memory"

    # --- updates --------------------------------------------------------------------------------

    def update_file(self, task: int) -> Path:
        """Where the trainer writes the local model of this task."""
        return self.folder / "spool" / f"{task}.model"

    def _note(self, task: int) -> Path:
        return self.folder / "spool" / f"{task}.json"

    def keep(self, update: Update, *, synced: bool = True) -> None:
        """Remember that the local model in the task's file is whole and waits.

        Unless it is `synced`, which takes longer than handing in a small one, a loss of power may take it until `sync`.
        It is written under its final name: half of it is not valid JSON and not taken for an update, and a new name
        afterwards would mean waiting for the disk once more.
        """
        path = self._note(update.task)
        waiting = self._spool()
        try:
            with path.open("wb") as file:
                file.write(json.dumps(asdict(update)).encode())
                if synced:
                    sync_file(file)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        if synced:
            sync(path.parent)
        else:
            self.unsynced.add(update.task)
        waiting[update.task] = update

    def sync(self, task: int) -> None:
        """No loss of power takes this update any more.

        It is written again: what the disk could not write once counts as written for the next fsync.
        """
        model, note = self.update_file(task), self._note(task)
        for path in (model, note):
            if task in self.unsynced:  # else it was dropped meanwhile
                with contextlib.suppress(FileNotFoundError):
                    write_durable(path, path.read_bytes())
        if task not in (self._waiting or {}):  # dropped between the reading and the writing
            for path in (note, model):
                path.unlink(missing_ok=True)
        self.unsynced.discard(task)

    def updates(self) -> list[Update]:
        """What waits for an acknowledgement, in the order of the tasks; entries without a whole model are removed."""
        return sorted(self._spool().values(), key=lambda update: update.task)

    def _spool(self) -> dict[int, Update]:
        """As it was found, and changed since: nobody else writes to it."""
        if self._waiting is None:
            found = {}
            for path in (self.folder / "spool").glob("*.json"):
                try:
                    update = Update(**json.loads(path.read_text("utf-8")))
                    whole = self._is_whole(update)
                except (OSError, ValueError, TypeError, DataError):
                    whole = False
                if whole:
                    found[update.task] = update
                else:
                    path.unlink(missing_ok=True)
            self._waiting = found
            # The process before this one may have ended before it synced them.
            self.unsynced |= {update.task for update in found.values() if travels_inside(update.bytes)}
        return self._waiting

    def _is_whole(self, update: Update) -> bool:
        path = self.update_file(update.task)
        if storage().size(path) != update.bytes:
            return False
        # A small one may not have been synced before the power failed.
        return not travels_inside(update.bytes) or has_checksum(path, update.checksum)

    def drop(self, task: int) -> None:
        """This update is acknowledged, or will never count."""
        self.unsynced.discard(task)
        self._spool().pop(task, None)
        self._note(task).unlink(missing_ok=True)
        self.update_file(task).unlink(missing_ok=True)

    def tidy(self) -> None:
        """At the start: remove local models that were never finished."""
        try:
            waiting = {self.update_file(update.task).name for update in self.updates()}
            for path in (self.folder / "spool").iterdir():
                if path.suffix != ".json" and path.name not in waiting:
                    path.unlink()
        except OSError as problem:
            raise _unusable(self.folder, problem) from None

    # --- community models -----------------------------------------------------------------------

    def model_file(self, sha256: str) -> Path:
        return self.folder / "models" / sha256

    def incoming(self, sha256: str, length: int, model_mac: bytes) -> Incoming | None:
        """Where to put this model; None if it is here already."""
        return None if self.has_model(sha256, length) else Incoming(self, sha256, length, model_mac)

    def put_model(self, sha256: str, length: int, model_mac: bytes, content: bytes) -> bool:
        """Keep a small model that came whole; False if it is not what was asked for."""
        check, right = checker(sha256, model_mac)
        check.update(content)
        if len(content) != length or check.digest() != right:
            return False
        part = self.model_file(f"{sha256}.part")
        with part.open("wb", buffering=0) as file:
            writer = storage().writer(file)
            writer.write(memoryview(content))
            writer.finish()
        part.replace(self.model_file(sha256))
        return True

    def has_model(self, sha256: str, length: int) -> bool:
        """Whether the model is here, every bit of it."""
        path = self.model_file(sha256)
        try:
            return path.is_file() and storage().size(path) == length and file_sha256(path) == sha256
        except DataError:  # sealed, and not as it was written: it is fetched again
            return False

    def forget_models(self, keep: set[str]) -> None:
        for path in (self.folder / "models").iterdir():
            if path.name.removesuffix(".part") not in keep:
                path.unlink(missing_ok=True)


def forget_local_models(sums: Path) -> None:
    """Those that windows may want again, as `trainer.masking` keeps them."""
    if sums.is_dir():
        for path in sums.glob(f"{LOCAL}*"):
            path.unlink()


def _unusable(folder: Path, problem: OSError) -> ConfigError:
    where = f" ({problem.filename})" if problem.filename else ""
    room = "; make room on its disk, or choose another --work" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ConfigError(f"the work folder {folder} cannot be used: {problem.strerror}{where}{room}")


class Incoming:
    """A community model on its way into its file; continues where an earlier attempt ended."""

    def __init__(self, work: WorkFolder, sha256: str, length: int, model_mac: bytes = b"") -> None:
        """It is checked against the model MAC, or against the SHA-256 if there is none."""
        self._target, self._length = work.model_file(sha256), length
        self._part = self._target.with_name(f"{sha256}.part")
        self._announced = sha256, model_mac
        self._file = self._part.open("a+b", buffering=0)
        self._writer = storage().writer(self._file)
        self._check, self._right = checker(*self._announced)
        self.received = 0
        for piece in self._writer.resume(length):
            self._check.update(piece)
            self.received += len(piece)

    def check(self, data: bytes | memoryview) -> None:
        """Every byte goes through here and through `append`, in either order."""
        self._check.update(data)

    def reserve(self) -> None:
        """Find room for all of it."""
        disk().reserve(self._file.fileno(), self._length)

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        for data in pieces:
            self._writer.write(memoryview(data))
            self.received += len(data)

    def restart(self) -> None:
        self._file.truncate(0)
        self._writer = storage().writer(self._file)
        self._check, self._right = checker(*self._announced)
        self.received = 0

    def commit(self) -> bool:
        """Give it its name if it is what was asked for; otherwise start again."""
        if self.received != self._length or self._check.digest() != self._right:
            self.restart()
            return False
        self._writer.finish()
        self._part.replace(self._target)
        return True

    def close(self) -> None:
        self._file.close()


def update_of(run: str, answer: Mapping[str, Any]) -> Update:
    """The trainer's answer to `train`, as an update of this run."""
    return Update(run=run, **{name: answer[name] for name in Update.__dataclass_fields__ if name in answer})
