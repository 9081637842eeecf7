"""The paper's experiments: their files, their arithmetic, and runs that are kept, refused and continued."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from metis.core.stop import StopRule
from metis.errors import ConfigError, DataError
from metis.experiments.config.load import ExperimentConfig
from metis.experiments.data import dry_assignments
from metis.reproduction import command as commands, environments as cells_module, panels
from metis.reproduction.command import command, scale_named
from metis.reproduction.environments import SCALES, Cell, Environment, Scale, load_environment, load_environments
from metis.reproduction.kept import cell_folder, kept, load_finished
from metis.reproduction.mixing import measure_mixing
from metis.reproduction.results import Request
from metis.reproduction.runner import Board, run_cells
from metis.reproduction.schedule import CellSchedule, dry_run, rounds_of, schedule_cell, split_steps
from metis.reproduction.study import STUDIES
from metis.reproduction.tables import (
    PROTOCOLS,
    RESULTS,
    Evidence,
    arithmetic,
    idle_share,
    protocol_of,
    ratios,
    staleness,
)

PAPER = load_environments("paper")
TABLES = [environment for environment in PAPER.values() if {"table2", "table3"} & set(environment.paper.results)]

TINY = """
seed = 7

[paper]
title = "Digits"
domain = "CIFAR-10"
cluster = "heterogeneous"
distribution = "Skewed & IID"
results = ["table1", "table3", "figure8", "figure12"]
note = "Digits stand in for everything."

[data]
train_examples = 300
test_examples = 100

[partition]
sizes = "skewed"

[[learners]]
name = "gpu"
count = 2
batch_size = 10
time_per_batch = 0.03
epsilon = 2

[[learners]]
name = "cpu"
count = 1
batch_size = 10
time_per_batch = 0.3

[network]
name = "logistic"

[training]
learning_rate = 0.05
momentum = 0.75

[[policy]]
name = "sync_fedavg"
training.solver = "vanilla"
published = { iterations = 240, communication_cost = 6, parallel_time = 20, energy = 10 }

[[policy]]
name = "semisync_fedavg"
timings = "cold_start"
training.solver = "vanilla"
published = { communication_cost = 6, parallel_time = 10, energy = 5 }

[[policy]]
name = "fedrec"
training.solver = "momentum"
published = { reached = false }

[centralized]
epochs = 2

[alone]
epochs = 2

[stop]
seconds = 60

[evaluation]
target = 0.7

[small]
stop.seconds = 30
alone.epochs = 1
paper.note = "Fewer digits."
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small experiment, which replaces the paper's."""
    there = tmp_path / "experiments"
    there.mkdir()
    (there / "digits.toml").write_text(TINY, encoding="utf-8")
    monkeypatch.setattr(cells_module, "environments_folder", lambda: there)
    return there


def tiny(folder: Path, scale: Scale = "small", *overrides: str) -> Environment:
    return load_environment(folder / "digits.toml", scale, overrides)


def nobody(board: Board) -> None:
    """Shows nothing."""


# --- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_every_file_loads_at_every_scale(scale: Scale) -> None:
    """Every environment is there, and every result that needs runs has some."""
    environments = load_environments(scale)

    assert environments.keys() == PAPER.keys()
    assert sum(len(environment.cells) for environment in TABLES) == 2 * 12 + 3 * 9
    named = {name for environment in environments.values() for name in environment.paper.results}
    assert named == RESULTS.keys() - {"figure2", "figure4", "figure5"}


def test_small_scale_keeps_what_makes_the_comparison() -> None:
    """Learners, speeds, policies, solvers and hyperparameters are the paper's at both scales."""
    for name, small in load_environments("small").items():
        paper, own = PAPER[name].config.to_dict(), small.config.to_dict()
        for policy in (*paper["policy"], *own["policy"]):
            policy["training"].pop("groups", None)  # by the numbers of a network's layers
        for table in ("seed", "learners", "policy"):
            assert own[table] == paper[table], name
        if small.config.data.dataset == PAPER[name].config.data.dataset:
            assert small.config.partition == PAPER[name].config.partition


def test_emnist_has_the_sizes_that_the_paper_mentions() -> None:
    """C:1, the second largest, has about 90,000 examples in Skewed and more than 140,000 in Power Law."""
    for name, least, most in (("skewed", 85_000, 95_000), ("power-law", 140_000, 170_000)):
        config = PAPER[f"emnist-heterogeneous-{name}-iid"].config
        sizes = {assignment.name: len(assignment.indices) for assignment in dry_assignments(config)}
        assert least < sizes["cpu-1"] < most
        assert sorted(sizes.values(), reverse=True)[1] == sizes["cpu-1"]


