"""Runs side by side: rows as in the paper's tables, factors against the first."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from metis.errors import ConfigError
from metis.experiments.build import build_federation, build_policies, build_stop
from metis.experiments.compare import COSTS, check_comparable, compare, value_at
from metis.experiments.config.load import ExperimentConfig, load_config, resolve_config
from metis.reporting.console import comparison_table
from metis.runs.run import Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "beyond.toml"
CONTENT: dict[str, Any] = {
    "data": {"train_examples": 200, "test_examples": 60},
    "learners": [
        {"name": "fast", "batch_size": 10, "time_per_batch": 0.03, "epsilon": 2},
        {"name": "slow", "batch_size": 10, "time_per_batch": 0.3},
    ],
    "network": {"name": "logistic"},
    "policy": [{"name": "sync_fedavg", "local_epochs": 2}, {"name": "semisync_fedavg"}],
    "stop": {"seconds": 20},
}


def config(**tables: Any) -> ExperimentConfig:
    return resolve_config({**CONTENT, **tables}, "test.toml")


def runs(target: float | None) -> list[Run]:
    made = config()
    federation = build_federation(made)
    return [
        federation.simulate(policy, build_stop(made), solver=solver, target=target)
        for policy, solver in build_policies(made)
    ]


def test_rows_hold_the_costs_at_the_target() -> None:
    """Costs up to the moment that the target was reached, factors as the first row's over the row's."""
    sync, semisync = made = runs(target=0.3)
    comparison = compare(made)
    first, second = comparison["rows"]
    assert sync.costs_at_target is not None and semisync.costs_at_target is not None
    assert first["iterations"] == sync.costs_at_target.steps
    assert second["parallel_time"] == semisync.costs_at_target.parallel_time
    assert second["energy"]["active"] == semisync.costs_at_target.energy.active
    assert first["factors"] == dict.fromkeys(COSTS, 1.0)
    for path in COSTS:
        expected = value_at(first, path), value_at(second, path)
        assert second["factors"][path] == pytest.approx(expected[0] / expected[1])  # type: ignore[operator]


def test_without_a_target_the_costs_are_those_at_the_end() -> None:
    """Same budget, so the rows differ in what they did with it."""
    made = runs(target=None)
    comparison = compare(made)
    assert comparison["target"] is None
    assert [row["parallel_time"] for row in comparison["rows"]] == [20.0, 20.0]
    assert [row["update_requests"] for row in comparison["rows"]] == [run.costs.update_requests for run in made]
    assert [row["reached"] for row in comparison["rows"]] == [None, None]


def test_a_run_that_did_not_reach_the_target_has_no_costs() -> None:
    """Neither it nor a row after it has factors, if it is the first."""
    comparison = compare(runs(target=1.0))
    for row in comparison["rows"]:
        assert row["reached"] is False
        assert all(value_at(row, path) is None for path in COSTS)
        assert set(row["factors"].values()) == {None}


def test_all_that_is_beyond_the_paper_can_be_compared_with_it() -> None:
    """examples/beyond.toml: every policy makes rounds; bytes are shown, since some updates are compressed."""
    made = load_config(EXAMPLE, ["stop.seconds=12", "data.train_examples=400", "data.test_examples=50"])
    federation = build_federation(made, source=EXAMPLE.name)
    ended = [federation.simulate(policy, build_stop(made), solver=solver) for policy, solver in build_policies(made)]
    comparison = compare(ended)
    rows = {row["label"]: row for row in comparison["rows"]}
    assert len(rows) == len(made.policy) == 16
    assert all(row["rounds"] >= 1 for row in rows.values())
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_table(comparison))
    assert "bytes" in console.file.getvalue()  # type: ignore[attr-defined]
    plain, small = rows["SemiSync (λ=2)"], rows["SemiSync (λ=2), int8"]
    assert (plain["compression_error"], small["compression_error"] > 0) == (None, True)
    a_request = [row["bytes_exchanged"] / row["update_requests"] for row in (plain, small)]
    assert a_request[1] < 0.75 * a_request[0]


def test_bytes_have_no_column_where_requests_tell_them() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(comparison_table(compare(runs(target=None))))
    assert "bytes" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_cannot_be_compared() -> None:
    """An empty list is the user's mistake."""
    with pytest.raises(ConfigError, match="nothing to compare"):
        compare([])


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"seed": 1}, "seed"),
        ({"stop": {"seconds": 30}}, "stop.seconds"),
        ({"learners": [CONTENT["learners"][0], {**CONTENT["learners"][1], "epsilon": 3}]}, "learners.1.epsilon"),
        ({"learners": CONTENT["learners"][:1]}, "learners"),
    ],
)
def test_files_may_differ_only_in_the_policy(tables: dict[str, Any], path: str) -> None:
    """The first difference elsewhere is named by its path."""
    check_comparable([("a.toml", config()), ("b.toml", config(policy={"name": "fedrec"}))])
    with pytest.raises(ConfigError, match=rf"^b\.toml and a\.toml differ in {path}; "):
        check_comparable([("a.toml", config()), ("b.toml", config(**tables))])
