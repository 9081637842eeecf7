"""The queue of scale decisive: its order, its curves, and a run that is cut into parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from metis.core.stop import Target
from metis.errors import ConfigError, DataError
from metis.reproduction.command import command
from metis.reproduction.curves import curve_file, load_runs, read_curve, run_of, settings_digest
from metis.reproduction.environments import TIMINGS, Environment, load_environment, load_environments
from metis.reproduction.queue import hours_left, queue
from metis.reproduction.results import Request, chosen_cells, reproduce
from metis.reproduction.runner import Board, run_queue
from metis.reproduction.tables import RESULTS
from metis.reproduction.worker import Job, _Curves
from metis.runs.run import Run

TINY = """
seed = 1
[paper]
title = "digits"
domain = "CIFAR-10"
cluster = "heterogeneous"
distribution = "Uniform & IID"
results = ["table3"]
note = ""
[data]
dataset = "digits"
[[learners]]
name = "gpu"
count = 2
batch_size = 50
time_per_batch = 0.1
[[learners]]
name = "cpu"
count = 1
batch_size = 50
time_per_batch = 0.4
[network]
name = "logistic"
[training]
solver = "momentum"
learning_rate = 0.05
[[policy]]
name = "sync_fedavg"
local_epochs = 1
[[policy]]
name = "semisync_fedavg"
timings = "cold_start"
[[policy]]
name = "fedrec"
local_epochs = 1
[stop]
seconds = 60
[evaluation]
target = 0.999
[decisive]
seeds = [3, 4]
stages = [20]
stop.seconds = 40
"""


def watch_nothing(board: Board) -> None:
    """Shows nothing."""


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    file = tmp_path / "digits.toml"
    file.write_text(TINY, encoding="utf-8")
    return load_environment(file, "decisive")


def test_what_decides_most_comes_first() -> None:
    """Sync before the others of its environment, the first seed before the second, short runs before long ones."""
    entries = queue(load_environments("decisive").values(), list(RESULTS))
    names = [(entry.cell.environment.name, entry.cell.label, entry.until) for entry in entries]
    uniform = "cifar10-heterogeneous-uniform-iid"
    assert names[0][0].startswith("brainage")  # minutes
    assert next(name for name in names if name[0].startswith("cifar")) == (uniform, "Sync w/ Momentum", 661.0)
    hours = hours_left(entries[:3], Path("nowhere"))
    assert 0 < hours < 24


def test_further_seeds_of_vanilla_sgd_are_run_after_those_of_the_main_comparison() -> None:
    """They decide little, but what they decide has to be possible to run."""
    environments = load_environments("decisive")
    entries = queue([environments["cifar10-heterogeneous-power-law-noniid3"]], ["table3"])
    places = [(entry.cell.config.seed, entry.cell.label) for entry in entries]
    assert places.index((1991, "SemiSync (λ=2) w/ Momentum")) < places.index((1991, "SemiSync (λ=2) w/ Vanilla"))
    assert places.index((1990, "SemiSync (λ=2) w/ Vanilla")) < places.index((1991, "SemiSync (λ=2) w/ Momentum"))


def test_no_policy_is_run_before_there_is_a_target(tmp_path: Path) -> None:
    """Only Sync, from which the target is taken."""
    file = tmp_path / "digits.toml"
    file.write_text(TINY.replace("stages", "target_fixed = false\nstages"), encoding="utf-8")
    entries = queue([load_environment(file, "decisive")], ["table3"])
    assert {entry.cell.policy.name for entry in entries} == {"sync_fedavg"}
    assert not entries[0].cell.config.stop.at_target, "it would end at a target that means nothing yet"


def test_a_run_in_parts_is_the_same_run_and_its_curve_is_all_of_it(environment: Environment, tmp_path: Path) -> None:
    """Until 20 s, then to the end; the curve and the schedule give every cost and metric of the run back."""
    out, results = tmp_path / "runs", tmp_path / "results"
    entries = queue([environment], ["table3"])
    assert {entry.cell.config.seed for entry in entries} == {3, 4}
    first = [entry for entry in entries if entry.cell.config.seed == 3]
    run_queue(first, out, results, 1, watch_nothing)
    assert all(entry.done(results) for entry in first)
    for cell in environment.cells:
        real = Run.load(out / "decisive" / cell.name)
        curve = read_curve(curve_file(results, cell))
        assert curve is not None and curve.ended and curve.settings == settings_digest(cell)
        again = run_of(cell, curve)
        assert [(p.version, p.at, p.steps) for p in again.history] == [(p.version, p.at, p.steps) for p in real.history]
        assert again.metric_values == pytest.approx(real.metric_values, abs=1e-6)
        assert [p.energy for p in again.history] == [p.energy for p in real.history]
    assert set(load_runs(environment.cells, results)) == {cell.name for cell in environment.cells}


def test_a_run_that_ended_at_a_lower_target_is_run_again(tmp_path: Path) -> None:
    """A curve counts as far as it goes: to the target that it reached, not to one that was raised since."""
    file, results = tmp_path / "digits.toml", tmp_path / "results"
    low = TINY + "stop.at_target = true\nevaluation.target = 0.5\n"
    file.write_text(low, encoding="utf-8")
    entries = queue([load_environment(file, "decisive")], ["table3"])[:1]
    run_queue(entries, tmp_path / "runs", results, 1, watch_nothing)
    assert entries[0].done(results)
    for target, stays in ((0.4, True), (0.999, False)):
        file.write_text(low.replace("0.5", f"{target}"), encoding="utf-8")
        (entry, *_) = queue([load_environment(file, "decisive")], ["table3"])
        assert entry.done(results) is stays


def test_a_run_ends_at_its_target_but_not_at_a_lucky_model(tmp_path: Path) -> None:
    """It goes no further than the first model that counts; a kept curve whose only model there was lucky is run on."""
    file, results = tmp_path / "digits.toml", tmp_path / "results"
    file.write_text(TINY + "stop.at_target = true\nevaluation.target = 0.8\n", encoding="utf-8")
    environment = load_environment(file, "decisive")
    cell = next(cell for cell in environment.cells if cell.policy.name == "fedrec")
    entries = [entry for entry in queue([environment], ["table3"]) if entry.cell.name == cell.name]
    run_queue(entries, tmp_path / "runs", results, 1, watch_nothing)
    curve = read_curve(curve_file(results, cell))
    assert curve is not None and curve.covers(cell)
    run = run_of(cell, curve)
    assert run.costs_at_target is not None and run.costs_at_target.parallel_time == run.history[-1].at < 40
    lucky = replace(curve, measured=(*((n, (1.0, 0.1)) for n, _ in curve.measured[:-1]), curve.measured[-1]))
    assert lucky.reached(Target("accuracy", 0.8)) and not lucky.covers(cell)
    assert run_of(cell, lucky).costs_at_target is None


def test_the_first_seed_goes_on_as_far_as_final_accuracies_are_compared(tmp_path: Path) -> None:
    """Whatever it reaches before; other seeds end at the target."""
    file, results = tmp_path / "digits.toml", tmp_path / "results"
    target = "stop.at_target = true\nevaluation.target = 0.3\n"
    for plan, least in ((TINY, 0.0), (TINY.replace("stages", "final_seconds = 30\nstages"), 30.0)):
        file.write_text(plan + target, encoding="utf-8")
        entries = queue([load_environment(file, "decisive")], ["table3"])
        assert all(entry.done(results) for entry in entries if entry.cell.config.seed == 4) == (least > 0)
        run_queue(entries, tmp_path / "runs", results, 1, watch_nothing)
        for entry in entries:
            curve = read_curve(curve_file(results, entry.cell))
            assert curve is not None and curve.covers(entry.cell) and entry.done(results)
            run = run_of(entry.cell, curve)
            assert run.costs_at_target is not None and run.costs_at_target.parallel_time < 30
            assert (curve.at >= 30) is (entry.cell.config.seed == 3 and least > 0)


def test_a_curve_that_contradicts_the_schedule_is_refused(environment: Environment, tmp_path: Path) -> None:
    """And one with other settings does not count; a damaged file is named."""
    cell = environment.cells[0]
    entries = [entry for entry in queue([environment], ["table3"]) if entry.cell.name == cell.name]
    run_queue(entries, tmp_path / "runs", tmp_path / "results", 1, watch_nothing)
    file = curve_file(tmp_path / "results", cell)
    content = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**content, "steps": 7}), encoding="utf-8")
    with pytest.raises(DataError, match=r"its schedule has .* its curve 7"):
        load_runs([cell], tmp_path / "results")
    file.write_text(json.dumps({**content, "settings": "other"}), encoding="utf-8")
    assert load_runs([cell], tmp_path / "results") == {} and not entries[0].done(tmp_path / "results")
    file.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        read_curve(file)
    for row, problem in (
        ("[1]", "which must be 2 finite numbers"),
        ("[1, 0.5, NaN]", "which must be 2 finite numbers"),
    ):
        file.write_text(f'{{"settings": "", "metrics": ["loss", "accuracy"], "measured": [{row}]}}', encoding="utf-8")
        with pytest.raises(DataError, match=f"{file.name} is not the curve of a run: version 1 has .*{problem}"):
            read_curve(file)
    file.write_text('{"metrics": []}', encoding="utf-8")
    with pytest.raises(DataError, match="is not the curve of a run: it has no 'settings'; delete it"):
        read_curve(file)


def test_single_seeds_are_run_until_some_second(environment: Environment, tmp_path: Path) -> None:
    """--seed and --until: enough to show that a policy has not reached its target by then."""
    results, quiet = tmp_path / "results", Console(quiet=True)
    request = Request(
        ("table3",),
        "decisive",
        tmp_path / "runs",
        workers=1,
        curves=results,
        policies=("FedRec",),
        seeds=(4,),
        until=5.0,
    )
    reproduce(request, ["table3"], {environment.name: environment}, quiet, quiet)

    curves = list(results.rglob("*.json"))
    assert [curve.relative_to(results).parts[-2:] for curve in curves] == [("seed-4", "fedrec.json")]
    kept = read_curve(curves[0])
    assert kept is not None and 5 <= kept.at < 20 and not kept.ended
    assert request.command_line.endswith(f"--policy FedRec --seed 4 --until 5 --curves {results} --workers 1")


def test_a_policy_of_long_rounds_gets_as_far_as_it_is_asked(environment: Environment, tmp_path: Path) -> None:
    """--until may fall into a round: the run goes on until the model at its end is evaluated."""
    results, quiet = tmp_path / "results", Console(quiet=True)
    request = Request(
        ("table3",), "decisive", tmp_path / "runs", workers=1, curves=results, policies=("Sync",),
        seeds=(4,), until=5.0,
    )  # fmt: skip
    assert reproduce(request, ["table3"], {environment.name: environment}, quiet, quiet).complete
    (file,) = results.rglob("*.json")
    kept = read_curve(file)
    assert kept is not None and kept.at >= 5 and not kept.ended


def test_what_chooses_runs_is_refused_where_nothing_is_run(tmp_path: Path) -> None:
    """--report-only reports all that is kept; with nothing kept it says so and is no success."""
    quiet, nothing = Console(quiet=True), tmp_path / "curves"
    nothing.mkdir()
    plain = Request(("figure11",), "decisive", tmp_path / "runs", curves=nothing, train=False)
    for changed, words in (
        (replace(plain, policies=("FedRec",)), "--policy chooses what is run"),
        (replace(plain, environments=("x",)), "--environment chooses"),
        (replace(plain, seeds=(1990,)), "--seed chooses"),
        (replace(plain, overrides=("stop.seconds=3",)), "--set stop... chooses"),
        (replace(plain, scale="small"), "--report-only needs --scale decisive|--curves says"),
        (plain, "has no run of figure11"),
    ):
        with pytest.raises(ConfigError, match=words):
            command(changed, quiet, quiet)
    with pytest.raises(ConfigError, match="a study has no --timings"):
        command(Request(("sweeps",), dry_run=True, timings="published"), quiet, quiet)
    with pytest.raises(ConfigError, match="stands alone"):
        command(Request(("list", "table3")), quiet, quiet)


def test_an_environment_is_named_by_its_file_and_a_policy_in_any_case() -> None:
    """With its folder and ending, too, and without what --timings adds to the name."""
    for timings in TIMINGS:
        cells = [
            cell
            for one in load_environments("decisive", results=["table3"], timings=timings).values()
            for cell in one.cells
        ]
        for name in ("cifar10-heterogeneous-uniform-iid", "experiments/cifar10-heterogeneous-uniform-iid.toml"):
            request = Request(("table3",), "decisive", policies=("fedrec",), environments=(name,), timings=timings)
            (found,) = chosen_cells(request, cells)
            assert found.label == "FedRec" and "uniform-iid" in found.environment.name


def test_a_run_that_starts_again_does_not_shorten_its_curve(environment: Environment, tmp_path: Path) -> None:
    """Its state may be on another machine; the curve, which has the same bits, says how far it has come."""
    quiet, cell = Console(quiet=True), environment.cells[2]
    for name, until in (("long", 20.0), ("short", 5.0)):
        request = Request(
            ("table3",), "decisive", tmp_path / name, workers=1, curves=tmp_path / f"{name}-curves",
            policies=("FedRec",), seeds=(3,), until=until,
        )  # fmt: skip
        reproduce(request, ["table3"], {environment.name: environment}, quiet, quiet)
    kept, short = (curve_file(tmp_path / f"{name}-curves", cell) for name in ("long", "short"))
    before, run = kept.read_bytes(), Run.load(tmp_path / "short" / "decisive" / cell.name)

    _Curves(Job(cell, tmp_path / "again", curve=kept)).finish(run)
    assert kept.read_bytes() == before
    short.unlink()
    _Curves(Job(cell, tmp_path / "again", curve=short)).finish(run)
    assert short.exists()
