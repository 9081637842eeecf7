"""The child process in which a site's code runs: it makes the network, trains and evaluates.

Its parent, a learner or the controller, starts it, never waits for it with its own thread, and survives whatever
happens in here. They speak JSON, one object a line: commands on the child's stdin, answers on its stdout. Models
are files as in `wire`. What the site's code prints goes to stderr. The end of stdin is the end of the child.

A command has an `id`, which its answers repeat, and is answered by exactly one line with `done`, `failed` or
`abandoned`. They are done one after the other.

    {"id": 1, "command": "prepare", "settings": {...}, "site": FILE or null, "name": NAME or null, "index": 0,
     "layout": [...] or null, "memory": FOLDER or null, "device": DEVICE or null, "pace": SECONDS or null}
    {"id": 1, "done": {"examples": 120, "batch_size": 16, "evaluation_examples": 30, "fingerprint": "9f2c...",
                       "layout": [...], "metric": "accuracy", "higher_is_better": true, "seed": 1990}}
        makes network and data, once for each run; a `layout` that the network does not have is a failure. `name`
        null is the controller: no training data, its held-out data to evaluate on. `memory` is where momentum and
        local buffers outlive the process. With `pace` each batch takes at least so long.

    {"id": 2, "command": "train", "task": 7, "model": FILE, "steps": 240 or null, "seconds": 11.5 or null,
     "rate": 1.0, "out": FILE}
    {"id": 2, "progress": {"task": 7, "steps": 31}}                      at most one a second
    {"id": 2, "done": {"task": 7, "steps": 240, "seconds": 10.9, "time_per_batch": 0.045, "loss": 0.31,
                       "sha256": "51ab...", "bytes": 4840, "compression_error": 0.004 or null}}
        trains until the budget ends, `seconds` counted from the arrival of the command; the local model is in `out`,
        or what of it travels, durable. The failure of a training also says {"steps": 12, "seconds": 0.5}.

    {"id": 2, "command": "abandon"}
    {"id": 2, "abandoned": {"task": 7, "steps": 31}}
        ends the training with this id at the next batch; nothing happens if it has ended.

    {"id": 3, "command": "evaluate", "model": FILE}
    {"id": 3, "done": {"metrics": {"loss": 0.4, "accuracy": 0.88}, "examples": 30}}

    {"id": 4, "command": "initial", "seed": 1990 or null, "out": FILE}
    {"id": 4, "done": {"layout": [...], "fingerprint": "9f2c...", "sha256": "77e0...", "bytes": 4840}}
        writes the initial community model; null is the seed of the settings.

    {"id": 5, "command": "save", "model": FILE, "layout": [...], "out": FILE, "metadata": {"version": "9"}}
    {"id": 5, "done": {}}
        writes a model as safetensors under the network's own names; needs no `prepare`.

    {"id": 6, "command": "ping"}
    {"id": 6, "done": {}}

    {"id": 7, "failed": "site.py:12: ValueError: could not convert string to float: 'n/a'"}
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import math
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from safetensors import SafetensorError

from metis.core.events import Budget
from metis.core.model import Layout, Model
from metis.core.timing import robust_time_per_batch
from metis.deployment.trainer.followers import Followers, own_device
from metis.deployment.wire.protocol import model_bytes, model_parts, read_model
from metis.deployment.wire.transfer import beside
from metis.errors import ConfigError, DataError, MetisError, told
from metis.files import durable_file
from metis.runs.storage import load_arrays, save_arrays, save_model

if TYPE_CHECKING:
    from metis.learning import Engine, Examples, Learner, Memory
    from metis.learning.torch.parallel import Ranks

_PROGRESS_SECONDS = 1.0
_PIECE = 1 << 20  # bytes that are written at once
_ABANDON = 2  # what processes that train as one agree on at a batch boundary, besides going on and ending
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class Silo(Protocol):
    """What this process works with; the controller's has no learner."""

    @property
    def engine(self) -> Engine: ...

    @property
    def learner(self) -> Learner | None: ...

    @property
    def evaluation(self) -> Examples | None: ...

    @property
    def metric(self) -> str: ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def seed(self) -> int: ...


Build = Callable[[Mapping[str, Any]], Silo]  # from the command `prepare`


class Place(NamedTuple):
    """Which of the silo's processes this is; they train as one and meet at a file."""

    rank: int = 0
    size: int = 1
    meeting_point: str = ""


ALONE = Place()


class _Abandoned(Exception):
    """The parent wants no more of this training."""


# --- the parent's end of the line ---------------------------------------------------------------


