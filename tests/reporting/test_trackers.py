"""Trackers get every number once, never change a run, and never end one."""

from __future__ import annotations

import csv
import importlib.util
import math
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.events import Evaluated
from metis.data import partition
from metis.errors import ConfigError
from metis.experiments.config.schema import TRACKERS as NAMES_IN_FILES
from metis.learning import mlp
from metis.reporting.trackers.tracker import flat, scalars
from metis.reporting.trackers.tracking import TRACKERS, Tracking, make_tracker
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.run import Run
from metis.runs.setting import Setting


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")


class Listener:
    """Remembers what it receives."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Any]] = []

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        self.received.append(("begin", dict(config)))

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        self.received.append((f"record {point.version}", dict(fresh)))

    def end(self, fold: RunFold) -> None:
        self.received.append(("end", fold.finish_reason))


class Failing(Listener):
    """Fails when this method is called."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._fail)

    def _fail(self, *arguments: Any) -> None:
        raise OSError("no space left on device")


def play(run: Run, tracking: Tracking, events: int | None = None) -> RunFold:
    """Let the events of a run happen again before the eyes of the trackers."""
    fold = RunFold(run.setting)
    for now, item in run.events[:events]:
        fold.record(now, item)
        tracking(fold)
    return fold


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# --- the feeding --------------------------------------------------------------------------------


def test_every_point_is_told_once_with_the_configuration_before_and_the_end_after(runs: list[Run]) -> None:
    """In the order of the events, however often the trackers are called."""
    listener = Listener()
    with Tracking([listener], config={"a": {"b": math.inf}}) as tracking:
        play(runs[0], tracking)

    versions = [f"record {point.version}" for point in runs[0].history]
    assert [name for name, _ in listener.received] == ["begin", *versions, "end"]
    assert listener.received[0][1] == {"a": {"b": "inf"}}
    recorded = [values for name, values in listener.received if name.startswith("record")]
    assert recorded == list(map(scalars, runs[0].history))
    assert listener.received[-1][1] == runs[0].finish_reason


def test_a_second_measurement_tells_only_what_is_new(written_run: Callable[..., Run]) -> None:
    """Under the wall clock the controller and the learners measure the same model one after the other."""
    run, listener = written_run(rounds=3, values=[0.1, 0.2, 0.3]), Listener()
    with Tracking([listener]) as tracking:
        fold = play(run, tracking)
        fold.record(fold.now, Evaluated(2, {"federated_accuracy": 0.25}))
        tracking(fold)

    assert listener.received[-2:] == [("record 2", {"metrics/federated_accuracy": 0.25}), ("end", run.finish_reason)]


def test_a_measurement_after_the_last_watch_is_told_too(written_run: Callable[..., Run]) -> None:
    """The final model may be measured when nobody watches any more."""
    run, listener = written_run(rounds=1, values=[0.1]), Listener()
    with Tracking([listener]) as tracking:
        fold = play(run, tracking, events=2)
        for now, item in run.events[2:]:
            fold.record(now, item)

    assert [name for name, _ in listener.received] == ["begin", "record 1", "end"]


