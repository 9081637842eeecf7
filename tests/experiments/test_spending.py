"""Privacy budgets over a whole run: a fast site stays within its own, and reports say what is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import metis
from metis.privacy.records import Privacy
from metis.reporting.dashboard.view import COLUMNS, RunView
from metis.reporting.report import write_report
from metis.reporting.spending import epsilon_spent, spending_row
from metis.runs.run import Run
from metis.runs.spending import Spending

pytest.importorskip("dp_accounting")


def _run(budget: float | None, *, larger: bool = True, rounds: int = 40) -> Run:
    federation = metis.Federation.from_dataset(
        "digits", learners=2, train_examples=400, network="logistic", batch_size=10, speeds=(0.01, 0.1), seed=3
    )
    own = Privacy(noise=1.0, clip=1.0, budget=budget, delta=1e-5, larger_batches=larger)
    federation.learners = tuple(
        replace(learner, privacy=own if learner.name == federation.learners[0].name else None)
        for learner in federation.learners
    )
    return federation.simulate(metis.semisync_fedavg(1), rounds=rounds, evaluate_every=1e9, progress=False)


def _epsilon(run: Run) -> float:
    name = run.setting.learners[0].name
    spent = epsilon_spent(run.setting.facts, name, run.spending.by_learner[name])
    assert spent is not None
    return spent


@pytest.mark.parametrize("larger", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fast_site_ends_forty_rounds_within_its_budget(larger: bool) -> None:
    """Ten times as fast as the other, it would spend several times 8 without a budget; with it, at most 8."""
    run = _run(8.0, larger=larger)
    assert run.history[-1].version == 40
    assert 5.0 < _epsilon(run) <= 8.0


@pytest.mark.slow
def test_without_a_budget_it_would_have_spent_more() -> None:
    """So the budget is what has kept it back."""
    assert _epsilon(_run(None)) > 8.0


def test_reports_and_the_dashboard_say_what_is_left(tmp_path: Path) -> None:
    """Epsilon so far, steps and rounds that are left: for this site only, because the other has no budget."""
    run = _run(8.0, rounds=10)
    name, spent = run.setting.learners[0].name, run.spending.by_learner
    assert list(spent) == [name]
    steps, left, rounds_left, epsilon, budget, delta = spending_row(run.setting.facts, name, spent[name])
    assert (budget, delta) == ("8", "1e-05") and 0 < float(epsilon) < 8
    assert spent[name].left is not None and spent[name].rounds_left == spent[name].left // spent[name].latest
    text = write_report([run], tmp_path, "budgets").read_text()
    assert "Privacy budgets" in text
    assert all(f"<td>{cell}</td>" in text for cell in (steps, left, rounds_left, epsilon, budget))
    view = RunView(run.setting)
    for now, item in run.events:
        view.record(now, item)
    rows = view.increment()["rows"]
    shown = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert shown[0]["steps_left"] == spent[name].left and shown[0]["epsilon"] == pytest.approx(float(epsilon), rel=0.01)
    assert shown[1]["steps_left"] is None and shown[1]["epsilon"] is None


def test_a_real_site_keeps_its_epsilon() -> None:
    """Of it only the steps are known that it has said."""
    spent = Spending(left=120)
    assert spent.rounds_left is None
    spent.latest = 50
    assert spending_row({}, "hospital", spent) == ["0", "120", "2", "kept at the site", "–", "–"]
    assert epsilon_spent({"privacy": {"hospital": {"noise": "?"}}}, "hospital", spent) is None
