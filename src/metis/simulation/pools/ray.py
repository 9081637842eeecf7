"""Learners that train on Ray: on the processors and GPUs of any number of machines, with the same result.

A model is put into Ray's object store once for each version, the data once for each run; a worker that is lost with
its process or its machine costs time and nothing else. The only module that imports ray.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from metis import __version__
from metis.core.model import Model
from metis.errors import ConfigError, InternalError, needs_package
from metis.learning import Trained
from metis.simulation.pools.local import Fetch, Job, WorkerPool, Workplace, before_processes, outcome_of
from metis.simulation.pools.settings import PoolSettings

try:
    import ray
    import ray.cloudpickle
    from ray.exceptions import (
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
        WorkerCrashedError,
    )
except ImportError as missing:
    raise ConfigError(needs_package("the pool 'ray'", missing.name, "ray")) from missing

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError, OutOfMemoryError)
_MAX_ATTEMPTS = 5  # at one task: what ends its process each time is not bad luck
_MAX_FAILED_STARTS = 3  # of workers, one after the other

# Modules that no other machine can import: those of site files.
_SITE_FILES = "metis_site_"


# Ray reports dead workers, which the pool handles itself, on stdout, which is reserved for results.
_print = ray._private.worker.print_to_stdstream
ray._private.worker.print_to_stdstream = lambda data, **options: _print({**data, "is_err": True}, **options)


class _Worker:
    """What runs on Ray: one process that has the engine and the data and does one piece of work after the other."""

    def __init__(self, parcel: Sequence[Any], paths: Sequence[str], on_gpu: bool) -> None:
        # Where the simulator found its modules, the worker looks too, last: on one machine, or on a shared disk.
        sys.path += [path for path in paths if path not in sys.path]
        self._problem: Exception | None = None
        try:
            workplace: Workplace = ray.get(parcel[0])
            engine: Any = workplace.engine
            self._workplace = replace(workplace, engine=engine.on("cuda")) if on_gpu else workplace
        except Exception as problem:  # reported by `begin`: a constructor that raises only looks like a dead worker
            self._problem = problem

    def begin(self) -> tuple[str | None, dict[str, str]]:
        """Why this worker cannot work, if so; and what it works with."""
        problem = self._problem
        return (None if problem is None else _last_line(problem)), _versions()

    def do(self, work: str, model: Model, arguments: tuple[Any, ...]) -> Any:
        return outcome_of(self._workplace, work, (model, *arguments))


class RayPool(WorkerPool):
    """Workers on a Ray cluster: the one that is named, else one on this machine, which ends with this process."""

    def __init__(self, workplace: Workplace, settings: PoolSettings) -> None:
        device = getattr(workplace.engine, "device", "cpu")
        if device != "cpu":
            raise ConfigError(
                f"training.device is '{device}', but a worker on Ray sees only the GPUs that it is given: leave the "
                "device at cpu and set run.gpus_per_learner"
            )
        if settings.gpus_per_learner and not hasattr(workplace.engine, "on"):
            raise ConfigError(
                f"{type(workplace.engine).__name__} cannot be moved to a GPU: it has no method on(device)"
            )
        _connect(settings)
        workers = min(settings.workers or _room(settings), len(workplace.learners))
        super().__init__(workers)
        paths = list(sys.path)
        for name, module in list(sys.modules.items()):
            if name.startswith(_SITE_FILES):
                ray.cloudpickle.register_pickle_by_value(module)
                paths.append(str(Path(str(module.__file__)).parent))
        # The workplace in a list: bare, Ray would open it before the worker knows the paths.
        self._arguments = ([ray.put(workplace)], paths, settings.gpus_per_learner > 0)
        self._worker = ray.remote(_Worker).options(
            num_cpus=settings.threads, num_gpus=settings.gpus_per_learner, max_restarts=0
        )
        self._actors: dict[int, Any] = {}  # by worker
        self._failed_starts = 0
        self._store = threading.Lock()
        # A model stays in the object store for as long as the simulator keeps it, or the function that fetches it.
        self._by_fetch: weakref.WeakKeyDictionary[Fetch, Any] = weakref.WeakKeyDictionary()
        self._by_model: weakref.WeakKeyDictionary[Model, Any] = weakref.WeakKeyDictionary()
        self._start([functools.partial(self._feed, worker) for worker in range(workers)])

    def close(self) -> None:
        """End the workers, in the middle of a task if need be; the cluster stays."""
        self._end_feeding()
        with self._changed:
            for actor in self._actors.values():
                _kill(actor)
        for thread in self._threads:
            thread.join()

    def _feed(self, worker: int) -> None:
        while (actor := self._hire(worker)) is not None:
            while (job := self._next_job()) is not None:
                try:
                    outcome = self._ask(actor, job)
                except _LOST as problem:
                    _kill(actor)
                    if job.attempts < _MAX_ATTEMPTS:
                        self._put_back(job)
                    else:
                        self._done(job, _too_many_deaths(job, problem))
                    break
                self._done(job, outcome)
            else:
                return

    def _hire(self, worker: int) -> Any | None:
        """A worker that is ready, as soon as the cluster has room for it; None when the pool is closed or hopeless."""
        while True:
            actor = self._worker.remote(*self._arguments)
            with self._changed:
                self._actors[worker] = actor
                if self._closed:
                    _kill(actor)
                    return None
            try:
                problem, versions = ray.get(actor.begin.remote())
            except RayError as death:
                if self._hopeless(death):
                    return None
                continue
            if problem is None and versions != _versions():
                differ = ", ".join(f"{name} {versions[name]}" for name in versions)
                here = ", ".join(f"{name} {version}" for name, version in _versions().items())
                problem = f"it has {differ}, here is {here}; the results would differ"
            if problem is not None:
                self._give_up(ConfigError(f"a worker on Ray cannot work: {problem}"))
                return None
            self._failed_starts = 0
            return actor

    def _hopeless(self, death: RayError) -> bool:
        """Whether it makes no sense to hire again after a worker died before it was ready."""
        with self._changed:
            self._failed_starts += 1
            if not self._closed and self._failed_starts >= _MAX_FAILED_STARTS:
                self._give_up(ConfigError(f"a worker on Ray cannot start: {_first_line(death)}"))
            return self._closed or self._problem is not None

    def _ask(self, actor: Any, job: Job[Any]) -> Any:
        """The outcome of the job; raises Ray's exception for a worker that is lost."""
        try:
            outcome = ray.get(actor.do.remote(job.work, self._put(job.model), job.arguments))
        except _LOST:
            raise
        except RayTaskError as problem:  # not of the work, whose exceptions are outcomes
            return InternalError(f"a worker on Ray failed: {_last_line(problem)}")
        except Exception as problem:
            return InternalError(f"what a worker on Ray answered cannot be read: {problem!r}")
        return [_own(each) for each in outcome] if isinstance(outcome, list) else _own(outcome)

    def _put(self, fetch: Fetch) -> Any:
        """The model in the object store: put there once, however often it is needed."""
        with self._store:
            known = self._by_fetch.get(fetch)
            if known is None:
                model = fetch()
                known = self._by_model.get(model)
                if known is None:
                    known = self._by_model[model] = ray.put(model)
                self._by_fetch[fetch] = known
            return known


