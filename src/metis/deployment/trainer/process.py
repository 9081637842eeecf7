"""The process in which a site's code runs: it makes the network, trains and evaluates, as `commands` asks it to."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

from metis.core.events import Budget
from metis.core.layers.ckks import is_envelope
from metis.core.model import Layout, Model
from metis.core.policy import Policy
from metis.core.timing import robust_time_per_batch
from metis.deployment.storage import storage
from metis.deployment.trainer.commands import Answers, Commands
from metis.deployment.trainer.followers import Followers, own_device
from metis.deployment.trainer.masking import Masking
from metis.deployment.trainer.memories import Memories
from metis.deployment.trainer.pace import Pace
from metis.deployment.trainer.privacy import PrivacyGuard
from metis.deployment.wire.models import model_bytes, model_parts, read_model, write_model, write_parts
from metis.errors import ChildFailed, ClientFailed, ConfigError, DataError, Diverged, MetisError, NotFinite, described
from metis.privacy.encrypted import SharedKey, read_key
from metis.privacy.ledger import BudgetSpent
from metis.runs.folds import VALIDATION

if TYPE_CHECKING:
    from metis.learning import Engine, Examples, Learner
    from metis.learning.torch.parallel import Ranks

_PROGRESS_SECONDS = 1.0
_LONGEST_TRACEBACK = 20_000
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_ABANDON = 2  # what processes that train as one agree on at a batch boundary, besides going on and ending
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class Silo(Protocol):
    """What this process works with; the controller's has no learner."""

    @property
    def engine(self) -> Engine: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def layout(self) -> Layout: ...  # of every model that travels

    @property
    def learner(self) -> Learner | None: ...

    @property
    def evaluation(self) -> Examples | None: ...

    @property
    def validation(self) -> Examples | None: ...

    @property
    def metric(self) -> str: ...

    @property
    def higher_is_better(self) -> bool: ...

    def initial_model(self, seed: int) -> Model: ...

    @property
    def seed(self) -> int: ...


Build = Callable[[Mapping[str, Any]], Silo]  # from the command `prepare`


class Group(NamedTuple):
    """Which of the silo's processes this is; they train as one and meet at a file."""

    rank: int = 0
    size: int = 1
    meeting_point: str = ""


ALONE = Group()


class _Held(NamedTuple):
    """A local model that is masked when a window has a place for it; it is in this process's memory only."""

    task: int
    model: Model
    base: Model
    facts: dict[str, Any]


class _Abandoned(Exception):
    """The parent wants no more of this training."""


class _NetworkDiffers(ConfigError):
    """The site's network does not have the layout of the federation's."""


