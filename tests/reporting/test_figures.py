"""Pictures of runs: what is written, that it is always the same, and that no run is too odd to draw."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from metis.errors import ConfigError
from metis.reporting import figures, marks, style, summaries
from metis.runs.folds import Span
from metis.runs.run import Run

PNG = b"\x89PNG\r\n\x1a\n"


def check_files(paths: list[Path]) -> None:
    """PNG files are PNG, SVG files are XML, and every figure comes as both."""
    assert {path.suffix for path in paths} == {".png", ".svg"}
    assert len({path.stem for path in paths}) * 2 == len(paths)
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(PNG)
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_run_gives_curves_bars_timeline_and_data(runs: list[Run], tmp_path: Path) -> None:
    """All four pictures of a real run, each as PNG and as SVG."""
    paths = figures.save_run_figures(runs[0], tmp_path / "new" / "folder")
    check_files(paths)
    assert {path.stem for path in paths} == {"curves", "active_idle", "timeline", "data"}


def test_a_comparison_gives_all_policies_in_each_picture(runs: list[Run], tmp_path: Path) -> None:
    """Curves with an inset of the data, bars and timelines of all policies together."""
    paths = figures.save_comparison_figures(runs, tmp_path, inset=True)
    check_files(paths)
    assert {path.stem for path in paths} == {"curves", "active_idle", "timelines", "data"}


def test_the_same_run_gives_the_same_svg(runs: list[Run], tmp_path: Path) -> None:
    """Byte for byte, as a file and for a page."""
    first = figures.save_run_figures(runs[0], tmp_path / "a")
    second = figures.save_run_figures(runs[0], tmp_path / "b")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert figures.timeline_svg(runs[0], 5.0, "x") == figures.timeline_svg(runs[0], 5.0, "x")


def test_the_users_own_style_changes_nothing(runs: list[Run], tmp_path: Path) -> None:
    """Settings of matplotlib stay the user's: they neither enter our pictures nor are they changed by them."""
    import matplotlib

    before = figures.curve_svg(runs, "parallel_time", "x")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):
        assert figures.curve_svg(runs, "parallel_time", "x") == before
        assert matplotlib.rcParams["font.size"] == 30


