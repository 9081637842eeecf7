"""Studies of our own: their files, their tables over several seeds, their verdicts."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from metis import cli_reproduce
from metis.core.protocols import SemiSynchronous
from metis.errors import ConfigError
from metis.experiments.build import build_policy
from metis.experiments.cells import Scale
from metis.experiments.study import STUDIES, Condition, condition_table, load_study, spread, verdicts

TINY = (
    "data.dataset=digits", "data.train_examples=200", "data.test_examples=50", "network.hidden=[8]",
    "stop.seconds=40", "evaluation.target=0.2",
)  # fmt: skip


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_the_study_of_adaptive_periods_asks_what_it_says(scale: str) -> None:
    """Three environments of the paper and two with changing conditions; five fixed lambdas, adaptive, FedNova."""
    conditions = load_study("adaptive", cli_reproduce.scale_named(scale))

    assert {condition.name for condition in conditions} == {
        "uniform-iid", "skewed-noniid5", "power-law-noniid3", "slowdown", "presence",
    }  # fmt: skip
    for condition in conditions:
        assert len(condition.study.seeds) >= 3
        assert len({cell.name for cell in condition.cells}) == len(condition.cells)
        assert [environment.config.seed for environment in condition.environments] == condition.study.seeds
        first = condition.environments[0]
        made = [build_policy(cell.policy) for cell in first.cells]
        protocols = [policy.protocol for policy in made if isinstance(policy.protocol, SemiSynchronous)]
        fixed = [p.slowest_learner_epochs for p, policy in zip(protocols, made, strict=True)
                 if p.pacing is None and policy.nova is None]  # fmt: skip
        assert fixed == [0.5, 1, 2, 3, 4]
        assert any(protocol.pacing is not None for protocol in protocols)
        assert any(policy.nova is not None for policy in made)
        changing = any(group.drift or group.availability.kind != "always" for group in first.config.learners)
        assert changing == (condition.name in ("slowdown", "presence"))


def test_spread_needs_every_seed() -> None:
    """A mean over the seeds that reached the target would flatter those that often do not."""
    assert spread([1.0, 2.0, 3.0])["mean"] == 2.0
    assert spread([1.0, 2.0, 3.0])["deviation"] == pytest.approx(math.sqrt((1 + 0 + 1) / 2))
    assert spread([1.0, None])["mean"] is None
    assert spread([1.0, None])["values"] == [1.0, None]
    assert spread([])["mean"] is None


def test_a_small_study_is_run_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of one condition, through the command: tables, verdicts, files; a second call runs nothing."""

    def short(name: str, scale: Scale, overrides: Sequence[str] = ()) -> list[Condition]:
        whole = next(each for each in load_study(name, scale, overrides) if each.name == "uniform-iid")
        return [replace(whole, environments=whole.environments[:2])]

    monkeypatch.setattr(cli_reproduce, "load_study", short)
    request = cli_reproduce.Request(("adaptive",), "small", tmp_path, 1, overrides=TINY)
    out = quiet()
    done = cli_reproduce.command(request, out, quiet())

    assert done.complete
    document = done.document
    assert document["runs"] == sum(len(condition.cells) for condition in short("adaptive", "small"))
    folder = tmp_path / "small" / "adaptive"
    assert "## Verdicts" in (folder / "results.md").read_text("utf-8")
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "SemiSync (adaptive)" in text
    for table in document["conditions"]:
        best = min(
            (row for row in table["rows"] if row["fixed_lambda"] and row["parallel_time"]["mean"] is not None),
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
    assert cli_reproduce.command(request, quiet(), quiet()).document["conditions"] == document["conditions"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")} == summaries


def test_what_did_not_reach_the_target_is_said() -> None:
    """Without any run: nothing is claimed."""
    (condition, *_) = load_study("adaptive", "small")
    table = condition_table(condition, {})

    assert table["best_fixed"] is None
    assert verdicts([table]) == []
    rows = [dict(row) for row in table["rows"]]
    for row in rows:
        row["parallel_time"] = spread([10.0, 20.0, None]) if row["fixed_lambda"] is None else spread([10.0, 20.0, 30.0])
        row["reached"] = 2 if row["fixed_lambda"] is None else 3
        row["against_best_fixed"] = {"mean": None if row["fixed_lambda"] is None else 1.0}
    told = verdicts([{**table, "rows": rows, "best_fixed": "SemiSync (λ=1)"}])
    assert told
    assert all("reached the target in 2 of 3 seeds" in line for line in told)


def test_verdicts_say_how_far_it_was() -> None:
    row = {"label": "X", "fixed_lambda": None, "reached": 3}
    table = {"title": "T", "seeds": [1, 2, 3], "best_fixed": "λ"}
    for ratio, words in ((1.04, "within 5 %"), (1.2, "NOT within 5 %"), (0.8, "better"), (0.97, "within 5 %")):
        (line,) = verdicts([{**table, "rows": [{**row, "against_best_fixed": {"mean": ratio}}]}])
        assert line == f"T: X {ratio:.2f} times the time of the best fixed (λ): {words}"


def test_a_study_stands_alone_and_is_listed() -> None:
    with pytest.raises(ConfigError, match="adaptive, table3: a study is reproduced by itself"):
        cli_reproduce.command(cli_reproduce.Request(("adaptive", "table3")), quiet(), quiet())
    listed = cli_reproduce.command(cli_reproduce.Request(("list",)), quiet(), quiet()).document
    assert set(STUDIES) <= {row["result"] for row in listed}
    console = quiet()
    planned = cli_reproduce.command(cli_reproduce.Request(("adaptive",), dry_run=True), console, quiet())
    assert len(planned.document) == sum(len(c.environments[0].cells) for c in load_study("adaptive", "small"))