@pytest.mark.parametrize("method", ["begin", "record", "end"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(runs: list[Run], method: str) -> None:
    """The others hear everything; the run does not notice."""
    warnings: list[str] = []
    listener = Listener()
    with Tracking([Failing(method), listener], warn=warnings.append) as tracking:
        play(runs[0], tracking)

    assert warnings == ["the tracker Failing failed and is left out: OSError: no space left on device"]
    assert len(listener.received) == len(runs[0].history) + 2


def test_a_tracker_that_does_not_answer_is_not_waited_for(written_run: Callable[..., Run]) -> None:
    """Neither during the run nor, beyond its timeout, at the end."""
    warnings: list[str] = []
    release = threading.Event()

    class Hanging(Listener):
        def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
            release.wait(60)

    with Tracking([Hanging()], warn=warnings.append, timeout=0.05) as tracking:
        play(written_run(rounds=2, values=[0.1, 0.2]), tracking)
    release.set()

    assert warnings == ["the tracker Hanging does not respond; what it has not received by now is missing there"]


def test_without_a_listener_for_warnings_python_warns(written_run: Callable[..., Run]) -> None:
    """A RuntimeWarning, for those who call from Python."""
    with pytest.warns(RuntimeWarning, match="Failing failed"), Tracking([Failing("end")]) as tracking:
        play(written_run(), tracking)


def test_a_run_that_never_began_begins_nothing(tmp_path: Path) -> None:
    """No file, no thread, no warning."""
    with Tracking(["csv"], tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_one_tracking_follows_one_run(written_run: Callable[..., Run]) -> None:
    """Two runs in one file would be a mistake that nobody sees."""
    with Tracking([Listener()]) as tracking:
        play(written_run(), tracking)
        with pytest.raises(ConfigError, match="a Tracking follows one run"):
            play(written_run(), tracking)


# --- names --------------------------------------------------------------------------------------


def test_the_names_in_a_file_are_those_of_the_trackers() -> None:
    """The schema and the trackers are in layers that may not know each other."""
    assert NAMES_IN_FILES == TRACKERS


def test_an_unknown_tracker_or_a_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each, before anything is written."""
    with pytest.raises(ConfigError, match="there is no tracker 'tensorbord'; allowed: csv, tensorboard, mlflow, wandb"):
        make_tracker("tensorbord:x", tmp_path, "run")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the tracker wandb needs the package wandb; .*: pip install '\.\[wandb\]'"):
        make_tracker("wandb", tmp_path, "run")
    assert not list(tmp_path.iterdir())


def test_a_configuration_is_laid_flat() -> None:
    """Tables and lists of tables become paths; a list of values stays one."""
    document = {"seed": 1, "learners": [{"count": 2}, {"count": 3}], "data": {"classes": [1, 2]}}
    assert dict(flat(document)) == {"seed": 1, "learners.0.count": 2, "learners.1.count": 3, "data.classes": [1, 2]}


# --- a run with them ----------------------------------------------------------------------------


def federation() -> metis.Federation:
    digits = metis.load_dataset("digits")
    x, y = digits.x_train[:200].astype(np.float32) / 16, digits.y_train[:200]
    parts = partition.iid(y, partition.uniform_sizes(len(y), 3), np.random.default_rng(1))
    return metis.Federation(
        network=lambda: mlp((8, 8), 10, hidden=(8,)),
        train=(x, y),
        test=(x[:40], y[:40]),
        learners=[
            metis.SimulatedLearner(f"site-{k}", part, 20, metis.Speed(0.1 * (k + 1))) for k, part in enumerate(parts)
        ],
        solver=metis.VanillaSGD(0.05),
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_the_same_with_and_without_trackers(tmp_path: Path, workers: int) -> None:
    """The same events and the same model, bit for bit; also when one of them fails."""
    there = [name for name in ("csv", "tensorboard") if name == "csv" or importlib.util.find_spec(name)]
    plain = federation().simulate(metis.semisync_fedavg(2), rounds=4, out=tmp_path / "plain", workers=workers)
    with Tracking([*there, Failing("record")], tmp_path / "tracked", warn=lambda text: None) as tracking:
        tracked = federation().simulate(
            metis.semisync_fedavg(2), rounds=4, out=tmp_path / "tracked", workers=workers, watch=tracking
        )

    assert tracked.community_model.sha256() == plain.community_model.sha256()
    events = [(tmp_path / name / "events.jsonl").read_bytes() for name in ("plain", "tracked")]
    assert events[0] == events[1]
    assert [float(row["metrics/accuracy"]) for row in rows(tmp_path / "tracked" / "metrics.csv")] == plain.metric_values


# --- CSV ----------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_measured_model(runs: list[Run], tmp_path: Path) -> None:
    """All numbers come back exactly; a path gets a folder for the group and the run."""
    with Tracking([f"csv:{tmp_path}"], "elsewhere", name="sync", group="demo") as tracking:
        play(runs[0], tracking)

    read = rows(tmp_path / "demo" / "sync" / "metrics.csv")
    assert [{name: float(value) for name, value in row.items()} for row in read] == [
        {"version": point.version, **scalars(point)} for point in runs[0].history
    ]
    assert not Path("elsewhere").exists()


def test_csv_is_mended_when_a_model_is_measured_again(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """A new metric gets a column of its own, a later one its column in an earlier line; no line comes twice."""
    run = written_run(rounds=4, values=[0.1, 0.2, math.nan, 0.4])
    with Tracking(["csv"], tmp_path) as tracking:
        fold = play(run, tracking)
        for version, value in ((3, 0.33), (2, 0.22), (4, 0.44)):
            fold.record(fold.now, Evaluated(version, {"federated_accuracy": value}))
            tracking(fold)

    read = [(row["version"], row["metrics/accuracy"], row["metrics/federated_accuracy"])
            for row in rows(tmp_path / "metrics.csv")]  # fmt: skip
    assert read == [("1", "0.1", ""), ("2", "0.2", "0.22"), ("3", "", "0.33"), ("4", "0.4", "0.44")]


def test_csv_of_a_run_that_goes_on_has_every_line_once(runs: list[Run], tmp_path: Path) -> None:
    """A resumed run logs its past again."""
    for events in (40, None):
        with Tracking(["csv"], tmp_path) as tracking:
            play(runs[0], tracking, events)
    assert [int(row["version"]) for row in rows(tmp_path / "metrics.csv")] == [p.version for p in runs[0].history]


# --- TensorBoard --------------------------------------------------------------------------------


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_its_event_files(runs: list[Run], tmp_path: Path) -> None:
    """Every number at its version, the run's clock as its time, the configuration as text; nothing twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for events in (40, None):  # cut off, then resumed
        with Tracking(["tensorboard"], tmp_path, config={"stop": {"rounds": 4}}) as tracking:
            play(runs[0], tracking, events)

    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    history = runs[0].history
    for name in scalars(history[0]):
        logged = read.Scalars(name)
        assert [event.step for event in logged] == [point.version for point in history]
        assert [event.value for event in logged] == pytest.approx([scalars(point)[name] for point in history])
    logged = read.Scalars("metrics/accuracy")
    assert [event.wall_time - logged[0].wall_time for event in logged] == pytest.approx(
        [point.at for point in history], abs=1e-3
    )
    reached = runs[0].costs_at_target
    assert reached is not None
    assert read.Scalars("target/update_requests")[0].value == reached.update_requests
    text = read.Tensors("configuration/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "stop.rounds = 4" in text and "dataset = digits" in text


# --- MLflow -------------------------------------------------------------------------------------


@needs("mlflow")
@needs("alembic")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_the_run_in_a_file(runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, metrics by version and the end; a resumed run goes on in the same run of MLflow."""
    monkeypatch.chdir(tmp_path)
    warnings: list[str] = []
    for events in (40, None):
        with Tracking(
            [f"mlflow:{tmp_path / 'new' / 'm.db'}"],
            tmp_path / "run",
            name="sync",
            config={"stop": {"rounds": 4}},
            warn=warnings.append,
        ) as tracking:
            play(runs[0], tracking, events)
    assert warnings == []

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'new' / 'm.db'}")
    experiment = client.get_experiment_by_name("metis")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("sync", "FINISHED")
    assert found.data.params["stop.rounds"] == "4" and found.data.params["policy"] == runs[0].policy
    assert found.data.tags["metis.ended"] == runs[0].finish_reason
    history = runs[0].history
    for name in scalars(history[0]):
        logged = sorted(client.get_metric_history(found.info.run_id, name), key=lambda metric: metric.step)
        assert [metric.step for metric in logged] == [point.version for point in history]
        assert [metric.value for metric in logged] == [scalars(point)[name] for point in history]
    reached = runs[0].costs_at_target
    assert reached is not None and found.data.metrics["target/parallel_time"] == reached.parallel_time


@needs("mlflow")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_not_there_costs_one_warning(
    written_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on and ends; no password of the address is written down."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    warnings: list[str] = []
    with Tracking(["mlflow:http://me:secret@127.0.0.1:9"], tmp_path, warn=warnings.append) as tracking:
        play(written_run(rounds=2, values=[0.1, 0.2]), tracking)
    assert len(warnings) == 1 and warnings[0].startswith("the tracker mlflow failed and is left out: MlflowException")
    assert not list(tmp_path.rglob("*"))


# --- Weights & Biases ---------------------------------------------------------------------------


def records(path: Path) -> Iterator[bytes]:
    """What is in a file of W&B: after seven bytes of heading, LevelDB's log of blocks of 32 KiB."""
    data, offset, block = path.read_bytes(), 7, 32_768
    parts = b""
    while offset + 7 <= len(data):
        if block - offset % block < 7:
            offset += block - offset % block
            continue
        size, kind = struct.unpack_from("<HB", data, offset + 4)
        if offset + 7 + size > len(data):
            return  # not written to its end yet
        parts += data[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@needs("wandb")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_files_where_there_is_no_key(
    runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline and without asking: every number by version, the configuration, the end; nothing of this machine."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    warnings: list[str] = []
    with Tracking(
        ["wandb:consortium"], tmp_path / "run", name="sync", group="demo", config={"a": 1}, warn=warnings.append
    ) as tracking:
        play(runs[0], tracking)
    assert warnings == []

    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    until = time.monotonic() + 60
    while True:  # the process of W&B that writes the file ends a little after the run
        read = [Record.FromString(data) for data in records(path)]
        if any(record.WhichOneof("record_type") == "exit" for record in read) or time.monotonic() > until:
            break
        time.sleep(0.1)
    started = next(record.run for record in read if record.WhichOneof("record_type") == "run")
    assert (started.project, started.display_name, started.run_group) == ("consortium", "sync", "demo")
    config = {item.key: item.value_json for item in started.config.update}
    assert config["a"] == "1" and "digits" in config["facts"]
    assert started.host == "metis" and not started.git.remote_url
    logged = []
    for record in read:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
            logged.append({name: value for name, value in items.items() if not name.startswith("_")})
    assert logged == [{"version": point.version, **scalars(point)} for point in runs[0].history]