def test_cifar100_has_the_tutorials_input_and_weight_decay() -> None:
    """Images are standardized one by one; BatchNorm's parameters, also those of the last one, do not decay."""
    from metis.experiments.compose import build_solver
    from metis.learning.torch.networks import NETWORKS
    from metis.learning.torch.optimizers import TorchOptimizer

    config = PAPER["cifar100-heterogeneous-skewed-noniid50"].config
    assert not config.data.normalise and config.data.augment[-1].name == "standardize"
    solver = build_solver(config.policy[0].training)
    assert isinstance(solver, TorchOptimizer) and solver.options["weight_decay"] == 2e-4
    names = [name for name, _ in NETWORKS["cifar_resnet"](depth=50).named_parameters()]
    (decaying, _), (kept, options) = solver.divided(names)
    assert options == {"weight_decay": 0.0} and {"25.weight", "25.bias"} < set(kept)
    assert all("norm" not in name for name in decaying) and "29.weight" in decaying


def test_the_environments_of_figures_7_and_8_without_a_row_in_a_table() -> None:
    """Power Law & Non-IID(5) has 8, 7, 6, 5, ... classes; Skewed & IID has all of them."""
    for cluster in ("homogeneous", "heterogeneous"):
        config = PAPER[f"cifar10-{cluster}-power-law-noniid5"].config
        assert config.partition.classes_per_learner == [8, 7, 6, 5, 5, 5, 5, 5, 5, 5]
    assert PAPER["cifar10-heterogeneous-skewed-iid"].config.partition.classes == "iid"


def test_cifar10_uses_all_examples_at_small_scale() -> None:
    """Shrinking the data instead of the network would turn the comparison around."""
    for environment in load_environments("small").values():
        if environment.paper.domain == "CIFAR-10":
            assert environment.config.data.train_examples is None
            assert sum(plan_batches(environment)) in (500, 505)


def plan_batches(environment: Environment) -> list[int]:
    return list(schedule_cell(environment.cells[0], rounds=1).batches.values())


def test_published_numbers_fit_together() -> None:
    """Fast and slow add up; the paper's energy is 2 CT_fast + CT_slow in Table 3 and 2 CT in Table 2."""
    checked = 0
    for environment in TABLES:
        for cell in environment.cells:
            published = cell.published
            assert published is not None
            if not published.reached:
                assert published.iterations is None
                continue
            checked += 1
            assert published.cumulative_time is not None and published.energy is not None
            if "table3" in environment.paper.results:
                assert (
                    published.fast is not None
                    and published.slow is not None
                    and published.iterations == published.fast + published.slow
                )
                assert published.fast_time is not None and published.slow_time is not None
                assert published.cumulative_time == pytest.approx(published.fast_time + published.slow_time, abs=1)
                assert published.energy == pytest.approx(2 * published.fast_time + published.slow_time, abs=3)
            else:
                assert published.energy == pytest.approx(2 * published.cumulative_time, abs=2)
    assert checked == (2 * 12 - 1) + (3 * 9 - 4)


def test_a_fault_in_a_file_is_named(folder: Path) -> None:
    """The tables that only these files have are checked as strictly as the rest."""
    file = folder / "digits.toml"
    file.write_text(TINY.replace("communication_cost = 6, parallel_time = 20", "comunication_cost = 6"), "utf-8")
    with pytest.raises(ConfigError, match=r"policy\.0\.published\.comunication_cost.*'communication_cost'"):
        load_environment(file, "paper")
    file.write_text(TINY.replace("[paper]", "[papers]"), "utf-8")
    with pytest.raises(ConfigError, match=r"digits\.toml: paper: missing"):
        load_environment(file, "paper")
    file.write_text(TINY.replace("epochs = 2", "epochs = 0"), "utf-8")
    with pytest.raises(ConfigError, match=r"centralized\.epochs"):
        load_environment(file, "paper")


def test_overrides_touch_only_what_was_asked_for() -> None:
    """`--set data.smallest_site` suits one domain; the files of other results are not even read with it."""
    found = load_environments("small", ["stop.steps=77"], results=["figure9"])

    assert {environment.paper.domain for environment in found.values()} == {"CIFAR-100"}
    assert {environment.config.stop.steps for environment in found.values()} == {77}