class _Commands:
    """Commands as they come, read by a thread of its own so that a training can be ended."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], float] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._abandoned: int | None = None
        self._closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in iter(self._stream.readline, b""):
            arrived = time.monotonic()
            try:
                command = json.loads(line)
            except ValueError:
                command = None
            if not isinstance(command, dict):
                break  # whoever writes such lines is not the parent of this child
            if command.get("command") == "abandon":
                with self._changed:
                    self._abandoned = command.get("id")
                    self._changed.notify_all()
            else:
                self._queue.put((command, arrived))
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)

    def next(self) -> tuple[dict[str, Any], float] | None:
        """The next command and when it arrived; None when there will be none."""
        return self._queue.get()

    def unwanted(self, command: int, seconds: float) -> bool:
        """Whether this command's work is not wanted any more; waits so long for that to happen."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._abandoned == command, max(0.0, seconds))


class _Answers:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, **answer: Any) -> None:
        self._stream.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        self._stream.flush()


# --- files --------------------------------------------------------------------------------------


def write_model(path: Path, model: Model) -> tuple[str, int]:
    """Write the model's bytes, durable, whole or not at all; returns their SHA-256 and their number."""
    return write_parts(path, model_parts(model))


def write_parts(path: Path, parts: Iterable[memoryview]) -> tuple[str, int]:
    """Write these bytes, durable, whole or not at all; returns their SHA-256 and their number."""
    digest, length = hashlib.sha256(), 0
    try:
        with durable_file(path) as file:
            for part in parts:
                hashing = beside(digest.update, part)  # while it is written
                for start in range(0, len(part), _PIECE):
                    file.write(part[start : start + _PIECE])
                hashing.result()
                length += len(part)
    except OSError as problem:
        raise DataError(f"the model cannot be written to {path.parent}: {problem.strerror}") from problem
    return digest.hexdigest(), length


class _Memories:
    """What a learner keeps between tasks, after each of the last two.

    Two, so that a task that is given again starts from the memory that it started from the first time.
    """

    def __init__(self, folder: Path | None, *, writes: bool = True) -> None:
        self._folder = folder if writes else None
        self._kept: dict[int, Memory] = {}  # by task
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            found = re.fullmatch(r"task-(\d+)\.safetensors", path.name)
            if found is None:
                continue
            try:
                self._kept[int(found.group(1))] = load_arrays(path)[0]
            except DataError as problem:  # cut off by a loss of power: training starts without it
                sys.stderr.write(f"{problem}; the learner starts without it\n")

    def before(self, task: int) -> Memory | None:
        earlier = [number for number in self._kept if number < task]
        return self._kept[max(earlier)] if earlier else None

    def latest(self) -> Memory | None:
        return self._kept[max(self._kept)] if self._kept else None

    def keep(self, task: int, memory: Memory) -> None:
        if not memory:
            return
        self._kept[task] = memory
        stale = sorted(self._kept)[:-2]
        for number in stale:
            del self._kept[number]
        if self._folder is None:
            return
        try:
            save_arrays(self._folder / f"task-{task}.safetensors", memory, {})
            for number in stale:
                (self._folder / f"task-{number}.safetensors").unlink(missing_ok=True)
        except (OSError, SafetensorError) as problem:  # the local model is what counts; this one is still in memory
            sys.stderr.write(f"the learner's memory cannot be written to {self._folder}: {problem}\n")


# --- the work -----------------------------------------------------------------------------------


