"""Tidy tables: every number comes back, one row is one thing, and other programs read them."""

from __future__ import annotations

import builtins
import csv
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metis.errors import ConfigError
from metis.reporting.markdown import write_markdown
from metis.reporting.tables import check_parquet, cost_rows, history_rows, learner_rows, write_tables
from metis.runs.run import Run

NAMES = ["history", "learners", "costs"]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_one_row_for_each_thing(runs: list[Run], tmp_path: Path) -> None:
    """An evaluation, a learner, costs; the policy and the seed lead each row, and numbers are exact."""
    paths = write_tables(runs, tmp_path / "new", "csv")
    assert [path.name for path in paths] == [f"{name}.csv" for name in NAMES]
    history, learners, costs = map(read, paths)
    assert all(list(row)[:2] == ["policy", "seed"] for table in (history, learners, costs) for row in table)
    assert [(row["policy"], float(row["accuracy"])) for row in history] == [
        (run.policy, value) for run in runs for value in run.metric_values
    ]
    assert [(row["policy"], row["learner"], int(row["steps"])) for row in learners] == [
        (run.policy, name, spent.steps) for run in runs for name, spent in run.costs.by_learner.items()
    ]
    assert [(row["policy"], row["until"], row["reached"]) for row in costs] == [
        (run.policy, until, "true") for run in runs for until in ("target", "end")
    ]
    assert [float(row["energy_idle_charged"]) for row in costs if row["until"] == "end"] == [
        run.costs.energy.idle_charged for run in runs
    ]


def test_what_is_not_known_is_empty(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """A target that was missed, a value that is not a number, a history without evaluations."""
    missed = written_run(values=[0.1, math.nan], target=0.9)
    (_, _, costs) = write_tables([missed], tmp_path, "csv")
    first, second = read(costs)
    assert (first["until"], first["reached"], first["steps"], first["update_requests"]) == ("target", "false", "", "")
    assert (second["until"], second["reached"]) == ("end", "true") and int(second["steps"]) > 0
    assert [row["accuracy"] for row in read(tmp_path / "history.csv")] == ["0.1", ""]
    write_tables([written_run()], tmp_path, "csv")
    assert read(tmp_path / "history.csv") == []
    assert (tmp_path / "history.csv").read_text().startswith("policy,")


def test_runs_of_one_policy_are_told_apart(written_run: Callable[..., Run]) -> None:
    """By their seeds, as everywhere."""
    rows = history_rows([written_run(values=[0.1], seed=1), written_run(values=[0.2], seed=2)])
    assert [(row["policy"], row["seed"]) for row in rows] == [("Sync, seed 1", 1), ("Sync, seed 2", 2)]


def test_parquet_holds_the_same(runs: list[Run], written_run: Callable[..., Run], tmp_path: Path) -> None:
    """Types too: whole numbers, numbers, texts; a column of which nothing is known is one of numbers."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    tables = [parquet.read_table(path) for path in write_tables(runs, tmp_path, "parquet")]
    for table, rows in zip(tables, (history_rows(runs), learner_rows(runs), cost_rows(runs)), strict=True):
        assert table.to_pylist() == rows
    kinds = {field.name: str(field.type) for field in tables[0].schema}
    assert (kinds["policy"], kinds["version"], kinds["accuracy"]) == ("string", "int64", "double")
    missed = write_tables([written_run(rounds=1, values=[0.1])], tmp_path, "parquet")[2]
    assert str(parquet.read_schema(missed).field("target").type) == "double"


def test_without_pyarrow_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a traceback."""
    real = builtins.__import__

    def lacking(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(
        ConfigError, match=r"the format parquet needs the package pyarrow; .*: pip install '\.\[tables\]'"
    ):
        check_parquet()


# --- Markdown -----------------------------------------------------------------------------------


def test_markdown_has_the_tables_and_shows_the_pictures(runs: list[Run], tmp_path: Path) -> None:
    """Findings, costs with factors, links that are relative to the file, how to repeat it; every row is whole."""
    pictures = [tmp_path / "out" / "curves.png", tmp_path / "other folder" / "data.png"]
    text = write_markdown(
        runs, tmp_path / "out", "Sync & <b>SemiSync</b>", pictures, "metis compare a.toml"
    ).read_text()
    assert text.startswith("# Sync & \\<b\\>SemiSync\\</b\\>\n")
    assert "![curves](curves.png)" in text and "![data](../other%20folder/data.png)" in text
    assert "```\nmetis compare a.toml\n```" in text
    costs = runs[1].costs_at_target
    assert costs is not None
    row = next(line for line in text.splitlines() if line.startswith("| SemiSync (λ=2) |"))
    assert f"| {costs.steps} ×" in row.replace("**", "")
    assert all(run.community_model.sha256() in text for run in runs)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


def test_markdown_keeps_names_as_they_are(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """A name that means something to Markdown means nothing; a missed target leaves no hole in the table."""
    runs = [written_run(label="a|b *c*", values=[0.1], target=0.9), written_run(label="_d_", values=[0.95], target=0.9)]
    text = write_markdown(runs, tmp_path, "x").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| a\\|b \\*c\\* |")]
    assert len(lines) == 3 and "not reached" in lines[0]
    assert "| \\_d\\_ |" in text


def test_a_real_federation_is_repeated_by_its_controller(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """Not by a simulation, and without a promise of the same bits."""
    from dataclasses import replace

    from metis.reporting.report import write_report

    run = written_run(values=[0.1])
    run.setting = replace(run.setting, real_time=True)
    run.folder = tmp_path
    (tmp_path / "config.toml").write_text("seed = 1\n")
    page = write_report([run], tmp_path, "x").read_text()
    text = write_markdown([run], tmp_path, "x").read_text()
    for output in (page, text):
        assert "metis controller config.toml --state ANOTHER-FOLDER" in output and "metis simulate" not in output
    assert "bit for bit" not in page
