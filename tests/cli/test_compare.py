"""`metis compare` with several seeds, grids and formats: what is run, continued, printed and written."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cli.test_app import FILE, ONE, TWO, metis, refused, start
from metis.runs.run import Run

SEEDED = ["compare", "two.toml", "--seeds", "2"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(FILE.format(policies=ONE), encoding="utf-8")
    (tmp_path / "two.toml").write_text(FILE.format(policies=TWO), encoding="utf-8")
    return tmp_path


def shas(folder: str) -> dict[str, str]:
    names = json.loads(Path(folder, "comparison.json").read_text("utf-8"))["runs"]
    return {name: Run.load(Path(folder, name)).community_model.sha256() for name in names}


def test_seeds_are_run_and_summarised(workplace: Path) -> None:
    """Every policy with every seed, each the run that `simulate` makes with it; the table has mean and deviation."""
    result = metis(*SEEDED, "--set", "stop.rounds=8", "--out", "s")
    assert result.exit_code == 0, result.output
    for words in ("Sync", "FedRec", "±", "over 2 seeds", "wins", "report in s/report.html"):
        assert words in result.stdout
    document = json.loads((workplace / "s" / "comparison.json").read_text("utf-8"))
    assert document["runs"] == ["sync/seed-1990", "sync/seed-1991", "fedrec/seed-1990", "fedrec/seed-1991"]
    assert document["finished"] and document["seeds"] == [1990, 1991]
    assert [row["label"] for row in document["summary"]] == ["Sync", "FedRec"]
    assert "over 2 seeds" in (workplace / "s" / "report.html").read_text("utf-8")
    alone = ["simulate", "two.toml", "--policy", "Sync", "--set", "stop.rounds=8", "--set", "seed=1991", "--out", "a"]
    assert metis(*alone).exit_code == 0
    assert shas("s")["sync/seed-1991"] == Run.load(workplace / "a").community_model.sha256()


def test_the_seeds_of_a_file_and_any_number_of_workers_give_the_same_bits(workplace: Path) -> None:
    """`seeds = [...]` in the file; one process after the other or two at a time."""
    text = (workplace / "two.toml").read_text("utf-8")
    (workplace / "two.toml").write_text(f"seeds = [7, 3]\n{text}", encoding="utf-8")
    for workers in ("0", "1", "2"):
        assert metis("compare", "two.toml", "--workers", workers, "--out", f"w{workers}").exit_code == 0
    assert list(shas("w0")) == ["sync/seed-7", "sync/seed-3", "fedrec/seed-7", "fedrec/seed-3"]
    assert shas("w0") == shas("w1") == shas("w2")


def test_one_seed_is_written_as_before(workplace: Path) -> None:
    """`--seeds 1` is the comparison without the option."""
    assert metis("compare", "two.toml", "--out", "a").exit_code == 0
    assert metis("compare", "two.toml", "--seeds", "1", "--out", "b").exit_code == 0
    plain, one = (json.loads((workplace / name / "comparison.json").read_text("utf-8")) for name in "ab")
    for document in (plain, one):
        for row in document["rows"]:
            del row["wall_seconds"], row["directory"]
    assert {**plain, "name": ""} == {**one, "name": ""}


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.parametrize("again", ["resume", "compare"])
@pytest.mark.slow
def test_an_interrupted_study_continues_with_the_same_command(again: str) -> None:
    """Ctrl-C lets every process save its run; both ways to continue end in the bits of an uninterrupted one."""
    long = [*SEEDED, "--workers", "2", "--set", "stop.rounds=40"]
    process = start(*long, "--out", "cut")
    deadline = time.monotonic() + 300
    while not any("update_request" in path.read_text("utf-8") for path in Path("cut").rglob("events.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "still to finish; continue with: metis resume cut" in stderr and "Traceback" not in stderr
    command = ["resume", "cut", "--workers", "2"] if again == "resume" else [*long, "--out", "cut"]
    result = metis(*command)
    assert result.exit_code == 0, result.output
    assert metis(*long, "--out", "whole").exit_code == 0
    assert shas("cut") == shas("whole")


def test_a_finished_study_and_another_one_are_not_touched(workplace: Path) -> None:
    """The same command after the end, and another command in the directory of an interrupted one, are refused."""
    assert metis(*SEEDED, "--out", "c").exit_code == 0
    assert "c contains a comparison" in refused(*SEEDED, "--out", "c")
    document = json.loads((workplace / "c" / "comparison.json").read_text("utf-8"))
    (workplace / "c" / "comparison.json").write_text(json.dumps({**document, "finished": False}), encoding="utf-8")
    assert "an interrupted comparison in which stop.rounds is different" in refused(
        *SEEDED, "--out", "c", "--set", "stop.rounds=3"
    )
    before = shas("c")
    assert metis(*SEEDED, "--out", "c").exit_code == 0  # everything is there
    assert shas("c") == before


def test_a_folder_of_something_else_is_not_written_to(workplace: Path, blank_figures: None) -> None:
    """By the rule of `simulate`: neither the user's files nor a single run become part of a comparison."""
    (workplace / "thesis").mkdir()
    (workplace / "thesis" / "report.html").write_text("mine", encoding="utf-8")
    assert refused("compare", "two.toml", "--out", "thesis") == (
        "error: thesis is not empty and contains no run; choose another --out, or write there with --force"
    )
    assert [path.name for path in (workplace / "thesis").iterdir()] == ["report.html"]
    assert metis("simulate", "one.toml", "--out", "alone", "--report").exit_code == 0
    before = {path.name: path.read_bytes() for path in (workplace / "alone").iterdir()}
    assert refused("compare", "two.toml", "--out", "alone") == (
        "error: alone contains a finished run; choose another --out, or overwrite it with --force"
    )
    assert {path.name: path.read_bytes() for path in (workplace / "alone").iterdir()} == before
    assert metis("compare", "two.toml", "--out", "alone", "--force").exit_code == 0
    assert "summary.json" not in {path.name for path in (workplace / "alone").iterdir()}