class _Trainer:
    """Does what it is told; `place` says which of several processes this is, that train as one."""

    def __init__(self, build: Build, commands: _Commands, answers: _Answers, place: Place) -> None:
        self._build, self._commands, self._answers, self._place = build, commands, answers, place
        self._followers: Followers | None = None
        self._ranks: Ranks | None = None
        self._in_hand: tuple[Any, dict[str, Any]] | None = None  # the command's id and what is known of its training
        if place.rank == 0 and place.size > 1:
            self._followers = Followers(place.size, self._lost)
            self._place = place._replace(meeting_point=self._followers.meeting_point)
        self._silo: Silo | None = None
        self._memories = _Memories(None)
        self._pace = 0.0
        self._works: dict[str, Callable[[dict[str, Any], float, dict[str, Any]], dict[str, Any]]] = {
            "prepare": self._prepare,
            "train": self._train,
            "evaluate": self._evaluate,
            "initial": self._initial,
            "save": self._save,
            "ping": lambda *_: {},
            "join": self._join,
        }

    def close(self) -> None:
        if self._followers is not None:
            self._followers.close()

    def _lost(self, reason: str) -> None:
        """Another process of the silo is gone: say so and end, because this one may wait for it for ever."""
        in_hand = self._in_hand
        if in_hand is not None:
            with contextlib.suppress(BrokenPipeError):
                self._answers.write(id=in_hand[0], failed=reason, **in_hand[1])
        sys.stderr.write(f"{reason}; the training process ends with it\n")
        os._exit(1)

    def answer(self, command: dict[str, Any], arrived: float) -> None:
        """Do what is asked and say how it ended."""
        number, facts = command.get("id"), {"steps": 0, "seconds": 0.0}
        self._in_hand = (number, facts)
        try:
            work = self._works.get(str(command.get("command")))
            if work is None:
                raise ConfigError(f"a trainer knows no command '{command.get('command')}'")
            if self._followers is not None and command["command"] in ("prepare", "train"):
                done = self._followers.together(command, lambda: work(command, arrived, facts))
            else:
                done = work(command, arrived, facts)
            if self._followers is not None and command["command"] == "prepare":
                meeting = {"id": number, "command": "join"}
                self._followers.together(meeting, lambda: self._join(meeting, arrived, facts))
        except _Abandoned:
            self._answers.write(id=number, abandoned={"task": command.get("task"), "steps": facts["steps"]})
        except Exception as problem:  # of the site's code, of its data, or of this machine
            extra = facts if command.get("command") == "train" else {}
            self._answers.write(id=number, failed=_sentence(problem), **extra)
        else:
            self._answers.write(id=number, done=done)
        self._in_hand = None

    @property
    def _ready(self) -> Silo:
        if self._silo is None:
            raise ConfigError("a trainer must be prepared before it can work")
        return self._silo

    def _prepare(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        if self._followers is not None:
            command = {**command, "device": own_device(command, 0, self._place.size)}
        silo = self._build(command)
        layout = silo.engine.layout
        if command["layout"] is not None:
            theirs = Layout.from_json(command["layout"])
            if theirs.fingerprint != layout.fingerprint:
                raise ConfigError(f"the network here is not the federation's: {_difference(layout, theirs)}")
        self._silo = silo
        memory = None if command["memory"] is None else Path(command["memory"])
        self._memories = _Memories(memory, writes=self._place.rank == 0)
        self._pace = float(command["pace"] or 0.0) if self._place.rank == 0 else 0.0
        learner = silo.learner
        return {
            "examples": 0 if learner is None else len(learner.indices),
            "batch_size": 0 if learner is None else learner.batch_size,
            "evaluation_examples": 0 if silo.evaluation is None else len(silo.evaluation),
            "fingerprint": layout.fingerprint,
            "layout": layout.to_json(),
            "metric": silo.metric,
            "higher_is_better": silo.higher_is_better,
            "seed": silo.seed,
        }

    def _join(self, _command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        """Train as one with the other processes of the silo; all of them are prepared."""
        from metis.learning.torch.parallel import Ranks

        if self._ranks is None:
            self._ranks = Ranks(self._place.rank, self._place.size, self._place.meeting_point)
        engine, learner = self._ready.engine, self._ready.learner
        if learner is None or not hasattr(engine, "ranks"):
            raise ConfigError(f"{type(engine).__name__} trains in one process only")
        engine.ranks = learner.ranks = self._ranks
        return {}

    def _train(self, command: dict[str, Any], arrived: float, facts: dict[str, Any]) -> dict[str, Any]:
        learner, engine = self._ready.learner, self._ready.engine
        if learner is None:
            raise ConfigError("the controller's own process does not train")
        task, number = int(command["task"]), command["id"]
        community_model = _read(command["model"], engine.layout)
        ends = math.inf if command["seconds"] is None else arrived + float(command["seconds"])
        pace = _Pace(self._pace, ends, lambda seconds: self._commands.unwanted(number, seconds))
        started = reported = time.monotonic()
        ranks, unwanted, budget = self._ranks, False, Budget(command["steps"], max(0.0, ends - started))
        if self._place.rank:  # the first process decides for all
            budget = Budget()

        def at_boundary(steps: int) -> None:
            nonlocal reported, unwanted
            facts["steps"] = steps
            unwanted = pace.wait(steps)
            if unwanted and ranks is None:
                raise _Abandoned
            now = time.monotonic()
            facts["seconds"] = now - started
            if now - reported >= _PROGRESS_SECONDS and not self._place.rank:
                self._answers.write(id=number, progress={"task": task, "steps": steps})
                reported = now

        def agree(ended: bool) -> bool:
            verdict = int(ended) if ranks is None else ranks.decide(_ABANDON if unwanted else int(ended))
            if verdict == _ABANDON:
                raise _Abandoned
            return bool(verdict)

        trained = learner.train_while(
            engine,
            community_model,
            task,
            budget,
            time.monotonic,
            self._memories.before(task),
            at_boundary,
            agree,
            float(command.get("rate", 1.0)),
        )
        parts = (memoryview(trained.payload),) if trained.payload else model_parts(trained.model)
        sha256, length = ("", 0) if self._place.rank else write_parts(Path(command["out"]), parts)
        self._memories.keep(task, dict(trained.memory))
        whole = trained.batch_times[:-1] if pace.cut_short and trained.steps > 1 else trained.batch_times
        return {
            "task": task,
            "steps": trained.steps,
            "seconds": trained.seconds,
            "time_per_batch": robust_time_per_batch(whole),
            "loss": trained.loss,
            "sha256": sha256,
            "bytes": length,
            "compression_error": trained.compression_error if math.isfinite(trained.compression_error) else None,
        }

    def _evaluate(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        silo = self._ready
        if silo.evaluation is None:
            raise ConfigError("there are no examples to evaluate on")
        model = _read(command["model"], silo.engine.layout)
        metrics = silo.engine.evaluate(model, silo.evaluation, self._memories.latest())
        unclear = [name for name, value in metrics.items() if not math.isfinite(value)]
        if unclear:
            raise DataError(f"the community model's {' and '.join(unclear)} here is not a finite number")
        return {"metrics": metrics, "examples": len(silo.evaluation)}

    def _initial(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        silo = self._ready
        model = silo.engine.initial_model(silo.seed if command["seed"] is None else int(command["seed"]))
        sha256, length = write_model(Path(command["out"]), model)
        layout = model.layout
        return {"layout": layout.to_json(), "fingerprint": layout.fingerprint, "sha256": sha256, "bytes": length}

    def _save(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        model = _read(command["model"], Layout.from_json(command["layout"]))
        save_model(Path(command["out"]), model, command["metadata"])
        return {}


class _Pace:
    """Makes a batch last as long as on a slower machine; ends at once when the budget does."""

    def __init__(self, seconds_per_batch: float, ends: float, unwanted: Callable[[float], bool]) -> None:
        self._seconds, self._ends, self._unwanted = seconds_per_batch, ends, unwanted
        self._batch_began = math.nan
        self.cut_short = False  # whether the last batch ended with the budget, not with the pace

    def wait(self, steps: int) -> bool:
        """At a batch boundary: wait for the rest of the batch; whether the task is unwanted."""
        rest = 0.0
        if self._seconds and steps:
            due = self._batch_began + self._seconds
            self.cut_short = self._ends < due
            rest = min(due, self._ends) - time.monotonic()
        unwanted = self._unwanted(rest)
        self._batch_began = time.monotonic()
        return unwanted


def _read(path: str, layout: Layout) -> Model:
    try:
        size = Path(path).stat().st_size
    except OSError as problem:
        raise DataError(f"the model {path} cannot be read: {problem.strerror}") from problem
    if size != model_bytes(layout):
        raise DataError(f"the model {path} has {size} bytes, one of this network has {model_bytes(layout)}")
    return read_model(Path(path), layout)


def _difference(ours: Layout, theirs: Layout) -> str:
    """The first thing in which two layouts differ."""
    here, there = ({spec.name: spec for spec in layout.tensors} for layout in (ours, theirs))
    for name in there.keys() - here.keys():
        return f"it has no tensor '{name}' of shape {list(there[name].shape)}"
    for name in here.keys() - there.keys():
        return f"the federation's has no tensor '{name}' of shape {list(here[name].shape)}"
    for name, spec in here.items():
        if spec != there[name]:
            other = there[name]
            return (
                f"tensor '{name}' is a {spec.role} {list(spec.shape)} of {spec.dtype} here, "
                f"a {other.role} {list(other.shape)} of {other.dtype} there"
            )
    return "its tensors come in another order"


def _sentence(problem: Exception) -> str:
    text = told(problem)
    memory = isinstance(problem, MemoryError) or (
        not isinstance(problem, MetisError) and "memory" in text and ("allocate" in text or "out of memory" in text)
    )
    return f"out of memory: {text}" if memory else text


def serve(build: Build, stdin: BinaryIO, stdout: BinaryIO, place: Place = ALONE) -> None:
    """Answer commands until there are no more; `build` makes what `prepare` asks for."""
    commands, answers = _Commands(stdin), _Answers(stdout)
    trainer = _Trainer(build, commands, answers, place)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        while (command := commands.next()) is not None:
            trainer.answer(*command)
    trainer.close()


def main(build: Build, place: Place = ALONE) -> None:
    """The life of the child process; it ends with its parent."""
    # The protocol keeps the pipes to itself: what the site's code prints or reads must not get into it.
    stdin, stdout = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Ctrl-C and a service manager's stop go to the whole group; the parent decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    if sys.platform == "linux":
        # The end of stdin is not seen while the site's code keeps the interpreter to itself.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    serve(build, stdin, stdout, place)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the site's code do not keep it alive