# --- dry runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_dry_run_has_the_published_iterations_to_the_digit(scale: Scale) -> None:
    """All 34 Sync and SemiSync rows of Tables 2 and 3, of fast and slow learners each, without any training."""
    environments = [load_environments(scale)[environment.name] for environment in TABLES]
    rows = arithmetic(environments)

    assert [row["cell"] for row in rows if not row["same"]] == []
    assert len(rows) == (2 * 9 - 1) + (3 * 6 - 1)


def test_dry_run_counts_requests_and_time_as_the_paper_does() -> None:
    """CC = N R; a round of SemiSync lasts lambda epochs of the slowest learner, its cold start one."""
    environment = PAPER["cifar10-heterogeneous-power-law-noniid3"]
    for cell in environment.cells:
        if protocol_of(cell) != PROTOCOLS[2]:
            continue
        plan = schedule_cell(cell)
        published = cell.published
        assert published is not None and plan.rounds is not None and plan.first is not None and plan.each is not None
        slowest_epoch = 114 * 0.3
        assert plan.run.costs.update_requests == published.communication_cost == 10 * plan.rounds
        assert plan.first.seconds == pytest.approx(slowest_epoch)
        assert plan.each.seconds == pytest.approx(2 * slowest_epoch)
        assert plan.run.costs.parallel_time == pytest.approx((2 * plan.rounds - 1) * slowest_epoch)
        assert set(plan.tasks.values()) == {2280, 228}


def test_rounds_can_be_given() -> None:
    """Three rounds of Sync on uniform data are three times 2,000 iterations."""
    plan = schedule_cell(PAPER["cifar10-heterogeneous-uniform-iid"].cells[0], rounds=3)

    assert plan.iterations == 3 * 4 * 500
    assert [made.steps for made in rounds_of(plan.run)] == [2000] * 3
    assert split_steps(plan.run) == (3000, 3000)


def test_dry_run_schedules_what_a_real_run_does(folder: Path, tmp_path: Path) -> None:
    """Same events but for what training brings: models, losses and metrics."""
    from metis.reproduction.worker import execute

    for cell in tiny(folder).cells:
        real, dry = execute(cell.config, tmp_path / cell.name), dry_run(cell.config)
        assert real.costs.by_learner == dry.costs.by_learner
        assert real.rounds == dry.rounds


def test_idle_and_staleness_are_measured_from_events(folder: Path) -> None:
    """Sync idles, SemiSync does not after its cold start, FedRec mixes stale models."""
    sync, semi, fedrec = (dry_run(cell.config, StopRule(rounds=6)) for cell in tiny(folder).cells)

    assert idle_share(sync) > 0.3
    assert idle_share(semi) < 0.01 < idle_share(semi, after_first_round=False)
    assert idle_share(fedrec) == 0
    assert staleness(sync) == staleness(semi) == 0 < staleness(fedrec)


def test_nominal_ratios_are_those_of_the_papers_own_rounds() -> None:
    """Without any run of ours: 24 synchronous rounds of 60 s over 1 of 15 s and 9 of 30 s, and so on."""
    environment = PAPER["cifar10-heterogeneous-uniform-iid"]
    rows = ratios(environment, Evidence("paper", PAPER, {}))

    nominal = [row["parallel_time"]["nominal"] for row in rows]
    assert nominal == pytest.approx([24 * 60 / (15 + 9 * 30), 11 * 60 / (15 + 4 * 30), 24 * 60 / (15 + 8 * 30)])
    assert rows[0]["parallel_time"]["published"] == pytest.approx(3225 / 631)
    assert rows[0]["parallel_time"]["ours"] is None


def test_mixing_is_measured_for_every_size() -> None:
    """Figure 4's rows; how long anything takes is not a test's business."""
    measured = measure_mixing([8], [2, 4])

    assert [(row.network, row.learners) for row in measured] == [("ResNet-8", 2), ("ResNet-8", 4)]
    assert all(row.cached > 0 and row.full_pass > 0 for row in measured)


# --- running ----------------------------------------------------------------------------------


