"""The page: it parses, stands alone, says every number, and nothing in a name can break it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from metis.errors import ConfigError
from metis.reporting import summaries
from metis.reporting.findings import comparable
from metis.reporting.markdown import write_markdown
from metis.reporting.report import write_report
from metis.runs.run import Run
from metis.text import number, percent

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order; keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data.strip() + " "

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def row(self, first: str) -> list[str]:
        """The first row of a table that starts with this cell."""
        return next([cell.strip() for cell in row] for row in self.rows if row and row[0].strip() == first)


def read(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_a_comparison_tells_every_policys_numbers(runs: list[Run], tmp_path: Path) -> None:
    """Costs to the target with factors against the first row, learners, seeds and hashes are all there."""
    path = write_report(runs, tmp_path / "new", "Sync & SemiSync", "metis compare a.toml --set 'x=<1>'")
    assert path == tmp_path / "new" / "report.html"
    text, page = read(path)
    first = runs[0].costs_at_target
    assert first is not None
    for index, run in enumerate(runs):
        costs = run.costs_at_target
        assert costs is not None
        row = page.row(run.policy)
        pairs = [
            (costs.steps, first.steps),
            (costs.parallel_time, first.parallel_time),
            (costs.cumulative_time, first.cumulative_time),
            (costs.update_requests, first.update_requests),
            (costs.energy.equation, first.energy.equation),
            (costs.energy.active, first.energy.active),
            (costs.energy.idle_charged, first.energy.idle_charged),
        ]
        expected = [f"{number(a)} ×{b / a:.2f}" if index else number(a) for a, b in pairs]
        assert row[1:8] == expected
        assert row[8] == percent(summaries.shares(costs)["idle"])
        assert run.community_model.sha256() in text
        for learner, spent in run.costs.by_learner.items():
            assert any(
                learner == cells[0].strip() and f"{spent.steps:,}" == cells[3].strip() for cells in page.rows if cells
            )
    assert "metis compare a.toml --set 'x=<1>'" in page.text
    assert "Sync & SemiSync" in page.text
    assert "Energy by the equation" in page.text and "idle charged" in page.text


def test_the_page_stands_alone(runs: list[Run], tmp_path: Path) -> None:
    """No script, no address outside the page; every link leads to an id that exists once."""
    text, page = read(write_report(runs, tmp_path, "Alone"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            if value is not None and not value.startswith("data:image/png;base64,"):
                assert value.startswith("#") and value[1:] in ids, value
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert all(name in ids for name in re.findall(r"url\(#([^)]+)\)", text))
    assert "prefers-color-scheme: dark" in text


def test_the_page_is_readable_without_seeing_it(runs: list[Run], tmp_path: Path) -> None:
    """One main heading, words for every picture, headers and a caption for every table."""
    _, page = read(write_report(runs, tmp_path, "Heard"))
    names = [tag for tag, _ in page.tags]
    assert names.count("h1") == names.count("main") == 1
    assert names.count("table") == names.count("caption") == names.count("thead")
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    pictures = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(pictures) == names.count("svg") and all(picture["aria-label"] for picture in pictures)
    assert dict(page.tags[1:2]).keys() == {"head"} and page.tags[0] == ("html", {"lang": "en"})


def test_names_are_escaped_everywhere(runs: list[Run], tmp_path: Path) -> None:
    """A learner, a network and a title full of markup show as they are written and do nothing."""
    text, page = read(write_report(runs, tmp_path, "<script>alert('&')</script>"))
    assert "<script" not in text and "<b>" not in text
    assert "<b>&$fast$-2" in page.text and "mlp <8 & 8>" in page.text
    assert "<script>alert('&')</script>" in page.text


def test_the_same_runs_give_the_same_page(runs: list[Run], tmp_path: Path) -> None:
    """Byte for byte: a report in version control changes only if its runs do."""
    assert write_report(runs, tmp_path / "a", "x").read_bytes() == write_report(runs, tmp_path / "b", "x").read_bytes()


def test_the_configuration_and_its_command_are_shown(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """A text that runs share is shown once; without a command the one that runs the files again is given.

    Runs that were not one comparison are repeated one by one: a comparison of them might be refused.
    """
    one, two = written_run(label="one"), written_run(label="two")
    for run, name in ((one, "a"), (two, "b")):
        run.folder = tmp_path / name
        run.folder.mkdir()
        (run.folder / "config.toml").write_text(f'seed = 1 # <{name}> & "co"\n')
    _, page = read(write_report([one, two], tmp_path, "Two"))
    assert "metis simulate a/config.toml metis simulate b/config.toml" in page.text
    (tmp_path / "comparison.json").write_text('{"runs": ["a", "b"]}')
    _, page = read(write_report([one, two], tmp_path, "Two"))
    assert 'seed = 1 # <a> & "co"' in page.text and 'seed = 1 # <b> & "co"' in page.text
    assert "metis compare a/config.toml b/config.toml" in page.text
    (tmp_path / "b" / "config.toml").write_text((tmp_path / "a" / "config.toml").read_text())
    _, page = read(write_report([one, two], tmp_path, "Two"))
    assert page.text.count("seed = 1 #") == 1 and "Configuration of all runs" in page.text
    _, page = read(write_report([one], tmp_path / "a", "One"))
    assert "metis simulate config.toml" in page.text


def test_a_target_that_was_missed_is_said(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """By name; there are no factors against a first row that has no costs to the target."""
    missed = written_run(3, 3, [0.1, 0.2, 0.3], label="Slow & sure", target=0.5)
    reached = written_run(3, 3, [0.1, 0.2, 0.6], label="Quick", target=0.5)
    _, page = read(write_report([missed, reached], tmp_path, "Race"))
    assert page.row("Slow & sure")[1] == "not reached"
    assert "Slow & sure did not reach accuracy 0.5" in page.text
    assert "Quick reached accuracy 0.5 first" in page.text
    assert not any("×" in cell for cell in page.row("Quick"))


@pytest.mark.parametrize("values", [(), (math.nan, math.nan), (3.0, 2.0, 1.0)], ids=["none", "NaN", "falling"])
def test_any_single_run_has_a_report(
    written_run: Callable[..., Run], values: tuple[float, ...], tmp_path: Path
) -> None:
    """Without evaluations, with values that are no numbers, with a metric that should fall."""
    run = written_run(3, 3, values, metric="mae", higher_is_better=False, target=1.5 if len(values) == 3 else None)
    text, page = read(write_report([run], tmp_path, "One run"))
    assert "one run" in text and "nan" not in page.text.split()
    assert ("not evaluated" in page.text) is (not values)
    if len(values) == 3:
        assert "Sync reached mae 1.5 after 9 s" in page.text


def test_refused_updates_are_told_in_words(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """Who, how often, when and why; the same refusal is shown once."""
    run = written_run(2, 3, refused="the local model has 3 values that are not finite")
    _, page = read(write_report([run], tmp_path, "Refused"))
    sentence = "learner-0, 3 times from 1 s to 7 s (invalid): the local model has 3 values that are not finite"
    assert page.text.count(sentence) == 1
    _, page = read(write_report([written_run()], tmp_path, "Fine"))
    assert "None: every update entered the community model." in page.text


def test_policies_that_keep_everybody_equally_busy_share_a_timeline(
    written_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Three asynchronous policies differ in how they mix, not in when anybody works."""
    runs = [written_run(label=label) for label in ("A", "B", "C")]
    _, page = read(write_report(runs, tmp_path, "Alike"))
    timelines = [attributes for _, attributes in page.tags if "Timeline" in (attributes.get("aria-label") or "")]
    assert len(timelines) == 1 and "A, B and C" in page.text


