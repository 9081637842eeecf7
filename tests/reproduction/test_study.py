"""Studies of our own: their files, their tables over several seeds, their verdicts."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from metis.core.protocols import SemiSynchronous
from metis.core.stop import StopRule
from metis.errors import ConfigError
from metis.experiments.compose import build_policy
from metis.reproduction import command as command_module, study_figures
from metis.reproduction.command import command, scale_named
from metis.reproduction.environments import Scale, load_environments
from metis.reproduction.kept import cell_folder, kept, load_finished
from metis.reproduction.results import Request
from metis.reproduction.runner import run_cells
from metis.reproduction.schedule import dry_run, slow_update_requests
from metis.reproduction.sheets import study_sheet
from metis.reproduction.study import COSTS, STUDIES, Condition, condition_table, joined, load_study, spread, verdicts

TINY = (
    "data.dataset=digits", "data.train_examples=200", "data.test_examples=50", "network.hidden=[8]",
    "stop.seconds=40", "evaluation.target=0.2",
)  # fmt: skip


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_the_study_of_adaptive_periods_asks_what_it_says(scale: str) -> None:
    """Three environments of the paper, two with changing conditions, thin lines; lambdas, adaptive, FedNova."""
    conditions = load_study("adaptive", scale_named(scale))

    assert {condition.name for condition in conditions} == {
        "uniform-iid", "skewed-noniid5", "power-law-noniid3", "slowdown", "presence", "thin-lines",
    }  # fmt: skip
    for condition in conditions:
        assert len(condition.study.seeds) >= 3
        assert len({cell.name for cell in condition.cells}) == len(condition.cells)
        assert [environment.config.seed for environment in condition.environments] == condition.study.seeds
        first = condition.environments[0]
        made = [build_policy(cell.policy) for cell in first.cells]
        fixed = [policy.protocol.slowest_learner_epochs for policy in made
                 if not policy.layers and isinstance(policy.protocol, SemiSynchronous)]  # fmt: skip
        assert fixed == [0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4]
        assert condition.study.sweep == [0.5, 1, 2, 3, 4]
        assert {"adaptive", "nova"} <= {layer.key for policy in made for layer in policy.layers}
        changing = any(group.drift or group.availability.kind != "always" for group in first.config.learners)
        assert changing == (condition.name in ("slowdown", "presence"))


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_the_study_of_caps_asks_what_it_says(scale: str) -> None:
    """Three distributions of data; the same lambda under caps from one epoch to none."""
    conditions = load_study("caps", scale_named(scale))

    assert {condition.name for condition in conditions} == {"uniform-iid", "skewed-noniid5", "power-law-noniid3"}
    for condition in conditions:
        assert len(condition.study.seeds) >= 3
        tables = [cell.policy for cell in condition.environments[0].cells]
        assert [table.parameters["max_local_epochs"] for table in tables] == [1, 2, 5, 10, 20, None]
        assert {table.parameters["slowest_learner_epochs"] for table in tables} == {2}


def test_the_study_of_divisions_differs_from_the_main_comparison_in_who_holds_which_classes() -> None:
    """The same learners, sizes and policies as in Table 3; only the classes are others."""
    (condition,) = load_study("division", "small")
    ours = condition.environments[0].config
    papers = load_environments("decisive")["cifar10-heterogeneous-skewed-noniid5"].config

    assert ours.partition.classes == "random_classes"
    assert ours.partition.model_copy(update={"classes": "non_iid"}) == papers.partition
    for table in ("data", "learners", "network", "evaluation", "seed"):
        assert getattr(ours, table) == getattr(papers, table), table
    momentum = {cell.label for cell in condition.environments[0].cells}
    assert momentum == {"Sync", "SemiSync (λ=2)", "FedRec", "AsyncFedAvg", "FedAsync"}


def test_update_requests_of_slow_learners_are_told_apart() -> None:
    """With 16 epochs a slow learner first hands in after 240 s, a fast one every 24 s; with 4 after 60 s."""
    conditions = {condition.name: condition for condition in load_study("sweeps", "small")}
    cells = {cell.label: cell for cell in conditions["uniform-iid"].environments[0].cells}

    for label, requests, slow in (("AsyncFedAvg (16 epochs)", 21, 0), ("AsyncFedAvg (4 epochs)", 111, 10)):
        run = dry_run(cells[label].config, StopRule(update_requests=requests))
        assert slow_update_requests(run, run.costs) == slow


def test_spread_needs_every_seed() -> None:
    """A mean over the seeds that reached the target would flatter those that often do not."""
    assert spread([1.0, 2.0, 6.0])["mean"] == 3.0
    assert spread([1.0, 6.0, 2.0])["median"] == 2.0
    assert spread([6.0, 1.0, 2.0])["range"] == [1.0, 6.0]
    assert spread([1.0, 2.0, 3.0])["deviation"] == pytest.approx(math.sqrt((1 + 0 + 1) / 2))
    assert spread([1.0, None])["mean"] is None
    assert spread([1.0, None])["median"] is spread([1.0, None])["range"] is None
    assert spread([1.0, None])["values"] == [1.0, None]
    assert spread([])["mean"] is None


@pytest.mark.usefixtures("blank_figures")
def test_a_small_study_is_run_reported_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of one condition, through the command: tables, verdicts, files; a second call runs nothing."""

    def short(name: str, scale: Scale, overrides: Sequence[str] = ()) -> list[Condition]:
        whole = next(each for each in load_study(name, scale, overrides) if each.name == "uniform-iid")
        return [replace(whole, environments=whole.environments[:2])]

    monkeypatch.setattr(command_module, "load_study", short)
    request = Request(("adaptive",), "small", tmp_path, 1, overrides=TINY)
    out = quiet()
    done = command(request, out, quiet())

    assert done.complete
    document = done.document
    assert document["runs"] == sum(len(condition.cells) for condition in short("adaptive", "small"))
    folder = tmp_path / "small" / "adaptive"
    assert "## Verdicts" in (folder / "results.md").read_text("utf-8")
    assert (folder / "adaptive.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (folder / "adaptive.svg").read_text("utf-8")
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "SemiSync (adaptive)" in text
    for table in document["conditions"]:
        best = min(
            (row for row in table["rows"] if row["in_sweep"] and row["parallel_time"]["mean"] is not None),
            key=lambda row: row["parallel_time"]["mean"],
        )
        assert table["best_fixed"] == best["label"]
        assert best["against_best_fixed"]["mean"] == pytest.approx(1.0)
        for row in table["rows"]:
            if row["parallel_time"]["mean"] is not None:
                ratios = [
                    mine / theirs
                    for mine, theirs in zip(
                        row["parallel_time"]["values"], best["parallel_time"]["values"], strict=True
                    )
                ]
                expected = math.prod(ratios) ** (1 / len(ratios))
                assert row["against_best_fixed"]["mean"] == pytest.approx(expected)
    summaries = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    assert command(request, quiet(), quiet()).document["conditions"] == document["conditions"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")} == summaries


@pytest.mark.usefixtures("blank_figures")
def test_a_part_of_a_study_is_run(tmp_path: Path) -> None:
    """By file, seed and policy; the tables have what was asked for, and what was run before."""
    (whole,) = (condition for condition in load_study("caps", "small") if condition.name == "uniform-iid")
    seed, policy = whole.study.seeds[-1], whole.cells[0].label
    part = Request(("caps",), "small", tmp_path, 1, overrides=TINY, environments=("uniform-iid",), policies=(policy,))
    done = command(replace(part, seeds=(seed,)), quiet(), quiet())

    assert done.complete and done.document["runs"] == 1 and not done.document["complete"]
    shown = [(table["condition"], row["label"]) for table in done.document["conditions"] for row in table["rows"]]
    assert shown == [("uniform-iid", policy)]
    other = whole.cells[1].label
    after = command(replace(part, seeds=(seed,), policies=(other,)), quiet(), quiet())
    (table,) = after.document["conditions"]
    assert [(row["label"], row["runs"]) for row in table["rows"]] == [(policy, 1), (other, 1)]


def test_runs_of_a_study_from_two_machines_are_joined() -> None:
    """Of a policy that both ran the one with more seeds stays, and the best in hindsight is that of all."""
    (condition,) = (one for one in load_study("sweeps", "small") if one.name == "cifar100-power-law-noniid50")

    def made(**times: float) -> dict[str, Any]:
        table = condition_table(condition, {})
        rows = []
        for row in table["rows"]:
            if (key := row["label"].partition("=")[2].strip(")").replace(".", "_")) in {name[1:] for name in times}:
                costs = {name: spread([times[f"l{key}"]]) for name in COSTS}
                rows.append({**row, **costs, "runs": 1, "reached": 1, "best": [0.3]})
        more = {"study": "sweeps", "scale": "small", "wall_seconds": 10.0, "runs": len(rows), "complete": False}
        return {**more, "conditions": [{**table, "rows": rows}], "verdicts": []}

    first = made(l0_5=30.0, l2=20.0)
    both = joined(first, made(l1=10.0, l2=99.0))
    (table,) = both["conditions"]
    assert [(row["label"], row["parallel_time"]["mean"]) for row in table["rows"]] == [
        ("SemiSync (λ=0.5)", 30.0), ("SemiSync (λ=1)", 10.0), ("SemiSync (λ=2)", 20.0)
    ]  # fmt: skip
    assert both["runs"] == 3 and both["wall_seconds"] == 20.0 and not both["complete"]
    assert table["best_fixed"] is None  # two lambdas are missing
    (table,) = joined(both, made(l3=40.0, l4=50.0))["conditions"]
    assert table["best_fixed"] == "SemiSync (λ=1)"
    assert [row["against_best_fixed"]["mean"] for row in table["rows"]] == pytest.approx([3.0, 1.0, 2.0, 4.0, 5.0])
    assert joined(both, made(l1=10.0))["wall_seconds"] == 20.0
    assert joined(None, first) == first
    with pytest.raises(ConfigError, match="there is no study 'sweep'; did you mean 'sweeps'"):
        joined(None, {**first, "study": "sweep"})
    with pytest.raises(ConfigError, match="a study sweeps at scale paper cannot be added to one of sweeps at"):
        joined(both, {**first, "scale": "paper"})


def row_of(label: str, times: Sequence[float | None], *, runs: int = 3, **more: Any) -> dict[str, Any]:
    """A row as `condition_table` makes it, of a policy without a fixed lambda."""
    reached = sum(time is not None for time in times)
    rest = {"fixed_lambda": None, "in_sweep": False, "max_local_epochs": None, "against_best_of_all": None}
    return {"label": label, "runs": runs, "reached": reached, "parallel_time": spread(times), **rest, **more}


def table_of(*rows: dict[str, Any], best: str | None = "λ") -> dict[str, Any]:
    return {"title": "T", "seeds": [1, 2, 3], "best_fixed": best, "best_of_all": "λ=0.1", "rows": list(rows)}


def test_panels_of_a_figure_share_their_rows_by_name() -> None:
    """A condition need not have every policy, and a dot stands in the row of its own."""
    about = {"distribution": "D", "metric": "accuracy", "target": 0.5}
    tables = [
        {**table_of(row_of("λ=1", [10.0], runs=1)), **about},
        {**table_of(row_of("Sync", [40.0], runs=1), row_of("λ=1", [20.0], runs=1)), **about},
    ]
    left, right = study_figures._times(tables).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["λ=1", "Sync"]
    dots = {
        float(line.get_xdata()[0]): int(line.get_ydata()[0])
        for line in right.lines
        if line.get_marker() == "o" and len(line.get_xdata())
    }
    assert dots == {40.0: 1, 20.0: 0}


def test_what_did_not_reach_the_target_is_said() -> None:
    row = row_of("X", [10.0, 20.0, None], against_best_fixed={"mean": None})
    assert verdicts([table_of(row)]) == ["T: X reached the target in 2 of 3 seeds"]


def test_what_was_not_run_is_not_counted_as_not_reached() -> None:
    """Neither a policy with seeds still to run is judged, nor any policy before the whole sweep is there."""
    (condition, *_) = load_study("adaptive", "small")
    table = condition_table(condition, {})
    assert table["best_fixed"] is table["best_of_all"] is None
    assert verdicts([table]) == []
    assert {row.cells[0].value for row in study_sheet(table).rows} == {"not run"}

    unfinished = row_of("X", [10.0, None, None], runs=1, against_best_fixed={"mean": None})
    assert verdicts([table_of(unfinished)]) == []
    assert verdicts([table_of(row_of("X", [10.0, None, None], against_best_fixed={"mean": None}))]) != []


def test_a_study_of_runs_to_the_end_shows_how_they_ended(tmp_path: Path) -> None:
    """Without a fixed lambda there is nothing to be the best in hindsight; runs that end at a target end alike."""
    digits = (*TINY, "data.train_examples=1000", "data.augment=[]", "network.name=mlp", "stop.seconds=200")
    (condition,) = load_study("momentum", "paper", digits)
    cells = condition.cells[:1]
    run_cells(cells, tmp_path, 1, lambda board: None)
    runs = load_finished(cells, tmp_path)
    (run,) = runs.values()
    table = condition_table(condition, runs)
    assert run.costs_at_target is not None
    assert table["rows"][0]["iterations"]["values"] == [run.costs_at_target.steps]
    sheet = study_sheet(table)
    assert "λ" not in sheet.foot and not any("λ" in heading for heading in sheet.headings)
    column = sheet.headings.index("final accuracy") - 1
    assert [row.cells[column].value for row in sheet.rows] == [f"{run.final_metric:.4g}", "–", "–"]
    *_, sweep = load_study("sweeps", "small")
    assert "final accuracy" not in study_sheet(condition_table(sweep, {})).headings


def test_the_best_in_hindsight_needs_the_whole_sweep(tmp_path: Path) -> None:
    """With one seed of one lambda missing, another could be the best: none is named."""
    whole = next(each for each in load_study("adaptive", "small", TINY) if each.name == "uniform-iid")
    condition = replace(whole, environments=whole.environments[:1])
    cells = [cell for cell in condition.cells if "lambda-0.5" in cell.name or cell.name.endswith(("-1", "-2"))]
    run_cells(cells, tmp_path, 1, lambda board: None)
    runs = load_finished(cells, tmp_path)
    assert len(runs) == 3
    assert condition_table(condition, runs)["best_fixed"] is None
    shown = {row.label: row.cells[1].value for row in study_sheet(condition_table(condition, runs)).rows}
    assert {value for value in shown.values() if value != "–"} == {f"{run.best_metric:.4g}" for run in runs.values()}
    short = replace(condition, study=condition.study.model_copy(update={"sweep": [0.5, 1, 2]}))
    assert condition_table(short, runs)["best_fixed"] in {cell.label for cell in cells}


def test_kept_runs_do_not_ask_where_a_recording_lies(tmp_path: Path) -> None:
    """The same study from another checkout uses the same runs; another recording makes them others."""
    (condition,) = [each for each in load_study("adaptive", "small") if each.name == "presence"]
    cell = condition.cells[0]
    folder = cell_folder(tmp_path, cell)
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text('{"finish_reason": "target reached"}')
    text = cell.config.to_toml()
    here = next(line for line in text.splitlines() if line.endswith('presence.csv"'))
    (folder / "config.toml").write_text(text.replace(here, 'file = "/elsewhere/presence.csv"'))
    assert kept(cell, tmp_path)
    (folder / "config.toml").write_text(text.replace(here, 'file = "/elsewhere/absence.csv"'))
    assert not kept(cell, tmp_path)


def test_verdicts_say_how_far_it_was() -> None:
    for ratio, words in ((1.04, "within 5 %"), (1.2, "NOT within 5 %"), (0.8, "better"), (0.97, "within 5 %")):
        row = row_of("X", [1.0, 1.0, 1.0], against_best_fixed={"mean": ratio})
        (line,) = verdicts([table_of(row)])
        assert line == f"T: X {ratio:.2f} times the time of the best fixed (λ): {words}"
    row = row_of("X", [1.0, 1.0, 1.0], against_best_fixed={"mean": 0.8}, against_best_of_all={"mean": 1.125})
    (line,) = verdicts([table_of(row)])
    assert line == (
        "T: X 0.80 times the time of the best fixed (λ): better; 1.12 times that of λ=0.1, which is not in the sweep"
    )


def test_verdicts_on_caps_tell_time_and_energy() -> None:
    costs = {"update_requests": 1.5, "energy_active": 0.25}
    against = {"mean": 1.1, "costs": costs}
    (line,) = verdicts([table_of(row_of("X", [1.0, 1.0, 1.0], max_local_epochs=5, against_best_fixed=against))])
    assert line == "T: X 1.10 times the time, 1.50 times the update requests, 0.25 times the active energy of λ"


@pytest.mark.slow
def test_a_small_study_of_caps_saves_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed through the command: less is trained under a cap, and the table and the picture say so."""

    def short(name: str, scale: Scale, overrides: Sequence[str] = ()) -> list[Condition]:
        whole = next(each for each in load_study(name, scale, overrides) if each.name == "skewed-noniid5")
        return [replace(whole, environments=whole.environments[:1])]

    monkeypatch.setattr(command_module, "load_study", short)
    request = Request(("caps",), "small", tmp_path, 1, overrides=TINY)
    done = command(request, quiet(), quiet())

    (table,) = done.document["conditions"]
    assert table["best_fixed"] == "SemiSync (λ=2), no cap"
    one, *_, free = table["rows"]
    assert (one["max_local_epochs"], free["max_local_epochs"]) == (1, None)
    assert one["energy_equation"]["mean"] == one["energy_active"]["mean"]  # who is done may sleep
    a_request = [row["energy_active"]["mean"] / row["update_requests"]["mean"] for row in (one, free)]
    assert a_request[0] < a_request[1] / 2
    assert len(done.document["verdicts"]) == 5
    assert (tmp_path / "small" / "caps" / "caps.png").read_bytes().startswith(b"\x89PNG")
    assert "EC active relative to no cap" in (tmp_path / "small" / "caps" / "results.md").read_text("utf-8")


@pytest.mark.slow
def test_a_study_stands_alone_and_is_listed() -> None:
    with pytest.raises(ConfigError, match="adaptive, table3: a study cannot be combined with other results"):
        command(Request(("adaptive", "table3")), quiet(), quiet())
    listed = command(Request(("list",)), quiet(), quiet()).document
    assert set(STUDIES) <= {row["result"] for row in listed}
    console = quiet()
    planned = command(Request(("adaptive",), dry_run=True), console, quiet())
    assert len(planned.document) == sum(len(c.environments[0].cells) for c in load_study("adaptive", "small"))
