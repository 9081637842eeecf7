"""In a notebook a result shows a table and its curves, and needs nothing from outside."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import metis
from metis.errors import ConfigError
from metis.runs.run import Run
from reporting.test_report import Page


def pictures(text: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]


def test_a_run_shows_its_costs_and_its_curves(runs: list[Run]) -> None:
    """Until the target and at the end; the picture is in the text, and nothing is fetched."""
    text = runs[0]._repr_html_()
    page = Page(text)
    costs = runs[0].costs_at_target
    assert costs is not None
    assert page.row("until accuracy 0.3")[1:5] == [
        f"{costs.steps}",
        f"{costs.parallel_time:.4g}",
        f"{costs.cumulative_time:.4g}",
        f"{costs.update_requests}",
    ]
    assert page.row("at the end")[1] == str(runs[0].costs.steps)
    (picture,) = pictures(text)
    assert picture.startswith(b"\x89PNG")
    assert len(text) < 100_000
    assert not re.search(r'(?:href|src)="(?!data:)|<script|https?:', text)
    ((_, attributes),) = [(tag, attributes) for tag, attributes in page.tags if tag == "img"]
    assert attributes["alt"]


def test_a_comparison_shows_every_policy_against_the_first(runs: list[Run], tmp_path: Path) -> None:
    """The table has factors; the same numbers come as rows, and all of it as a report."""
    comparison = metis.Comparison(runs)
    page = Page(comparison._repr_html_())
    assert "×" not in page.row("Sync")[1] and "×" in page.row("SemiSync (λ=2)")[1]
    assert len(pictures(comparison._repr_html_())) == 1
    assert [(row["policy"], row["until"]) for row in comparison.to_records()] == [
        (run.policy, until) for run in runs for until in ("target", "end")
    ]
    assert len(comparison.to_pandas()) == 4
    assert comparison.report(tmp_path).name == "report.html"
    shown = repr(comparison).splitlines()
    assert shown[0].split()[:2] == ["PT", "(s)"] and shown[1].startswith("Sync ") and shown[2].startswith("SemiSync")
    for draw in (comparison.plot, comparison.plot_timelines):
        figure = draw(tmp_path / "figure.png")
        assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_what_has_no_evaluation_or_missed_its_target_still_shows(written_run: Callable[..., Run]) -> None:
    """Names are escaped; there is no picture where there is nothing to draw."""
    text = written_run(label="<b>bold</b>")._repr_html_()
    assert not pictures(text) and "<b>" not in text and "<b>bold</b>" in Page(text).text
    missed = written_run(values=[0.1, 0.2], target=0.9)
    assert "not reached" in Page(missed._repr_html_()).row("until accuracy 0.9")[1]
    with pytest.raises(ConfigError, match="a comparison needs at least one run"):
        metis.Comparison([])