def test_draw_gives_a_figure_and_saves_it_where_asked(runs: list[Run], tmp_path: Path) -> None:
    """`Run.plot` rests on it: two panels, shown by a notebook, written in the format of the name."""
    figure = figures.draw(runs, tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert [axes.get_xlabel() for axes in figure.axes] == ["parallel time (s)", "update requests"]
    assert figure._repr_png_().startswith(PNG)  # type: ignore[attr-defined]
    assert len(figure.axes[0].get_lines()) >= len(runs)


def test_a_format_that_does_not_exist_is_refused_before_drawing(runs: list[Run], tmp_path: Path) -> None:
    """The error names the file and what is allowed; nothing is written."""
    with pytest.raises(ConfigError, match=r"curves.jpeg2: a figure is written as one of .png, .svg, .pdf"):
        figures.draw(runs, tmp_path / "curves.jpeg2")
    with pytest.raises(ConfigError, match=r"\.png"):
        figures.partition_figure(np.ones((2, 2), dtype=np.int64), ["a", "b"], [], tmp_path / "noname")
    with pytest.raises(ConfigError, match="at least one run"):
        figures.save_comparison_figures([], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("learners", "classes"), [(1, 1), (1, 10), (10, 10), (10, 100), (60, 10), (60, 100), (1000, 62)]
)
def test_any_partition_can_be_drawn(learners: int, classes: int, tmp_path: Path) -> None:
    """From one learner with one class to a thousand with 62; labels go where they do not fit."""
    counts = np.random.default_rng(1).integers(0, 50, (learners, classes))
    path = figures.partition_figure(counts, [f"learner {k}" for k in range(learners)], [], tmp_path / "p.svg")
    assert ElementTree.parse(path).getroot().tag.endswith("svg")
    assert path.stat().st_size < 2_000_000


@pytest.mark.parametrize("classes", [8, 30])
def test_a_partition_of_a_regression_is_not_said_to_show_classes(classes: int, tmp_path: Path) -> None:
    """The legend, or the scale next to many of them, says what the colours are."""
    counts = np.ones((3, classes), dtype=np.int64)
    path = figures.partition_figure(counts, ["a", "b", "c"], [], tmp_path / "p.svg", "range of the target")
    text = path.read_text("utf-8")
    assert "range of the target" in text and ">class<" not in text and "<!-- class -->" not in text


def test_a_thousand_learners_give_small_pictures(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """Bars without labels and shares instead of rows: the files do not grow with the federation."""
    run = written_run(learners=1000, rounds=2, values=[0.1, 0.2])
    paths = figures.save_run_figures(run, tmp_path)
    check_files(paths)
    assert not summaries.rows_drawn(run, math.inf)
    assert all(path.stat().st_size < 500_000 for path in paths)


@pytest.mark.parametrize(
    "values",
    [(), (0.5,), (math.nan,), (0.1, math.nan, 0.3), (math.inf, 0.2, 0.3), (1e9, 1.0, 0.1), (0.5, 0.5, 0.5)],
    ids=["not evaluated", "one point", "only NaN", "a gap", "infinite", "wild", "flat"],
)
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_any_history_can_be_drawn(
    written_run: Callable[..., Run], values: tuple[float, ...], higher_is_better: bool, tmp_path: Path
) -> None:
    """Missing, single, infinite and wildly different values, for a metric of either direction."""
    metric = "accuracy" if higher_is_better else "mae"
    run = written_run(3, 3, values, metric=metric, higher_is_better=higher_is_better, target=0.4)
    figure = figures.draw([run], tmp_path / "curves.svg")
    assert ("lower is better" in figure.axes[0].get_ylabel()) is not higher_is_better
    ElementTree.parse(tmp_path / "curves.svg")


def test_a_run_in_which_nothing_happened_can_be_drawn(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """No round, no time, no learner at work: interrupted at once."""
    check_files(figures.save_run_figures(written_run(2, 0), tmp_path))


def test_a_run_with_many_evaluations_shows_their_running_median(written_run: Callable[..., Run]) -> None:
    """One wild evaluation moves the thin line, not the thick one; the ends are as measured."""
    values = [0.5] * 100
    values[50], values[0], values[-1] = 0.0, 0.1, 0.9
    run = written_run(2, 100, values)
    assert summaries.smoothed([run])
    thin, thick, *_ = figures.draw([run]).axes[0].get_lines()
    assert list(thin.get_ydata()) == values
    assert list(thick.get_ydata()) == [0.1, *[0.5] * 98, 0.9]


def test_no_two_of_28_policies_look_alike(written_run: Callable[..., Run]) -> None:
    """Colour and marker together are different for each."""
    runs = [written_run(1, 2, [0.1, 0.2], label=f"policy {k}") for k in range(28)]
    lines = figures.draw(runs).axes[0].get_lines()
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len(lines) == len(looks) == 28


def test_runs_of_the_same_policy_are_told_apart(written_run: Callable[..., Run]) -> None:
    """By their seeds if those differ, else by counting; a policy that is alone keeps its name."""
    alone, one, two = written_run(label="FedRec"), written_run(seed=1), written_run(seed=2)
    assert summaries.labels([alone, one, two]) == ["FedRec", "Sync, seed 1", "Sync, seed 2"]
    assert summaries.labels([one, one]) == ["Sync (1)", "Sync (2)"]


def test_shares_add_up_and_agree_with_the_timeline(runs: list[Run]) -> None:
    """Bars and timeline tell the same story: the ledger's shares are those of the spans."""
    for run in runs:
        shares = summaries.shares(run.costs)
        assert sum(shares.values()) == pytest.approx(1)
        total = len(run.setting.learners) * run.costs.parallel_time
        for kind, share in shares.items():
            spent = sum(span.end - span.start for span in run.spans() if span.kind == kind)
            assert share == pytest.approx(spent / total, abs=1e-9)


def test_shares_over_time_are_those_of_the_spans() -> None:
    """Two learners, one idle in the second half: a quarter of the time, half of it late."""
    from matplotlib.figure import Figure

    spans = [Span("a", "training", 0, 10), Span("b", "training", 0, 5), Span("b", "idle", 5, 10)]
    axes = Figure().add_subplot()
    marks.draw_shares_over_time(axes, spans, 10.0, 2, bins=4)
    tops = [np.round(patch.get_data().values).tolist() for patch in axes.patches]  # type: ignore[attr-defined]
    assert tops[0] == [100, 100, 50, 50]
    assert tops[2] == [100, 100, 100, 100]


def test_the_timeline_shows_a_few_turns_of_the_slowest_policy(written_run: Callable[..., Run]) -> None:
    """A long run is cut to its beginning, a short one is shown whole."""
    assert summaries.timeline_window([written_run(3, 4)]) == 12
    window = summaries.timeline_window([written_run(3, 100)])
    assert 3 * 3 <= window <= 5 * 3


def test_svg_for_a_page_has_ids_of_its_own_and_colours_that_the_page_may_change(runs: list[Run]) -> None:
    """Two pictures in one page share no id, fetch nothing, and every colour of ours is a variable."""
    one, other = (figures.timeline_svg(runs[0], 5.0, name) for name in ("one", "other"))
    roots = [ElementTree.fromstring(text) for text in (one, other)]
    ids = [{node.attrib["id"] for node in root.iter() if "id" in node.attrib} for root in roots]
    assert ids[0] and not ids[0] & ids[1]
    assert "http" not in one and "xlink" not in one
    for colour, variable in style.CSS_VARIABLES.items():
        assert one.count(colour) == one.count(f"var({variable}, {colour})")


def test_names_are_text_whatever_they_contain(runs: list[Run], written_run: Callable[..., Run]) -> None:
    """Markup is escaped, a dollar sign is not a formula, and control characters do not break the file."""
    text = figures.timeline_svg(runs[0], 5.0, "x")
    assert "<b>" not in text and "&lt;b&gt;&amp;$fast$-2" in text
    strange = figures.curve_svg([written_run(label="a\x00b\x1b <&> 半同期"), written_run()], "parallel_time", "x")
    ElementTree.fromstring(strange)
