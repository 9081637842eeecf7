"""`metis report` and `--track` on the real command line, on tiny runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from cli.test_app import FILE, ONE, TWO, metis, refused
from metis.runs.run import Run


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, blank_figures: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(FILE.format(policies=ONE), encoding="utf-8")
    (tmp_path / "two.toml").write_text(FILE.format(policies=TWO), encoding="utf-8")
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_report_comes_in_every_format(workplace: Path) -> None:
    """With commas or repeated; with --out nothing else is touched; each file that matters is named on stdout."""
    assert metis("compare", "two.toml", "--out", "two").exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("two").rglob("*") if path.is_file()}
    result = metis("report", "two", "--out", "out", "--format", "md,csv", "--format", "png")
    assert result.exit_code == 0, result.output
    tables = {"history.csv", "learners.csv", "costs.csv"}
    pictures = {"curves.png", "active_idle.png", "timelines.png", "data.png"}
    assert names(Path("out")) == {"report.md"} | tables | pictures
    assert {path: path.stat().st_mtime_ns for path in Path("two").rglob("*") if path.is_file()} == before
    assert [line.rpartition(" ")[2] for line in result.stdout.splitlines()][:2] == ["out/report.md", "out/history.csv"]
    assert "metis compare ../two/sync/config.toml ../two/fedrec/config.toml" in Path("out/report.md").read_text("utf-8")


def test_a_single_run_is_reported_where_it_is(workplace: Path) -> None:
    """By default as a page with its figures."""
    assert metis("simulate", "one.toml", "--out", "one").exit_code == 0
    assert metis("report", "one").exit_code == 0
    assert {"report.html", "curves.svg", "curves.png"} <= names(workplace / "one")
    assert "report.md" not in names(workplace / "one")


def test_a_controllers_state_stands_for_its_run(workplace: Path) -> None:
    """The folder that was given to `metis controller`; before the end it says where to look instead."""
    state = workplace / "state"
    state.mkdir()
    (state / "controller.db").touch()
    message = refused("report", "state")
    assert message == "error: the federation in state has not ended; to see it: metis status state"
    assert metis("simulate", "one.toml", "--out", "state/run").exit_code == 0
    assert metis("report", "state").exit_code == 0
    assert "report.html" in names(state / "run") and names(state) == {"controller.db", "run"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "x", "--format", "pfd"), "error: --format is 'pfd'; did you mean 'pdf'?"),
        (("simulate", "one.toml", "--track", "tensorbord"), "error: there is no tracker 'tensorbord'; allowed: csv"),
        (("simulate", "one.toml", "--set", 'run.trackers=["cvs"]'), "error: --set run.trackers.0: there is no tracker"),
    ],
)
def test_a_name_that_is_none_is_refused(workplace: Path, arguments: tuple[str, ...], message: str) -> None:
    """Before anything is written."""
    assert refused(*arguments).startswith(message)
    assert names(workplace) == {"one.toml", "two.toml"}


def test_trackers_of_the_file_and_of_the_command_line_follow_a_run(workplace: Path) -> None:
    """Next to each other; the configuration remembers them, the result is the same, and JSON stays JSON."""
    assert metis("simulate", "one.toml", "--out", "plain").exit_code == 0
    text = (workplace / "one.toml").read_text("utf-8") + '\n[run]\ntrackers = ["csv"]\n'
    (workplace / "tracked.toml").write_text(text, encoding="utf-8")
    result = metis("simulate", "tracked.toml", "--out", "tracked", "--track", "csv:elsewhere", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    document = json.loads(result.stdout)
    plain, tracked = Run.load("plain"), Run.load("tracked")
    assert document["community_sha256"] == plain.community_model.sha256() == tracked.community_model.sha256()
    for path in ("tracked/metrics.csv", "elsewhere/tracked/metrics.csv"):
        with Path(path).open(encoding="utf-8", newline="") as file:
            assert [float(row["metrics/accuracy"]) for row in csv.DictReader(file)] == plain.metric_values
    assert 'trackers = ["csv", "csv:elsewhere"]' in (workplace / "tracked" / "config.toml").read_text("utf-8")


def test_every_run_of_a_comparison_is_followed_by_itself(workplace: Path) -> None:
    """Under the name of the comparison; a tracker that cannot write costs one note a run, not the run."""
    (workplace / "full").write_text("a file where a folder should be")
    result = metis("compare", "two.toml", "--out", "both", "--track", "csv:tracked", "--track", "csv:full")
    assert result.exit_code == 0, result.output
    assert {path.as_posix() for path in Path("tracked").rglob("*.csv")} == {
        "tracked/both/sync/metrics.csv",
        "tracked/both/fedrec/metrics.csv",
    }
    assert result.stderr.count("note: the tracker csv failed and is left out: NotADirectoryError") == 2
