"""A run: its summary, its directory, its tables; and the ten lines that make one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metis
from metis.core.events import SendTask, UpdateRequest
from metis.core.model import Layout, Model, TensorSpec
from metis.errors import DataError
from metis.runs.folds import Span, timeline
from metis.runs.run import Run
from metis.runs.setting import Setting
from simulation.federations import POLICIES, StillEngine, fingerprint, lively, still

CONTRACT = {
    "policy", "seed", "learners", "rounds", "update_requests", "models_exchanged", "bytes_exchanged", "steps",
    "steps_by_learner", "parallel_time", "cumulative_time", "idle_time", "energy", "metric", "target",
    "wall_seconds", "community_sha256",
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    out = tmp_path_factory.mktemp("run")
    facts = {"class_counts": np.arange(10).reshape(5, 2), "class_names": ["cat", "dog"], "facts": {"dataset": "blobs"}}
    return lively(**facts).simulate(POLICIES["fedrec"](), seconds=3, target=0.2, out=out), out


def test_the_summary_keeps_its_contract(saved: tuple[Run, Path]) -> None:
    """Other programs read these names."""
    run, out = saved
    summary = json.loads((out / "summary.json").read_text())

    assert summary == run.summary()
    assert summary.keys() >= CONTRACT
    assert summary["energy"].keys() == {"equation", "active", "idle_charged"}
    assert summary["metric"].keys() == {"name", "final", "best", "best_version"}
    assert summary["target"].keys() >= {"value", "reached", "parallel_time", "update_requests", "steps"}
    assert summary["policy"] == "fedrec"
    assert summary["steps"] == sum(summary["steps_by_learner"].values())


def test_a_run_comes_back_from_its_directory(saved: tuple[Run, Path]) -> None:
    """The same summary, history, costs, timeline and weights."""
    run, out = saved
    again = Run.load(out)

    assert again.summary() == run.summary()
    assert fingerprint(again) == fingerprint(run)
    assert again.history == run.history
    assert again.costs == run.costs
    assert again.costs_at_target == run.costs_at_target
    assert again.spans() == run.spans()
    assert again.setting == run.setting
    assert (again.folder, repr(again)) == (out, repr(run))


def test_saved_again_it_is_the_same(saved: tuple[Run, Path], tmp_path: Path) -> None:
    """The summary byte for byte."""
    run, out = saved
    (tmp_path / "events.jsonl").write_bytes((out / "events.jsonl").read_bytes())
    Run.load(out).save(tmp_path)

    assert (tmp_path / "summary.json").read_bytes() == (out / "summary.json").read_bytes()
    assert fingerprint(Run.load(tmp_path)) == fingerprint(run)


def test_a_run_directory_holds_what_it_should(saved: tuple[Run, Path]) -> None:
    """No checkpoint and no half-written file is left."""
    held = {"setting.json", "events.jsonl", "summary.json", "community.safetensors", "best.safetensors"}
    assert {path.name for path in saved[1].iterdir()} == held


def test_the_setting_is_there_before_the_first_event(saved: tuple[Run, Path], tmp_path: Path) -> None:
    """So that an observer of a run can fold its events; it is the one that the summary holds."""
    run, out = saved
    run.setting.save(tmp_path)

    assert (out / "setting.json").read_bytes() == (tmp_path / "setting.json").read_bytes()
    assert Setting.from_summary(json.loads((out / "setting.json").read_text("utf-8"))) == run.setting


@pytest.mark.filterwarnings("ignore:dtype is")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_networks_of_other_dtypes_come_back(dtype: str, tmp_path: Path) -> None:
    """The mixture is float32, and so is what is saved of narrower networks."""
    run = lively(dtype=dtype).simulate(metis.sync_fedavg(1), rounds=2, out=tmp_path)

    assert Run.load(tmp_path).summary() == run.summary()


def test_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    """Batch sizes, speeds and powers that come out of arrays."""
    learners = [
        metis.SimulatedLearner(
            f"learner {n}",
            np.arange(n * 30, n * 30 + 30),
            np.int64(10),  # type: ignore[arg-type]
            metis.Speed(np.float32(0.1)),  # type: ignore[arg-type]
            power=metis.Power(np.float32(2), np.int64(1)),  # type: ignore[arg-type]
        )
        for n in range(3)
    ]
    run = lively(learners=learners).simulate(metis.sync_fedavg(1), rounds=2, out=tmp_path)

    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 2
    assert Run.load(tmp_path).summary()["energy"] == pytest.approx(run.summary()["energy"])


class Overflowing(StillEngine):
    """Predicts beyond the numbers, although its weights are finite."""

    def evaluate(self, model: object, examples: object) -> dict[str, float]:
        return {"mae": math.inf}


def test_a_metric_that_is_no_number_leaves_the_summary_json(tmp_path: Path) -> None:
    """JSON knows no infinity; null is what other programs can read."""
    federation = still([2], [0.1], engine=Overflowing(), metric="mae")
    federation.simulate(metis.sync_fedavg(1), rounds=2, out=tmp_path)

    def no_constants(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=no_constants)
    assert summary["metric"] == {"name": "mae", "final": None, "best": None, "best_version": None}
    assert Run.load(tmp_path).summary() == summary


# --- directories that are not of a run --------------------------------------------------------------


@pytest.fixture
def copy(saved: tuple[Run, Path], tmp_path: Path) -> Path:
    for path in saved[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    """As is one that is not there."""
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"has no summary.json: it is not the directory of a finished run"):
            Run.load(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not valid JSON"),
        (b"\x00", "it is not valid JSON"),
        (b"\xff", "it is not a text in UTF-8"),
        (b"{}", "it has no 'setting'"),
        (b'{"setting": {}}', "it has no 'metric'"),
        (b"[]", "a value in it is missing or of the wrong type"),
        (b'{"setting": 5, "policy": "x"}', "a value in it is missing or of the wrong type"),
    ],
)
def test_a_summary_that_is_none_is_refused(copy: Path, content: bytes, why: str) -> None:
    """With its name, and the reason without the words of Python."""
    (copy / "summary.json").write_bytes(content)

    with pytest.raises(DataError) as caught:
        Run.load(copy)
    assert str(caught.value) == f"{copy / 'summary.json'} is not the summary of a run: {why}"


@pytest.mark.parametrize(
    "path", ["label", "setting.metric", "setting.model_bytes", "setting.facts", "learner.name", "learner.examples"]
)
@pytest.mark.parametrize("wrong", [[], 1e300])
def test_a_summary_with_values_of_other_types_is_refused(copy: Path, path: str, wrong: object) -> None:
    """Before anybody computes with them."""
    summary = json.loads((copy / "summary.json").read_text())
    part, _, key = path.rpartition(".")
    {"": summary, "setting": summary["setting"], "learner": summary["setting"]["learners"][0]}[part][key] = wrong
    (copy / "summary.json").write_text(json.dumps(summary))

    with pytest.raises(DataError, match=r"summary.json is not the summary of a run"):
        Run.load(copy)


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.98])
def test_truncated_events_are_noticed(copy: Path, kept: float) -> None:
    """They do not lead to the summary next to them."""
    content = (copy / "events.jsonl").read_bytes()
    (copy / "events.jsonl").write_bytes(content[: int(kept * len(content))])

    with pytest.raises(DataError, match=r"do not belong to one run: summary.json says"):
        Run.load(copy)


def test_events_without_their_beginning_are_noticed(copy: Path) -> None:
    """A learner answers that never joined."""
    lines = (copy / "events.jsonl").read_text().splitlines(keepends=True)
    (copy / "events.jsonl").write_text("".join(lines[20:]))

    with pytest.raises(DataError, match=r"events.jsonl is damaged: its events contradict each other"):
        Run.load(copy)


def test_the_model_of_another_run_is_noticed(copy: Path) -> None:
    """The summary names its weights."""
    other = lively().simulate(metis.sync_fedavg(1), rounds=1, out=copy / "other")
    (copy / "community.safetensors").write_bytes((copy / "other" / "community.safetensors").read_bytes())

    with pytest.raises(DataError, match=f"community_sha256 .*, the other files say {other.community_model.sha256()}"):
        Run.load(copy)


def test_a_missing_model_is_refused(copy: Path) -> None:
    """With its name."""
    (copy / "community.safetensors").unlink()

    with pytest.raises(DataError, match=r"community.safetensors cannot be read"):
        Run.load(copy)


# --- tables and the timeline ------------------------------------------------------------------------


def test_the_history_as_a_table(saved: tuple[Run, Path]) -> None:
    """One row an evaluation, one row a learner."""
    run, _ = saved
    history, learners = run.to_pandas(), run.learners_to_pandas()

    assert len(history) == len(run.history) == len(run.to_records())
    assert list(history["accuracy"]) == run.metric_values
    assert history["update_requests"].is_monotonic_increasing
    assert set(learners["learner"]) == set(run.costs.by_learner)
    assert learners["steps"].sum() == run.costs.steps


def test_the_history_counts_the_costs_up_to_each_publication() -> None:
    """Not those of tasks that begin at the same moment."""
    run = still([4], [0.25]).simulate(metis.fedrec(1), rounds=3)

    assert [(point.at, point.update_requests, point.steps) for point in run.history] == [
        (n * 1.0, n, n * 4) for n in range(4)
    ]
    assert [point.cumulative_time for point in run.history] == pytest.approx([0.0, 1.0, 2.0, 3.0])


def test_the_timeline_of_a_small_play() -> None:
    """One learner joins late, fetches, trains, hands in, waits, leaves in the middle of a task."""
    link = metis.Link(latency=0.5)
    availability = metis.RecordedAvailability(((0.0, 1.0), (8.7, 9.5)))
    learners: list[dict[str, Any]] = [{}, {"link": link, "availability": availability}]
    run = still([4, 4], [1.0, 0.25], learner=learners).simulate(metis.sync_fedavg(1), seconds=10)

    assert [span for span in run.spans() if span.learner == "learner1"] == [
        Span("learner1", "away", 0.0, 1.0),
        Span("learner1", "idle", 1.0, 4.0),  # the round that it came into
        Span("learner1", "transfer", 4.0, 4.5),
        Span("learner1", "training", 4.5, 5.5),
        Span("learner1", "transfer", 5.5, 6.0),
        Span("learner1", "idle", 6.0, 8.0),
        Span("learner1", "training", 8.0, 8.7),  # in vain
        Span("learner1", "away", 8.7, 9.5),
        Span("learner1", "idle", 9.5, 10.0),
    ]


def test_no_events_no_timeline() -> None:
    """And a run without events is not finished."""
    setting = still([1], [0.1]).setting(metis.fedrec(1), None)
    empty = Run(setting, [], Model(Layout((TensorSpec("w", (1,)),)), np.zeros(1, np.float32)), 0.0)

    assert timeline([]) == empty.spans() == []
    assert (empty.finish_reason, empty.final_metric, empty.best_metric) == ("not finished", None, None)
    assert repr(empty) == "<Run FedRec: nothing was mixed (not finished)>"


def test_events_of_a_run_hold_no_weights(saved: tuple[Run, Path]) -> None:
    """A long run stays small in memory."""
    models = [
        item.local_model if isinstance(item, UpdateRequest) else item.community_model
        for _, item in saved[0].events
        if isinstance(item, (UpdateRequest, SendTask))
    ]

    assert models
    assert all(model.nbytes == 0 for model in models)


# --- from a notebook --------------------------------------------------------------------------------

NOTEBOOK = """
import metis, numpy as np, torch

digits = metis.load_dataset("digits")
parts = np.array_split(np.arange(len(digits.y_train)), 4)
learners = [
    metis.SimulatedLearner(f"site {k}", part, 50, metis.Speed(0.03 if k % 2 else 0.3)) for k, part in enumerate(parts)
]
federation = metis.Federation(
    network=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    train=(digits.x_train / 16, digits.y_train),
    test=(digits.x_test / 16, digits.y_test),
    learners=learners,
    solver=metis.MomentumSGD(0.1, 0.75),
)
run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=2), rounds=3, workers=2)
print(run)
print(len(run.to_pandas()), run.final_metric > 0.5)
"""


def test_ten_lines_in_a_notebook(tmp_path: Path) -> None:
    """Top-level code without a main guard, a lambda for the network, worker processes, no files written."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NOTEBOOK],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )

    assert (done.returncode, done.stderr) == (0, "")
    described, table = done.stdout.splitlines()
    assert described.startswith("<Run SemiSync (λ=2): accuracy 0.")
    assert table == "4 True"
    assert list(tmp_path.iterdir()) == []
