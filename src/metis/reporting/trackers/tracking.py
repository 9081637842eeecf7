"""Feeds trackers from the same fold of events as everything else, each in a thread of its own.

A run never waits for a tracker, one that fails is left out after a single warning, and none can change the run.
"""

from __future__ import annotations

import importlib.util
import math
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from metis.errors import ConfigError, needs_package
from metis.reporting.trackers.csv_file import CsvTracker
from metis.reporting.trackers.mlflow import MlflowTracker
from metis.reporting.trackers.tensorboard import TensorBoardTracker
from metis.reporting.trackers.tracker import RECENT, Tracker, scalars
from metis.reporting.trackers.wandb import WandbTracker
from metis.runs.folds import HistoryPoint, RunFold

_PACKAGES = {"csv": None, "tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
TRACKERS = tuple(_PACKAGES)


def make_tracker(text: str, folder: Path, name: str, group: str | None = None) -> Tracker:
    """The tracker named by `NAME` or `NAME:WHERE`; its package must be installed, nothing is started yet.

    For csv and tensorboard WHERE is a folder, in which each run gets a folder with its group and name; for mlflow it
    is a tracking URI or an SQLite file, for wandb a project.
    """
    kind, _, where = text.partition(":")
    if kind not in _PACKAGES:
        raise ConfigError(f"there is no tracker '{kind}'; allowed: {', '.join(TRACKERS)}, each also as NAME:WHERE")
    package = _PACKAGES[kind]
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(needs_package(f"the tracker {kind}", package, kind))
    below = Path(where, group or "", name) if where else None
    if kind == "csv":
        return CsvTracker(below or folder)
    if kind == "tensorboard":
        return TensorBoardTracker(below or folder / "tensorboard")
    if kind == "mlflow":
        return MlflowTracker(where or None, folder, name, group)
    return WandbTracker(where or None, folder, name, group)


class _Sink:
    """One tracker and the thread that feeds it; after a failure it ignores everything."""

    def __init__(self, name: str, tracker: Tracker, problems: deque[str]) -> None:
        self.name = name
        self._problems = problems
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, args=(tracker,), name=f"metis-tracker-{name}", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        self._calls.put((method, arguments))

    def _feed(self, tracker: Tracker) -> None:
        failed = False
        while (call := self._calls.get()) is not None:
            method, arguments = call
            if failed:
                continue
            try:
                getattr(tracker, method)(*arguments)
            except (Exception, SystemExit) as problem:  # nothing that a library raises may end a run
                failed = True
                words = " ".join(str(problem).split())
                reason = f"{type(problem).__name__}: {words}" if words else type(problem).__name__
                self._problems.append(f"the tracker {self.name} failed and is left out: {reason[:300]}")

    def finish(self) -> None:
        self._calls.put(None)

    def wait(self, seconds: float) -> bool:
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()


class Tracking:
    """Feeds trackers during a run: pass it as `watch`, inside a `with`.

        with metis.Tracking(["csv", "tensorboard:runs/tb"], "runs/mine") as tracking:
            run = federation.simulate(policy, rounds=10, watch=tracking)

    - `trackers`: each is `NAME` or `NAME:WHERE` (csv, tensorboard, mlflow, wandb), or an object with the methods of
      `Tracker`.
    - `folder`: where trackers without a WHERE write to.
    - `name`: of the run; without it that of the folder.
    - `group`: what trackers that know groups put the run under.
    - `config`: settings to log with the run.
    - `warn`: called with a sentence when a tracker fails; the run goes on.
    - `timeout`: seconds that a tracker may take at the end.
    """

    def __init__(
        self,
        trackers: Sequence[str | Tracker],
        folder: str | Path = ".",
        *,
        name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] | None = None,
        timeout: float = 120.0,
    ) -> None:
        folder = Path(folder)
        name = name or folder.resolve().name
        self._trackers: list[tuple[str, Tracker]] = [
            (text.partition(":")[0], make_tracker(text, folder, name, group))
            if isinstance(text, str)
            else (type(text).__name__, text)
            for text in trackers
        ]
        self._config, self._timeout = _finite(dict(config or {})), timeout
        self._warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2))
        self._problems: deque[str] = deque()
        self._sinks: list[_Sink] = []
        self._fold: RunFold | None = None
        self._evaluations = -1
        self._points: list[HistoryPoint] = []  # as they were sent

    def __enter__(self) -> Tracking:
        return self

    def __call__(self, fold: RunFold) -> None:
        """Send the trackers what is new; takes no time, and fails only if it is given two runs."""
        if self._fold is None:
            # Not before: threads must not exist yet when worker processes are forked.
            self._fold = fold
            self._sinks = [_Sink(name, tracker, self._problems) for name, tracker in self._trackers]
            self._send("begin", fold.setting, self._config)
        elif self._fold is not fold:
            raise ConfigError("a Tracking follows one run; create another one for the next run")
        if fold.evaluations != self._evaluations:
            self._evaluations = fold.evaluations
            self._send_points(fold.history)
        self._report_problems()

    def _send_points(self, history: Sequence[HistoryPoint]) -> None:
        sent = self._points
        for index in range(max(0, len(sent) - RECENT), len(history)):
            point = history[index]
            if index == len(sent):
                sent.append(point)
                self._send("record", point, scalars(point))
            elif sent[index] is not point:  # evaluated elsewhere too
                before, now = scalars(sent[index]), scalars(point)
                sent[index] = point
                self._send("record", point, {name: value for name, value in now.items() if before.get(name) != value})

    def _send(self, method: str, *arguments: Any) -> None:
        for sink in self._sinks:
            sink.call(method, *arguments)

    def _report_problems(self) -> None:
        while self._problems:
            self._warn(self._problems.popleft())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the trackers finish; one that exceeds the timeout is abandoned."""
        fold = self._fold
        if fold is None:
            return
        self(fold)  # the last evaluation comes after the last call
        self._send("end", fold)
        for sink in self._sinks:
            sink.finish()
        until = time.monotonic() + self._timeout
        try:
            for sink in self._sinks:
                if not sink.wait(until - time.monotonic()):
                    self._problems.append(
                        f"the tracker {sink.name} does not respond; what it has not received by now is missing there"
                    )
        except KeyboardInterrupt:
            self._problems.append("interrupted; what the trackers have not received by now is missing there")
        self._report_problems()


def _finite(value: Any) -> Any:
    """Infinities as text: not every JSON parser accepts them."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