class _Trainer:
    """Carries out commands; `group` is its rank among processes that train as one."""

    def __init__(self, build: Build, commands: Commands, answers: Answers, group: Group) -> None:
        self._build, self._commands, self._answers, self._group = build, commands, answers, group
        self._followers: Followers | None = None
        self._ranks: Ranks | None = None
        self._current: tuple[Any, dict[str, Any]] | None = None  # the command's id and what is known of its training
        if group.rank == 0 and group.size > 1:
            self._followers = Followers(group.size, self._lost)
            self._group = group._replace(meeting_point=self._followers.meeting_point)
        self._silo: Silo | None = None
        self._memories = Memories(None)
        self._guard: PrivacyGuard | None = None
        self._key: SharedKey | None = None
        self._pace = 0.0
        self._held: _Held | None = None
        self._works: dict[str, Callable[[dict[str, Any], float, dict[str, Any]], dict[str, Any]]] = {
            "prepare": self._prepare,
            "train": self._train,
            "mask": self._mask,
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
        """Another process of the silo is gone: report it and end, because this one may wait for it for ever."""
        current = self._current
        if current is not None:
            with contextlib.suppress(BrokenPipeError):
                self._answers.write(id=current[0], failed=reason, kind="process_died", **current[1])
        sys.stderr.write(f"{reason}; the training process ends with it\n")
        os._exit(1)

    def answer(self, command: dict[str, Any], arrived: float) -> None:
        """Carry out a command and answer it."""
        number, facts = command.get("id"), {"steps": 0, "seconds": 0.0}
        self._current = (number, facts)
        try:
            work = self._works.get(str(command.get("command")))
            if work is None:
                raise ConfigError(f"'{command.get('command')}' is not a command of a trainer")
            if self._followers is not None and command["command"] in ("prepare", "train"):
                done = self._followers.all_do(command, lambda: work(command, arrived, facts))
            else:
                done = work(command, arrived, facts)
            if self._followers is not None and command["command"] == "prepare":
                meeting = {"id": number, "command": "join"}
                self._followers.all_do(meeting, lambda: self._join(meeting, arrived, facts))
        except _Abandoned:
            self._answers.write(id=number, abandoned={"task": command.get("task"), "steps": facts["steps"]})
        except Exception as problem:  # of the site's code, of its data, or of this machine
            extra = facts if command.get("command") == "train" else {}
            text, kind, details = explained(problem)
            self._answers.write(id=number, failed=text, kind=kind, details=details, **extra)
        else:
            self._answers.write(id=number, done=done)
        self._current = None

    @property
    def _ready(self) -> Silo:
        if self._silo is None:
            raise ConfigError("a trainer must be prepared before it can work")
        return self._silo

    def _prepare(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        if self._followers is not None:
            command = {**command, "device": own_device(command, 0, self._group.size)}
        silo = self._build(command)
        layout = silo.layout
        if command["layout"] is not None:
            theirs = Layout.from_json(command["layout"])
            if theirs.fingerprint != layout.fingerprint:
                raise _NetworkDiffers(f"the network here is not the federation's: {_difference(layout, theirs)}")
        frozen, shared = getattr(silo.engine, "frozen_sha256", ""), command["settings"].get("frozen", "")
        if shared and frozen != shared:
            raise _NetworkDiffers(
                f"the frozen part of the network here has the digest {frozen[:12] or 'of nothing'}, the federation's "
                f"{shared[:12]}; load the same base model as the other sites"
            )
        learner = silo.learner
        self._key = None if learner is None else SharedKey.of(command.get("ckks_key"), silo.policy)
        self._silo = silo
        memory = None if command["memory"] is None else Path(command["memory"])
        self._memories = Memories(memory, writes=self._group.rank == 0)
        self._pace = float(command["pace"] or 0.0) if self._group.rank == 0 else 0.0
        self._guard = None
        if learner is not None:
            self._guard = PrivacyGuard.of(learner, silo.engine, command.get("privacy") or {}, self._group.size)
        return {
            "examples": 0 if learner is None else len(learner.indices),
            "batch_size": 0 if learner is None else learner.batch_size,
            "evaluation_examples": 0 if silo.evaluation is None else len(silo.evaluation),
            "validation_examples": 0 if silo.validation is None else len(silo.validation),
            "frozen": frozen,
            "fingerprint": layout.fingerprint,
            "layout": layout.to_json(),
            "network": None if self._key is None else silo.engine.layout.to_json(),
            "metric": silo.metric,
            "metrics": sorted({"loss", silo.metric, *getattr(silo.engine, "metrics", ())}),
            "higher_is_better": silo.higher_is_better,
            "seed": silo.seed,
            **({} if self._guard is None else self._guard.facts()),
        }

    def _join(self, _command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        """Train as one with the other processes of the silo; all of them are prepared."""
        from metis.learning.torch.parallel import Ranks

        if self._ranks is None:
            self._ranks = Ranks(self._group.rank, self._group.size, self._group.meeting_point)
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
        order = None if self._group.rank else command.get("masking")
        masking, hold = None if order is None else Masking(order), order is None and bool(command.get("hold"))
        self._held = None
        if masking is not None and (done := masking.done()) is not None:  # before a crash
            return {**done[0], **_written(command, done[1])}
        community_model = self._opened(_read(command["model"], self._ready.layout))
        ends = math.inf if command["seconds"] is None else arrived + float(command["seconds"])
        pace = Pace(self._pace, ends, lambda seconds: self._commands.unwanted(number, seconds))
        started = reported = time.monotonic()
        ranks, unwanted = self._ranks, False
        budget = Budget(command["steps"], max(0.0, ends - started), command.get("batches_per_step") or 1)
        if self._group.rank:  # the first process decides for all
            budget = Budget()

        def at_boundary(steps: int) -> None:
            nonlocal reported, unwanted
            facts["steps"] = steps
            unwanted = pace.wait(steps)
            if unwanted and ranks is None:
                raise _Abandoned
            now = time.monotonic()
            facts["seconds"] = now - started
            if now - reported >= _PROGRESS_SECONDS and not self._group.rank:
                self._answers.write(id=number, progress={"task": task, "steps": steps})
                reported = now

        def agree(ended: bool) -> bool:
            verdict = int(ended) if ranks is None else ranks.decide(_ABANDON if unwanted else int(ended))
            if verdict == _ABANDON:
                raise _Abandoned
            return bool(verdict)

        if self._guard is not None:
            self._guard.reserve(task, budget)
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
        whole = trained.batch_times[:-1] if pace.cut_short and trained.steps > 1 else trained.batch_times
        facts_of = {
            "task": task,
            "steps": trained.steps,
            "seconds": trained.seconds,
            "time_per_batch": robust_time_per_batch(whole),
            # A masked one is part of the sum.
            "loss": None if order or hold or self._key or not math.isfinite(trained.loss) else trained.loss,
            "compression_error": trained.notes.get("compression_error"),
        }
        if hold and not self._group.rank:
            self._held = _Held(task, trained.model, community_model, facts_of)
            self._memories.keep(task, dict(trained.memory))
            return facts_of
        parts = [memoryview(trained.payload)] if trained.payload else list(model_parts(trained.model))
        if self._key is not None:
            parts = self._key.sealed(trained.model, community_model)
        if masking is not None:
            parts = masking.mask(trained.model, community_model, trained.loss, facts_of, self._ready.policy)
        written = {"sha256": "", "bytes": 0} if self._group.rank else _written(command, parts)
        self._memories.keep(task, dict(trained.memory))
        return {**facts_of, **written}

    def _mask(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        """Mask what was trained, now that a window has a place for it."""
        held, self._held = self._held, None
        if held is None or held.task != int(command["task"]):
            raise DataError(f"the model of task {command['task']} is not here any more; another process has trained it")
        parts = Masking(command["masking"]).mask(held.model, held.base, math.nan, held.facts, self._ready.policy)
        return {**held.facts, **_written(command, parts)}

    def _evaluate(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        silo = self._ready
        if silo.evaluation is None:
            raise ConfigError("there are no examples to evaluate on")
        model = self._opened(_read(command["model"], silo.layout))
        memory, with_sums = self._memories.latest(), getattr(silo.engine, "evaluate_with_sums", None)
        if with_sums is None:  # an engine of a plug-in
            metrics, sums = silo.engine.evaluate(model.network, silo.evaluation, memory), {}
        else:
            metrics, sums = with_sums(model.network, silo.evaluation, memory)
        if silo.validation is not None:
            found = silo.engine.evaluate(model.network, silo.validation)
            metrics |= {VALIDATION + name: value for name, value in found.items()}
        unclear = [name for name, value in metrics.items() if not math.isfinite(value)]
        if unclear:
            raise DataError(f"the community model's {' and '.join(unclear)} here is not a finite number")
        return {"metrics": metrics, "sums": sums, "examples": len(silo.evaluation)}

    def _initial(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        silo = self._ready
        model = silo.initial_model(silo.seed if command["seed"] is None else int(command["seed"]))
        sha256, length = write_model(Path(command["out"]), model)
        layout = model.layout
        return {"layout": layout.to_json(), "fingerprint": layout.fingerprint, "sha256": sha256, "bytes": length}

    def _save(self, command: dict[str, Any], _arrived: float, _facts: dict[str, Any]) -> dict[str, Any]:
        model = _read(command["model"], Layout.from_json(command["layout"]))
        if is_envelope(model.layout) and command.get("ckks_key") is not None:  # at a learner
            if command.get("network") is None:
                raise DataError(
                    "the layout of the network is not known here any more, so the model cannot be decrypted"
                )
            key = self._key or SharedKey(read_key(Path(command["ckks_key"])))  # not prepared: it came after the end
            model = key.opened(model, Layout.from_json(command["network"]))
        storage().save_model(Path(command["out"]), model, command["metadata"])
        return {}

    def _opened(self, model: Model) -> Model:
        """A community model that came, decrypted if it travels encrypted."""
        return model if self._key is None else self._key.opened(model, self._ready.engine.layout)


def _written(command: Mapping[str, Any], parts: Iterable[memoryview]) -> dict[str, Any]:
    """Write what is sent; its checksum and its length."""
    from metis.deployment.wire.model_mac import new_model_mac

    mac = new_model_mac() if command.get("seal") else None
    checksum, length = write_parts(Path(command["out"]), parts, mac, synced=command.get("synced", True))
    kind = "sha256" if mac is None else "seal"
    return {"sha256": "", kind: checksum, "bytes": length}


def _read(path: str, layout: Layout) -> Model:
    try:
        size = storage().size(Path(path))
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


def explained(problem: Exception) -> tuple[str, str, str]:
    """A sentence, the kind of failure as `Cause` names it, and the traceback."""
    if isinstance(problem, ChildFailed):  # of another process of this silo
        return str(problem), problem.kind, problem.details
    text = described(problem)
    details = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))[-_LONGEST_TRACEBACK:]
    if isinstance(problem, MemoryError) or (
        not isinstance(problem, MetisError) and "memory" in text and ("allocate" in text or "out of memory" in text)
    ):
        return f"out of memory: {text}", "out_of_memory", details
    if isinstance(problem, IndexError) and "Target" in text and "out of bounds" in text:  # of torch's cross-entropy
        text = f"a label is not among the classes of the network: {text}"
    first = problem.__cause__ if isinstance(problem, MetisError) else problem
    if isinstance(first, OSError) and first.errno in _DISK:
        return text, "disk", details
    kinds = (
        (NotFinite, "data_not_finite"),
        (BudgetSpent, "privacy_budget"),
        (ClientFailed, "site_code"),
        (Diverged, "diverged"),
        (_NetworkDiffers, "network_differs"),
    )
    kind = next((kind for known, kind in kinds if isinstance(problem, known)), None)
    return text, kind or ("setup" if isinstance(problem, MetisError) else "site_code"), details


def serve(build: Build, stdin: BinaryIO, stdout: BinaryIO, group: Group = ALONE) -> None:
    """Answer commands until there are no more; `build` makes what `prepare` asks for."""
    commands, answers = Commands(stdin), Answers(stdout)
    trainer = _Trainer(build, commands, answers, group)
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        while (command := commands.next()) is not None:
            trainer.answer(*command)
    trainer.close()


def main(build: Build, group: Group = ALONE) -> None:
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
    serve(build, stdin, stdout, group)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the site's code do not keep it alive