_ours = False  # whether `_connect` has connected this process with Ray, and not the program that it belongs to


def _connect(settings: PoolSettings) -> None:
    global _ours  # noqa: PLW0603  # a process has one connection, and Ray keeps it
    if ray.is_initialized():
        return
    address = settings.ray_address or os.environ.get("RAY_ADDRESS")
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Room for as many as were asked for, also where there are fewer processors.
            processors = max(1, settings.workers) * settings.threads if settings.workers else None
            ray.init(address="local", num_cpus=processors, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as problem:
        where = f"the Ray cluster at {address} cannot be used" if address else "Ray cannot be started here"
        raise ConfigError(f"{where}: {_first_line(problem)}") from problem
    _ours = True


def leave() -> None:
    """End a cluster that was started here: its threads do not survive a fork of this process, nor does the fork."""
    if ray.is_initialized():
        if not _ours:
            raise ConfigError("worker processes cannot be forked where the program uses Ray itself: use the pool 'ray'")
        ray.shutdown()


before_processes.append(leave)


def _room(settings: PoolSettings) -> int:
    """How many workers the cluster has room for, as it is now."""
    there = ray.cluster_resources()
    room = there.get("CPU", 0) / settings.threads
    if settings.gpus_per_learner:
        room = min(room, there.get("GPU", 0) / settings.gpus_per_learner)
    if room < 1:
        raise ConfigError(
            f"the Ray cluster has {there.get('CPU', 0):g} processors and {there.get('GPU', 0):g} GPUs; a worker needs "
            f"{settings.threads} and {settings.gpus_per_learner:g}"
        )
    return int(room)


def _versions() -> dict[str, str]:
    """What must be the same everywhere for the same bits; which build of torch it is may differ."""
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "numpy")}
    return {"metis": __version__, **versions}


def _own(trained: Any) -> Any:
    """With arrays of this process: those that Ray returns keep occupying its object store."""
    if not isinstance(trained, Trained):
        return trained
    model = Model(trained.model.layout, np.array(trained.model.vector), np.array(trained.model.counters))
    return replace(trained, model=model, memory={name: np.array(array) for name, array in trained.memory.items()})


def _kill(actor: Any) -> None:
    with suppress(Exception):  # it is gone, or the cluster is
        ray.kill(actor)


def _too_many_deaths(job: Job[Any], problem: Exception) -> InternalError:
    what = "an evaluation" if job.work == "evaluate" else f"task {job.arguments[1]}"
    return InternalError(f"{what} ended its worker on Ray {job.attempts} times; out of memory? {_first_line(problem)}")


def _first_line(problem: Exception) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def _last_line(problem: Exception) -> str:
    return next((line.strip() for line in reversed(str(problem).splitlines()) if line.strip()), type(problem).__name__)