def test_runs_are_kept_refused_and_run_again(folder: Path, tmp_path: Path) -> None:
    """Everything runs once; a second call trains nothing; other settings are refused by name, or overwritten."""
    out = tmp_path / "out"
    environment = tiny(folder)
    cells = environment.needed_for(["figure12"])
    assert [cell.role for cell in cells] == ["policy"] * 3 + ["centralized"] + ["alone"] * 3

    board = run_cells(cells, out, 1, nobody)

    assert {state.status for state in board.states} == {"done"}
    assert all(kept(cell, out) for cell in cells)
    runs = load_finished(cells, out)
    evidence = Evidence("small", {environment.name: environment}, runs)
    centralized = evidence.centralized(environment)
    assert centralized is not None and len(centralized.setting.learners) == 1
    assert centralized.setting.learners[0].examples == 300
    alone = [run.setting.learners[0] for run in evidence.alone(environment)]
    together = evidence.cells(environment)[0][1].setting.learners
    assert [learner.name for learner in alone] == [learner.name for learner in together]
    assert [learner.examples for learner in alone] == [learner.examples for learner in together]

    again = run_cells(cells, out, 1, nobody)
    assert all(state.kept for state in again.states)

    of_earlier = cell_folder(out, cells[0]) / "config.toml"
    known = of_earlier.read_text().splitlines(keepends=True)
    of_earlier.write_text("".join(line for line in known if "round_limit" not in line))
    assert len(of_earlier.read_text().splitlines()) < len(known)
    assert kept(cells[0], out), "a key that came into being later has its default"

    changed = tiny(folder, "small", "network.name=mlp", "stop.seconds=1").cells[:1]
    with pytest.raises(ConfigError, match=r"sync.*other settings.*network.name was logistic, is mlp.*--force"):
        run_cells(changed, out, 1, nobody)
    assert not kept(changed[0], out)
    run_cells(changed, out, 1, nobody, force=True)
    assert load_finished(changed, out)[changed[0].name].setting.facts["network"] == "mlp"


def test_a_mistake_in_one_cell_is_named(folder: Path, tmp_path: Path) -> None:
    """The error is the cell's own, with its name in front."""
    cell = tiny(folder, "small", "data.dataset=cifar10", "data.folder=.", "network.name=logistic").cells[0]
    with pytest.raises(DataError, match=r"digits/sync.*cifar10"):
        run_cells([cell], tmp_path, 1, nobody)


SESSION = """
import sys, time
from pathlib import Path
from metis.reproduction.environments import load_environment
from metis.reproduction.runner import run_cells

cells = load_environment(Path(sys.argv[1]), "paper", sys.argv[3:]).cells[:1]

def tell(board):
    if board.states[0].steps > 0:
        print("going", flush=True)

if __name__ == "__main__":
    board = run_cells(cells, Path(sys.argv[2]), 1, tell)
    print(board.states[0].status, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_session_that_is_stopped_goes_on_to_the_same_bits(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C keeps everything at once; after a kill the cell itself notices, keeps what it has and ends."""
    slow = ["network={name='mlp',hidden=[1024]}", "stop.seconds=600", "run.checkpoint_every=0.2"]
    script = tmp_path / "session.py"
    script.write_text(SESSION, encoding="utf-8")
    out = tmp_path / "out"
    command = [sys.executable, str(script), str(folder / "digits.toml"), str(out), *slow]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    cell = tiny(folder, "paper", *slow).cells[0]
    where = cell_folder(out, cell)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as session:
        assert session.stdout is not None
        assert session.stdout.readline() == "going\n"
        session.send_signal(how)
        rest = session.stdout.read()
    if how == signal.SIGINT:
        assert rest.splitlines()[-1] == "interrupted"
        assert (where / "checkpoint.safetensors").exists()
    assert not kept(cell, out)

    run_cells([cell], out, 1, nobody)
    run_cells([cell], tmp_path / "whole", 1, nobody)

    (pieces,) = load_finished([cell], out).values()
    (whole,) = load_finished([cell], tmp_path / "whole").values()
    assert pieces.community_model.sha256() == whole.community_model.sha256()


# --- the command ------------------------------------------------------------------------------


def quiet() -> Console:
    return Console(quiet=True)


@pytest.mark.usefixtures("blank_figures")
def test_the_command_ends_with_a_report(folder: Path, tmp_path: Path) -> None:
    """Tables with the published numbers, figures as PNG and SVG, a verdict on each claim, one self-contained page."""
    out = tmp_path / "out"
    request = Request(results=("table3",), out=out, workers=1)

    done = command(request, quiet(), quiet())

    assert done.complete
    document = done.document
    # What the same runs are good for is reported as well; each learner alone was not run.
    assert list(document["results"]) == ["table1", "table3", "figure8"]
    (table,) = document["results"]["table3"]["environments"]
    assert [row["label"] for row in table["rows"]] == ["Sync", "SemiSync (λ=2)", "FedRec"]
    assert table["rows"][0]["published"]["iterations"] == 240
    assert table["target"] == 0.7
    page = (out / "small" / "report.html").read_text("utf-8")
    assert "<svg" in page and "Fewer digits." in page and "240" in page
    assert "http" not in page.replace("http-equiv", "")
    for name in ("figure8.png", "figure8.svg"):
        assert (out / "small" / "figures" / name).stat().st_size > 0
    assert {claim["verdict"] for claim in document["claims"]} <= {"confirmed", "contradicted", "tie", "undecided"}
    assert json.loads((out / "small" / "results.json").read_text("utf-8"))["claims"] == document["claims"]

    more = command(Request(results=("figure12",), out=out, workers=1), quiet(), quiet())
    assert list(more.document["results"]) == ["table1", "table3", "figure8", "figure12"]


