"""What time costs, and how long periods were: who is on the line, what a page says, and when nothing is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import metis
from metis.data import partition
from metis.learning import mlp
from metis.reporting.report import write_report
from metis.reporting.tradeoff import (
    Point,
    change_lines,
    front,
    period_charts,
    points,
    save_tradeoff,
    tradeoff_chart,
    tradeoff_figure,
    words,
)
from metis.runs.run import Run


@pytest.fixture(scope="module")
def paced() -> list[Run]:
    """`semisync`, with a budget and without, of learners of which two slow down; and Sync."""
    digits = metis.load_dataset("digits")
    x, y = digits.x_train[:300].astype(np.float32) / 16, digits.y_train[:300]
    parts = partition.iid(y, partition.uniform_sizes(len(y), 3), np.random.default_rng(1))
    federation = metis.Federation(
        network=lambda: mlp((8, 8), 10, hidden=(8,)),
        train=(x, y),
        test=(digits.x_test[:50].astype(np.float32) / 16, digits.y_test[:50]),
        learners=[
            metis.SimulatedLearner(f"site-{k}", part, 20, metis.Speed(0.1, profile=((3.0, 10.0),) if k else ()))
            for k, part in enumerate(parts)
        ],
        solver=metis.MomentumSGD(0.1, 0.75),
    )
    policies = [metis.semisync(), metis.semisync(update_requests_an_hour=1800), metis.sync_fedavg(4)]
    return [federation.simulate(policy, seconds=20, target=0.4) for policy in policies]


def test_the_front_has_those_that_nobody_beats() -> None:
    found = [
        Point(0, "quick", 1.0, (90.0, 5.0)),
        Point(1, "frugal", 4.0, (10.0, 9.0)),
        Point(2, "worse", 5.0, (50.0, 9.0)),
        Point(3, "between", 2.0, (40.0, 6.0)),
    ]
    assert [point.label for point in front(found, 0)] == ["quick", "between", "frugal"]
    assert [point.label for point in front(found, 1)] == ["quick"]


def test_the_trade_off_is_drawn_and_told(paced: list[Run], tmp_path: Path) -> None:
    labels = [point.label for point in points(paced)]
    assert labels[:2] == ["SemiSync", "SemiSync, 1800 requests an hour"]
    assert sorted(path.name for path in save_tradeoff(paced, tmp_path)) == ["tradeoff.png", "tradeoff.svg"]
    chart = tradeoff_chart(paced)
    assert chart is not None and words(paced) and words(paced) in chart.caption
    assert any(f"{label} (" in words(paced[:2]) for label in labels[:2])


def test_one_policy_leaves_nothing_to_choose(paced: list[Run], tmp_path: Path) -> None:
    assert tradeoff_figure(paced[:1]) is None
    assert tradeoff_chart(paced[:1]) is None
    assert save_tradeoff(paced[:1], tmp_path) == []
    assert words(paced[:1]) == ""


def test_a_report_shows_periods_and_the_reasons_for_their_changes(paced: list[Run], tmp_path: Path) -> None:
    charts = period_charts(paced, [run.policy for run in paced])
    assert [chart.chart.title.partition(":")[0] for chart in charts] == [run.policy for run in paced[:2]]
    texts = [text for _, text in charts[0].changes]
    assert texts[0].startswith("A probe")
    assert any("times slower" in text for text in texts[2:]), texts
    page = write_report(paced, tmp_path, "Paced").read_text("utf-8")
    assert "How long periods were, and why" in page and "What time costs" in page
    lines = change_lines(paced[0])
    assert lines[0].startswith("at 0 s: A probe")
    assert change_lines(paced[2]) == []
