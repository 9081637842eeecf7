"""A process that runs one cell after another and reports how far it is."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from metis.errors import ConfigError, InternalError, LockHeld, MetisError
from metis.experiments.build import build_federation, build_stop
from metis.experiments.compose import build_policy, build_solver
from metis.experiments.config.load import ExperimentConfig
from metis.experiments.data import Division, divide
from metis.files import locked
from metis.reproduction.curves import Steady, curve_of, read_curve, settings_digest, target_of, write_curve
from metis.reproduction.environments import Cell, varied
from metis.runs.checkpoint import CHECKPOINT
from metis.runs.folds import RunFold
from metis.runs.run import CONFIG, Run

REPORT_SECONDS = 0.5  # how often a cell reports how far it is
_CURVE_SECONDS = 60.0  # how often its curve is written
_LOCK_SECONDS = 120.0  # an orphaned process may take that long to finish its task


@dataclass(frozen=True)
class Job:
    """One cell to be run, or a part of it."""

    cell: Cell
    folder: Path
    until: float | None = None  # virtual seconds; then it is saved and waits for its next turn
    curve: Path | None = None  # the file that keeps what it measures


def work(connection: Connection) -> None:
    """Run one cell after another, until the session has no more or interrupts this process."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # the terminal's Ctrl-C goes only to the session, which passes it on once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(KeyboardInterrupt, EOFError, OSError):  # the session has ended or stopped us
        connection.send("started")
        divisions = _Divisions()
        while True:
            job = connection.recv()
            try:
                _run_cell(connection, divisions, job)
            except MetisError as problem:
                connection.send(problem)
            except Exception as problem:  # so that the session can name the cell
                connection.send(InternalError(f"{type(problem).__name__}: {problem}"))
            connection.send("ended")


def _run_cell(connection: Connection, divisions: _Divisions, job: Job) -> None:
    config, only, folder = job.cell.config, job.cell.only, job.folder
    last = written = 0.0
    before: int | None = None
    curves, ending = _Curves(job), _AtTarget(job)

    def report(fold: RunFold) -> None:
        nonlocal last, before, written
        now = time.perf_counter()
        if now - written > _CURVE_SECONDS:
            written = now
            curves.write(fold)
        measured = fold.history[-1].at if fold.history else 0.0
        if (job.until is not None and measured >= job.until) or ending.reached(fold):
            raise KeyboardInterrupt  # saved as after Ctrl-C
        if now - last < REPORT_SECONDS:
            return
        last = now
        steps = fold.costs.steps
        before = steps if before is None else before
        metric = fold.history[-1].metrics.get(fold.setting.metric) if fold.history else None
        try:
            connection.send(
                {"steps": steps, "steps_before": before, "at": fold.now, "rounds": fold.version, "metric": metric}
            )
        except OSError:  # the session has ended
            raise KeyboardInterrupt from None

    division = divisions.get(config)
    if only is not None:
        division = replace(division, assignments=division.assignments[only : only + 1])
    try:
        with locked(folder / "lock", wait=_LOCK_SECONDS):  # two processes would spoil the run
            resume = (folder / CHECKPOINT).exists()
            run = execute(ending.config, folder, division=division, resume=resume, watch=report)
            curves.finish(run)
    except LockHeld:
        raise ConfigError(f"another process is writing to {folder}; wait until it ends, or stop it") from None
    end = run.costs
    connection.send({"steps": end.steps, "at": end.parallel_time, "rounds": run.rounds, "metric": run.final_metric})


class _AtTarget:
    """Ends a run whose curve is kept when it has reached the target, and not by chance."""

    def __init__(self, job: Job) -> None:
        cell = job.cell
        ends = job.curve is not None and cell.config.stop.at_target
        stop = cell.config.to_dict().get("stop", {})
        self.config = varied(cell.config, stop={**stop, "at_target": False}) if ends else cell.config
        self._steady, self._seen = Steady(target_of(cell) if ends else None), 0
        self._reached, self._least_seconds = False, cell.least_seconds

    def reached(self, fold: RunFold) -> bool:
        new, self._seen = fold.history[self._seen :], len(fold.history)
        for point in new:
            self._reached = self._steady.note(point.at, point.metrics) or self._reached
        return self._reached and fold.history[-1].at >= self._least_seconds


class _Curves:
    """Keeps what a cell measures in a small file, while it goes on and at its end.

    A run that starts again, because its state is on another machine, does not shorten what is kept of it.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._began = job, time.perf_counter()
        earlier = None if job.curve is None else read_curve(job.curve)
        same = earlier is not None and earlier.settings == settings_digest(job.cell)
        self._kept_until = earlier.at if earlier is not None and same else 0.0
        self._earlier = 0.0 if earlier is None or not (job.folder / CHECKPOINT).exists() else earlier.wall_seconds

    def write(self, fold: RunFold) -> None:
        if self._job.curve is not None and len(fold.history) > 1 and fold.history[-1].at >= self._kept_until:
            seconds = self._earlier + time.perf_counter() - self._began
            write_curve(self._job.curve, self._job.cell, curve_of(self._job.cell, fold, seconds))

    def finish(self, run: Run) -> None:
        fold = RunFold(run.setting)
        for now, item in run.events:
            fold.record(now, item)
        self.write(fold)


class _Divisions:
    """The latest division of data, which cells of one environment share."""

    def __init__(self) -> None:
        self._key = ""
        self._division: Division | None = None

    def get(self, config: ExperimentConfig) -> Division:
        content = config.to_dict()
        key = json.dumps([content.get(table) for table in ("seed", "data", "partition", "learners")])
        if self._division is None or key != self._key:
            self._division = None  # never two data sets in memory
            self._key, self._division = key, divide(config)
        return self._division


def execute(
    config: ExperimentConfig,
    out: Path,
    *,
    division: Division | None = None,
    resume: bool = False,
    watch: Callable[[RunFold], None] | None = None,
) -> Run:
    """Run the first policy of a configuration in this process and save the run in a folder."""
    policy = config.policy[0]
    return build_federation(config, source=str(out / CONFIG), division=division).simulate(
        build_policy(policy),
        build_stop(config),
        target=config.evaluation.target,
        solver=build_solver(policy.training),
        evaluate_every=config.evaluation.every_seconds,
        store=config.run.store,
        refusals_allowed=config.run.refusals_allowed,
        checkpoint_every=config.run.checkpoint_every,
        out=out,
        resume=resume,
        overwrite=True,
        watch=watch,
        progress=False,
    )