def test_force_removes_the_earlier_comparison_and_nothing_else(workplace: Path, blank_figures: None) -> None:
    """Its tables, figures and the runs of policies that are not compared any more; notes of the user stay."""
    assert metis(*SEEDED, "--format", "latex,md,csv,pdf", "--out", "c").exit_code == 0
    (workplace / "c" / "notes.txt").write_text("mine", encoding="utf-8")
    (workplace / "c" / "fedrec" / "notes.txt").write_text("mine", encoding="utf-8")
    (workplace / "other").mkdir()
    (workplace / "other" / "events.jsonl").write_text("mine", encoding="utf-8")
    document = json.loads((workplace / "c" / "comparison.json").read_text("utf-8"))
    document["runs"] += ["../other", ".", str(workplace / "other")]  # not in the folder, so not its own
    (workplace / "c" / "comparison.json").write_text(json.dumps(document), encoding="utf-8")
    assert metis("compare", "one.toml", "--out", "fresh").exit_code == 0
    assert metis("compare", "one.toml", "--out", "c", "--force").exit_code == 0
    fresh = {path.relative_to("fresh") for path in Path("fresh").rglob("*")}
    mine = {Path("notes.txt"), Path("fedrec"), Path("fedrec/notes.txt")}
    assert {path.relative_to("c") for path in Path("c").rglob("*")} == fresh | mine
    assert (workplace / "other" / "events.jsonl").read_text("utf-8") == "mine"


def test_a_sweep_runs_every_combination(workplace: Path) -> None:
    """The axes after --sweep may follow each other; with seeds each combination has all of them."""
    sweep = ["--sweep", "policy.slowest_learner_epochs=1,2", "training.learning_rate=0.05,0.1"]
    result = metis("compare", "one.toml", *sweep, "--seeds", "2", "--out", "g", "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    assert [row["label"] for row in document["summary"]] == [
        f"SemiSync (λ={value}), learning_rate={rate}" for value in (1, 2) for rate in (0.05, 0.1)
    ]
    assert len(document["runs"]) == 8
    result = metis("compare", "one.toml", "--sweep", "training.learning_rate=0.05,0.1", "--out", "h")
    assert result.exit_code == 0 and "learning_rate=0.1" in result.stdout


# Known only once the network is built.
NO_MATCH = ["--set", "training.solver='SGD'", "--set", "training.groups=[{parameters=['hed.*'], weight_decay=0.1}]"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "x"], "error: --seeds is 'x'; write how many, as in 5, or which, as in 1,2,3"),
        (["--sweep", "policy.local_epoch=1,2"], "error: --sweep policy.local_epoch: no policy of the file takes it"),
        (["--sweep", "stop.rounds=1,x"], "error: --sweep stop.rounds"),
        (["--format", "latx"], "error: --format is 'latx'; did you mean 'latex'?"),
        (NO_MATCH, "error: groups: the pattern 'hed.*' matches no parameter of the network, which has "),
        ([*NO_MATCH, "--seeds", "2"], "error: groups: the pattern 'hed.*' matches no parameter of the network"),
        (["--sweep", "stop.rounds=1", "training.momentum"], "error: there is no file training.momentum"),
    ],
)
def test_a_wrong_option_is_one_sentence_before_anything_runs(arguments: list[str], message: str) -> None:
    """What is wrong and what is allowed; nothing is written."""
    assert message in refused("compare", "two.toml", *arguments)
    assert not Path("runs").exists()


def test_a_paper_gets_its_table_and_figures(workplace: Path) -> None:
    """LaTeX with booktabs, Markdown, CSV and figures as wide as a column, with one seed and with several."""
    for name, more in (("one", []), ("several", ["--seeds", "2"])):
        result = metis("compare", "two.toml", *more, "--format", "latex,markdown,csv,pdf,svg", "--out", name)
        assert result.exit_code == 0, result.output
        folder = workplace / name
        table = (folder / "table.tex").read_text("utf-8")
        assert "\\toprule" in table and "Sync &" in table and table.count("\\\\") == 3
        assert ("\\pm" in table) == bool(more)
        assert (folder / "curves-time.pdf").read_bytes().startswith(b"%PDF")
        assert "Sync" in (folder / "report.md").read_text("utf-8")
        assert 'width="241.2pt"' in (folder / "curves-time.svg").read_text("utf-8")
    assert "mean,deviation,interval_low" in (workplace / "several" / "summary.csv").read_text("utf-8")
    again = metis("report", "several", "--format", "latex", "--out", "paper")
    assert again.exit_code == 0
    assert (workplace / "paper" / "table.tex").read_text("utf-8") == table