def test_the_plan_as_a_table_and_as_json(folder: Path) -> None:
    """--dry-run prints batches, tasks and rounds, and nothing is trained."""
    console = Console(width=200, record=True, file=io.StringIO())
    done = command(Request(results=("table3",), dry_run=True, rounds=3), console, quiet())

    text = console.export_text()
    assert "batches per epoch" in text and "SemiSync (λ=2): steps per task" in text
    rows = {row["policy"]: row for row in done.document}
    assert rows["Sync"]["rounds"] == 3 and rows["Sync"]["update_requests"] == 9
    assert rows["FedRec"]["rounds"] is None and rows["FedRec"]["update_requests"] == 9


def test_a_part_of_the_plan(folder: Path) -> None:
    """--policy and --environment choose what is scheduled, at every scale."""
    request = Request(results=("table3",), dry_run=True, rounds=3, policies=("FedRec",))
    assert [row["policy"] for row in command(request, quiet(), quiet()).document] == ["FedRec"]


def test_a_plan_without_the_data_leaves_out_what_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so; with nothing left it is an error."""

    def without_uniform(cell: Cell, rounds: int | None = None) -> CellSchedule:
        if "uniform" in cell.environment.name:
            raise DataError("data set 'ages' is not there")
        return schedule_cell(cell, 2)

    monkeypatch.setattr(commands, "schedule_cell", without_uniform)
    uniform, other = "cifar10-heterogeneous-uniform-iid", "cifar10-heterogeneous-skewed-noniid5"
    stderr = io.StringIO()
    request = Request(("table3",), "paper", dry_run=True, environments=(uniform, other), policies=("FedRec",))
    done = command(request, quiet(), Console(file=stderr, width=200))
    assert stderr.getvalue() == f"{uniform} is left out: data set 'ages' is not there\n"
    assert [row["policy"] for row in done.document] == ["FedRec"]
    with pytest.raises(DataError, match="'ages' is not there"):
        command(replace(request, environments=(uniform,)), quiet(), quiet())


def test_a_report_has_the_claims_that_its_results_decide(tmp_path: Path) -> None:
    """Of a figure that nothing is claimed about there is none."""
    request = Request(("figure2",), "decisive", tmp_path, train=False)
    document = command(request, quiet(), quiet()).document
    assert document["claims"] == []
    assert "claims" not in document["lead"]
    assert 'id="claims"' not in (tmp_path / "decisive" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"results": ("tabel3",)}, "no result 'tabel3'; did you mean 'table3'"),
        ({"results": ("table3",), "rounds": 2}, "--rounds needs --dry-run"),
        (
            {"results": ("table3",), "rounds": 10**8, "dry_run": True},
            "--rounds is 100,000,000; it must be at most 10,000",
        ),
        ({"results": ("figure2",), "overrides": ("foo=1",)}, "--set changes runs, and figure2 has none"),
        ({"results": ("figure2", "figure4"), "overrides": ("foo=1",)}, "and figure2 and figure4 have none"),
        ({"results": ("figure9",), "timings": "published", "dry_run": True}, "tables have no rows of figure9, only of"),
        ({"results": ("table3",), "policies": ("FedRec",)}, "--policy needs --scale decisive"),
        ({"results": ("table3",), "environments": ("emnist",)}, "--environment needs --scale decisive"),
        ({"results": ("table3",), "dry_run": True, "seeds": (1,)}, "--seed says how runs are made; with --dry-run"),
        ({"results": ("table3",), "dry_run": True, "train": False}, "--report-only says how runs are made"),
        ({"results": ("figure4",), "dry_run": True}, "figure4 has no runs whose schedules"),
        ({"results": ("table3",), "dry_run": True, "policies": ("Sync",)}, "--policy Sync: nothing of it"),
        ({"results": ("sweeps",), "dry_run": True, "environments": ("uniform",)}, "did you mean 'uniform-iid'"),
        (
            {"results": ("table3",), "scale": "decisive", "train": False, "curves": Path("nowhere")},
            "--curves nowhere: there is no such folder, and --report-only runs nothing",
        ),
        ({"results": ("table3",), "seeds": (1,)}, "--seed needs --scale decisive"),
        ({"results": ("table3",), "until": 5.0}, "--until needs --scale decisive"),
        ({"results": ("table3",), "train": False}, "--report-only needs --scale decisive"),
        ({"results": ("sweeps",), "until": 5.0}, "a study has no --until; .* use --set stop.seconds"),
        ({"results": ("sweeps",), "scale": "decisive", "until": 5.0}, "a study has no --until"),
        ({"results": ("sweeps",), "train": False}, "a study has no --report-only"),
        ({"results": ("sweeps",), "environments": ("uniform",)}, "--environment uniform: .* mean 'uniform-iid'"),
        ({"results": ("table3",), "scale": "decisive", "until": 0.0}, "--until is 0; it must be"),
        (
            {"results": ("table3",), "scale": "decisive", "seeds": (1,)},
            "--seed 1 is not planned .* planned are 1990, .*: to run another, add it to seeds",
        ),
        (
            {"results": ("table3",), "scale": "decisive", "policies": ("Sync",)},
            "--policy Sync: nothing of it .* did you mean 'Sync w/",
        ),
        (
            {"results": ("table2",), "scale": "decisive", "environments": ("emnist",)},
            "--environment emnist: nothing of it .* choose one of cifar10-homogeneous",
        ),
    ],
)
def test_mistakes_on_the_command_line(request_: dict[str, Any], message: str, tmp_path: Path) -> None:
    """One sentence that says what is allowed."""
    with pytest.raises(ConfigError, match=message):
        command(Request(out=tmp_path, **request_), quiet(), quiet())
    with pytest.raises(ConfigError, match="small, decisive, paper"):
        scale_named("large")


def test_the_list_names_every_result() -> None:
    """What can be asked for, and how many runs it takes."""
    done = command(Request(results=("list",)), quiet(), quiet())

    assert [row["result"] for row in done.document] == [*RESULTS, *STUDIES]
    runs = {row["result"]: row["runs"] for row in done.document}
    assert (runs["table2"], runs["table3"], runs["figure2"], runs["figure6"]) == (24, 27, 0, 0)


def test_figure_2_needs_no_data(tmp_path: Path) -> None:
    """Active and idle time at the paper's scale come from the schedule alone."""
    request = Request(results=("figure2",), out=tmp_path)
    done = command(request, quiet(), quiet())

    assert [Path(path).name for path in done.document["results"]["figure2"]["files"]] == ["figure2.png", "figure2.svg"]