def test_a_thousand_learners_fit_on_the_page(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """The table is cut and says so; pictures show shares; the file stays small."""
    run = written_run(learners=1000, rounds=2, values=[0.1, 0.2], classes=10)
    path = write_report([run], tmp_path, "Many")
    _, page = read(path)
    assert "800 more learners are in the events of the run." in page.text
    assert "share of learners in each state" in page.text
    assert path.stat().st_size < 1_500_000


def test_no_runs_are_no_report(tmp_path: Path) -> None:
    """One sentence, and nothing is written."""
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([], tmp_path / "x", "Nothing")
    assert not (tmp_path / "x").exists()


def test_runs_with_other_targets_are_held_against_one(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """The page names one target; a run that was to reach more, or had none, is billed when it reached that one."""
    asked = written_run(values=(0.5, 0.7, 0.9), label="asked", target=0.6)
    more = written_run(values=(0.5, 0.7, 0.9), label="more", target=0.95)
    none = written_run(values=(0.7, 0.8, 0.9), label="none")
    shown = comparable([asked, more, none])
    assert [run.costs_at_target and run.costs_at_target.parallel_time for run in shown] == [6.0, 6.0, 3.0]
    assert more.costs_at_target is None  # the run itself is what it was
    text = write_markdown(shown, tmp_path, "three").read_text("utf-8")
    assert "none reached accuracy 0.6 first, after 3 s" in text
    assert "did not reach" not in text
    assert "do not belong to one federation" not in text


def test_runs_of_different_federations_are_said_to_be(written_run: Callable[..., Run], tmp_path: Path) -> None:
    """Learners that differ make a difference that is not the policy's; what one table cannot hold is refused."""
    two, three = written_run(learners=2, label="two"), written_run(learners=3, label="three")
    text = write_markdown(comparable([two, three]), tmp_path, "both").read_text("utf-8")
    assert "The runs do not belong to one federation: their learners differ" in text
    with pytest.raises(ConfigError, match="different metrics, accuracy and mae: report them one by one"):
        comparable([two, written_run(metric="mae", higher_is_better=False)])