@pytest.mark.slow
def test_one_cell_of_table_3_on_the_real_data(data_folder: Path, tmp_path: Path) -> None:
    """The small-scale file as it is, but for its end: the cold start of SemiSync on CIFAR-10."""
    if not (data_folder / "cifar10.npz").exists():
        pytest.skip("there is no CIFAR-10 in METIS_DATA")
    environment = load_environments("small", ["stop.rounds=1", "data.test_examples=50"])[
        "cifar10-heterogeneous-uniform-iid"
    ]
    cell = next(cell for cell in environment.cells if cell.label == "SemiSync (λ=2) w/ Momentum")
    run_cells([cell], tmp_path, 1, nobody)

    (run,) = load_finished([cell], tmp_path).values()
    assert run.costs.steps == 500
    assert run.costs.parallel_time == pytest.approx(50 * 0.3)


@pytest.mark.usefixtures("blank_figures")
def test_a_report_without_training_does_not_need_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds which ages is drawn from the data: it is left out, and said so; where runs are made it is an error."""

    def missing(config: ExperimentConfig) -> Any:
        raise DataError("data set 'ages' is not there")

    monkeypatch.setattr(panels, "divide", missing)
    stderr = Console(file=io.StringIO(), width=200)
    request = Request(("figure2", "figure6"), "decisive", tmp_path, train=False)
    done = command(request, quiet(), stderr)

    assert list(done.document["results"]) == ["figure2"]
    said = stderr.file.getvalue()  # type: ignore[attr-defined]
    assert said == "figure6 is left out: data set 'ages' is not there\n"
    with pytest.raises(DataError, match="'ages' is not there"):
        command(replace(request, train=True), quiet(), quiet())
