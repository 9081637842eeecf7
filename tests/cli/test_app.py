"""The real command line on the bundled digits, with tiny budgets: what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from metis import __version__
from metis.cli.app import app
from metis.core.policies import POLICIES
from metis.core.solvers import SOLVERS
from metis.experiments.config.load import load_config
from metis.files import locked
from metis.runs.run import Run

FILE = """
[data]
train_examples = 200
test_examples = 60

[[learners]]
name = "fast"
count = 2
batch_size = 10
time_per_batch = 0.03
epsilon = 2

[[learners]]
name = "slow"
batch_size = 10
time_per_batch = 0.3

[network]
name = "logistic"

[training]
learning_rate = 0.05

{policies}

[stop]
rounds = 2

[evaluation]
target = 0.5
"""
ONE = '[policy]\nname = "semisync_fedavg"\nslowest_learner_epochs = 1'
TWO = '[[policy]]\nname = "sync_fedavg"\nlocal_epochs = 1\n\n[[policy]]\nname = "fedrec"\nlocal_epochs = 1'

# Names that `summary.json` promises to other programs.
CONTRACT = {
    "policy", "seed", "learners", "rounds", "update_requests", "models_exchanged", "bytes_exchanged", "steps",
    "steps_by_learner", "parallel_time", "cumulative_time", "idle_time", "energy", "metric", "target",
    "wall_seconds", "community_sha256",
}  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, blank_figures: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with two experiments: `one.toml` has one policy, `two.toml` has two."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.toml").write_text(FILE.format(policies=ONE), encoding="utf-8")
    (tmp_path / "two.toml").write_text(FILE.format(policies=TWO), encoding="utf-8")
    return tmp_path


def metis(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The one line of a user's error: exit code 2, nothing on stdout, no traceback."""
    result = metis(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.strip()


# --- simulate ---------------------------------------------------------------------------------


def test_simulate_writes_a_run_directory(workplace: Path) -> None:
    """By default runs/FILE-POLICY, with everything that a run leaves."""
    result = metis("simulate", "one.toml")
    assert result.exit_code == 0, result.output
    folder = workplace / "runs" / "one-semisync-lambda-1"
    names = {path.name for path in folder.iterdir()}
    assert {"events.jsonl", "config.toml", "summary.json", "community.safetensors"} <= names
    assert "report.html" not in names and not any(name.endswith(".png") for name in names)
    assert "figures and a report: metis report runs/one-semisync-lambda-1" in result.output
    assert json.loads((folder / "summary.json").read_text("utf-8")).keys() >= CONTRACT
    assert "round 2" in result.stderr and "accuracy" in result.stderr
    assert "parallel time" in result.stdout


def test_the_resolved_configuration_repeats_the_run(workplace: Path) -> None:
    """config.toml of a run gives the same bits again."""
    metis("simulate", "one.toml", "--set", "seed=7", "--out", "a")
    again = metis("simulate", "a/config.toml", "--out", "b")
    assert again.exit_code == 0, again.output
    assert load_config(workplace / "a/config.toml").seed == 7
    assert Run.load("a").community_model.sha256() == Run.load("b").community_model.sha256()


def test_json_is_one_document_and_nothing_else() -> None:
    """stdout can be piped into another program, which finds the promised names."""
    result = metis("simulate", "one.toml", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document.keys() >= CONTRACT
    assert document["directory"] == "runs/one-semisync-lambda-1"
    assert document["rounds"] == 2
    assert result.stderr == ""


def test_seeds_of_a_file_are_for_a_comparison(workplace: Path) -> None:
    """A run says which seed it has, unless that was asked for."""
    (workplace / "seeds.toml").write_text("seeds = [1, 2]\n" + (workplace / "one.toml").read_text("utf-8"), "utf-8")
    result = metis("simulate", "seeds.toml", "--out", "a")
    assert "note: the seeds 1 and 2 of seeds.toml are for metis compare; this run has seed 1990" in result.stderr
    assert "note" not in metis("simulate", "seeds.toml", "--set", "seed=2", "--out", "b").stderr
    assert metis("simulate", "seeds.toml", "--json", "--out", "c").stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pool", "rays"], "--pool: is 'rays', must be one of inline, processes, ray; did you mean 'ray'?"),
        (["--set", "run.pool=rays"], "--set run.pool: is 'rays', must be one of inline, processes, ray; did you mean"),
        (["--workers", "1", "--pool", "inline"], "--workers: the pool 'inline' has no workers, but 1 are asked for"),
        (["--ray-address", "auto"], "--ray-address: ray_address is for the pool 'ray', but the pool is 'inline'"),
    ],
)
def test_an_option_is_blamed_by_its_name(options: list[str], message: str) -> None:
    """Not the key of the file that it stands for."""
    assert refused("simulate", "one.toml", *options).startswith(f"error: {message}")


def test_a_target_is_blamed_by_its_option() -> None:
    """As the options of a pool are."""
    message = "error: --target: is 90, but accuracy lies between 0 and 1"
    assert refused("compare", "one.toml", "--target", "90") == message


def test_workers_do_not_change_the_result() -> None:
    """The same bits with and without worker processes."""
    inline = json.loads(metis("simulate", "one.toml", "--json", "--out", "a").stdout)
    workers = json.loads(metis("simulate", "one.toml", "--json", "--out", "b", "--workers", "2").stdout)
    assert inline["community_sha256"] == workers["community_sha256"]


def test_a_finished_run_is_not_overwritten() -> None:
    """Only with --force, or elsewhere."""
    assert metis("simulate", "one.toml", "--out", "a").exit_code == 0
    assert refused("simulate", "one.toml", "--out", "a") == (
        "error: a contains a finished run; choose another --out, or overwrite it with --force"
    )
    assert metis("simulate", "one.toml", "--out", "a", "--force").exit_code == 0


def test_a_folder_of_something_else_is_not_written_to(workplace: Path) -> None:
    """A slip in --out does not mix a run into the user's files."""
    (workplace / "thesis").mkdir()
    (workplace / "thesis" / "text.tex").write_text("", encoding="utf-8")
    assert refused("simulate", "one.toml", "--out", "thesis") == (
        "error: thesis is not empty and contains no run; choose another --out, or write there with --force"
    )


def test_force_removes_the_report_of_the_earlier_run_and_nothing_else(workplace: Path) -> None:
    """An old report would be taken for one of the new run; notes of the user stay."""
    assert metis("simulate", "one.toml", "--out", "a").exit_code == 0
    fresh = {path.name for path in (workplace / "a").iterdir()}
    assert metis("report", "a", "--format", "html,md,csv,latex,pdf,svg,png").exit_code == 0
    for name in ("report.html", "report.md", "costs.csv", "table.tex", "curves-time.pdf", "timeline.svg"):
        assert (workplace / "a" / name).is_file()
    (workplace / "a" / "notes.txt").write_text("mine", encoding="utf-8")
    assert metis("simulate", "one.toml", "--out", "a", "--force").exit_code == 0
    assert {path.name for path in (workplace / "a").iterdir()} == {*fresh, "notes.txt"}


def test_force_leaves_what_only_has_the_name_of_a_report(workplace: Path) -> None:
    """In a folder without a run nothing is from Metis."""
    (workplace / "thesis").mkdir()
    (workplace / "thesis" / "data.png").write_bytes(b"mine")
    assert metis("simulate", "one.toml", "--out", "thesis", "--force").exit_code == 0
    assert (workplace / "thesis" / "data.png").read_bytes() == b"mine"


def test_force_over_a_comparison_leaves_only_the_new_run(workplace: Path) -> None:
    """The folder is not a comparison and a run at once."""
    assert metis("compare", "two.toml", "--out", "a").exit_code == 0
    assert refused("simulate", "one.toml", "--out", "a") == (
        "error: a contains a comparison; choose another --out, or overwrite it with --force"
    )
    assert metis("simulate", "one.toml", "--out", "a", "--force").exit_code == 0
    assert not {"comparison.json", "report.html", "sync", "fedrec"} & {path.name for path in Path("a").iterdir()}


BEING_WRITTEN = "is being written by another process; wait for it, or "


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_one_process_writes_a_run(workplace: Path) -> None:
    """A second one is refused while the first goes on, and changes nothing."""
    assert metis("simulate", "one.toml", "--out", "par").exit_code == 0
    summary = json.loads((workplace / "par" / "summary.json").read_text("utf-8"))
    cut = {**summary, "finish_reason": "interrupted"}  # as in a run that is going on again
    (workplace / "par" / "summary.json").write_text(json.dumps(cut), encoding="utf-8")
    before = {path.name: path.read_bytes() for path in (workplace / "par").iterdir()}
    with locked(workplace / "par" / "lock", note=False):
        for command in (["simulate", "one.toml", "--out", "par"], ["compare", "two.toml", "--out", "par"]):
            for more in ([], ["--force"]):
                assert refused(*command, *more) == f"error: par {BEING_WRITTEN}choose another --out"
        assert refused("resume", "par") == f"error: par {BEING_WRITTEN}stop it"
    assert {path.name: path.read_bytes() for path in (workplace / "par").iterdir()} == before
    assert "contains an interrupted run" in refused("simulate", "one.toml", "--out", "par")


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_one_process_writes_a_comparison(workplace: Path) -> None:
    """Neither the comparison nor one of its runs is written by a second one."""
    assert metis("compare", "two.toml", "--out", "both").exit_code == 0
    with locked(workplace / "both" / "lock", note=False):
        for command in (["compare", "two.toml", "--out", "both"], ["resume", "both"]):
            assert refused(*command).startswith(f"error: both {BEING_WRITTEN}")
    with locked(workplace / "both" / "fedrec" / "lock", note=False):
        held = {path: path.read_bytes() for path in (workplace / "both").rglob("*") if path.is_file()}
        message = refused("compare", "two.toml", "--out", "both", "--force")
        assert message == f"error: both/fedrec {BEING_WRITTEN}choose another --out"
        assert {path: path.read_bytes() for path in (workplace / "both").rglob("*") if path.is_file()} == held


def test_one_of_several_policies_is_chosen_by_name() -> None:
    """By its label or its name; without a choice the command says what there is."""
    assert refused("simulate", "two.toml") == (
        "error: two.toml has 2 policies; choose one with --policy (Sync, FedRec), "
        "or run all with: metis compare two.toml"
    )
    assert refused("simulate", "two.toml", "--policy", "fedrek") == (
        "error: two.toml has no policy 'fedrek'; did you mean 'FedRec'?"
    )
    result = metis("simulate", "two.toml", "--policy", "fedrec", "--json")
    assert json.loads(result.stdout)["policy"] == "fedrec"


def test_a_run_in_which_every_learner_diverges_is_a_failure() -> None:
    """Each is named, and the run is written with its costs, but a script that asks for the exit code stops there."""
    result = metis(
        "simulate", "one.toml", "--set", "training.learning_rate=1e38", "--set", "stop.seconds=20", "--out", "a"
    )
    assert result.exit_code == 2, result.output
    assert "note: refused an update from learner 'fast-1'" in result.stderr
    assert "was set aside" in result.stderr
    assert "no learner is left that could go on" in result.stderr and "a smaller learning rate" in result.stderr
    assert Run.load(Path("a")).rounds == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "no.toml"), "error: there is no file no.toml; write an example with: metis init no.toml"),
        (
            ("simulate", "one.toml", "--set", "policy.slowest_learner_epoch=1"),
            "error: --set policy.slowest_learner_epoch: unknown key; did you mean 'slowest_learner_epochs'?",
        ),
        (
            ("simulate", "one.toml", "--set", "network.hiden=[3]"),
            "error: --set network.hiden: unknown key; it takes none",
        ),
        (
            ("compare", "one.toml", "--set", "partition.classes=non_iid", "--set", "partition.classes_per_learner=12"),
            "error: partition: Non-IID(12) cannot be: each learner has 1 to 10 classes, as there are 10 in all",
        ),
        (
            ("resume", "nowhere"),
            "error: there is no directory nowhere; make a run with: metis simulate FILE --out nowhere",
        ),
        (("resume", "one.toml"), "error: one.toml is a file; give the directory of a run"),
        (("report", "one.toml"), "error: one.toml is a file; give the directory of a run"),
        (("resume", "."), "error: . has no config.toml; a run made from Python is resumed from Python"),
        (
            ("simulate", "one.toml", "--set", "network.name=mlp", "--set", "network.hidden=[0]"),
            "error: --set network.hidden.0: is 0, must be at least 1",
        ),
        (
            ("report", "nowhere"),
            "error: there is no directory nowhere; make a run with: metis simulate FILE --out nowhere",
        ),
    ],
    ids=[
        "missing file", "typo", "network option", "impossible partition", "resume nothing", "resume a file",
        "report a file", "resume without config", "hidden size", "report nothing",
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    """On stderr, with exit code 2; nothing has been written."""
    assert refused(*arguments) == message
    assert not Path("runs").exists()


# --- compare ----------------------------------------------------------------------------------


def test_compare_prints_the_table_and_writes_all_runs(workplace: Path) -> None:
    """One row a policy with factors against the first, a directory each, one report."""
    result = metis("compare", "two.toml", "--set", "stop.rounds=8")
    assert result.exit_code == 0, result.output
    for words in ("Costs until accuracy 0.5", "Sync", "FedRec", "iterations", "PT (s)", "CT (s)", "CC", "×1.00"):
        assert words in result.stdout
    folder = workplace / "runs" / "two"
    assert {"sync", "fedrec", "comparison.json", "report.html"} <= {path.name for path in folder.iterdir()}
    assert (folder / "sync" / "summary.json").exists()


def test_compare_says_who_did_not_reach_the_target() -> None:
    """A target that nobody reaches in the budget leaves rows without costs and without factors."""
    result = metis("compare", "two.toml", "--target", "1.0", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [row["reached"] for row in document["rows"]] == [False, False]
    assert document["rows"][0]["parallel_time"] is None
    assert document["rows"][1]["factors"]["energy.active"] is None
    assert "did not reach" in metis("compare", "two.toml", "--target", "1.0", "--out", "b").stdout


def test_compared_files_must_share_data_start_and_budget(workplace: Path) -> None:
    """Two files that differ in their policy are compared; a difference elsewhere is refused by its path."""
    result = metis("compare", "one.toml", "two.toml", "--json")
    assert result.exit_code == 0, result.output
    assert [row["label"] for row in json.loads(result.stdout)["rows"]] == ["SemiSync (λ=1)", "Sync", "FedRec"]
    text = (workplace / "two.toml").read_text("utf-8").replace("count = 2", "count = 3")
    (workplace / "two.toml").write_text(text, encoding="utf-8")
    assert refused("compare", "one.toml", "two.toml", "--out", "b") == (
        "error: two.toml and one.toml differ in learners.0.count; "
        "a comparison needs the same data, the same start and the same budget"
    )


def test_compared_files_may_have_one_name_but_not_be_one_file(workplace: Path) -> None:
    """Each file is run for itself, in a directory of its own; the same file twice is refused."""
    for folder, epochs in (("a", 1), ("b", 3)):
        (workplace / folder).mkdir()
        text = FILE.format(policies=ONE.replace("epochs = 1", f'epochs = {epochs}\nlabel = "S"'))
        (workplace / folder / "x.toml").write_text(text, encoding="utf-8")
    result = metis("compare", "a/x.toml", "b/x.toml", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["label"] for row in rows] == ["S, a/x", "S, b/x"]
    assert rows[0]["directory"] != rows[1]["directory"]
    assert rows[0]["community_sha256"] != rows[1]["community_sha256"]
    assert refused("compare", "one.toml", "./one.toml") == (
        "error: one.toml is given twice; every file of a comparison must be a different one"
    )


def test_a_comparison_does_not_load_a_run_of_something_else(workplace: Path) -> None:
    """A finished run whose config.toml was changed afterwards is refused."""
    assert metis("compare", "two.toml", "--out", "c").exit_code == 0
    config = workplace / "c" / "sync" / "config.toml"
    config.write_text(config.read_text("utf-8").replace("seed = 1990", "seed = 7"), encoding="utf-8")
    assert "contains a run of Sync with seed 1990, but its config.toml says Sync with seed 7" in refused("resume", "c")


# --- text of the user -------------------------------------------------------------------------


def test_brackets_in_names_are_printed_as_they_are(workplace: Path) -> None:
    """What a terminal library would read as a style is text."""
    text = FILE.format(policies=ONE + '\nlabel = "[bold]x[/nope]"').replace('"slow"', '"f[/q]"')
    (workplace / "odd.toml").write_text(text, encoding="utf-8")
    result = metis("simulate", "odd.toml", "--out", "q[a]x")
    assert result.exit_code == 0, result.output
    assert "written to q[a]x" in result.stdout and "[bold]x[/nope]" in result.stdout
    result = metis("compare", "odd.toml", "--out", "q[/a]")
    assert result.exit_code == 0, result.output
    assert "written to q[/a]" in result.stdout and "[bold]x[/nope]" in result.stdout
    result = metis("data", "show", "odd.toml", "--out", "p[/b].png")
    assert result.exit_code == 0, result.output
    assert "f[/q]-1" in result.stdout and "figure in p[/b].png" in result.stdout
    assert "wrote v[/x].toml" in metis("init", "v[/x].toml").stdout


# --- interruption -----------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "metis.cli.app", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def wait_for_updates(events: Path, updates: int) -> None:
    for _ in range(10_000):
        if events.exists() and events.read_text("utf-8").count("update_request") >= updates:
            return
        time.sleep(0.05)
    pytest.fail(f"{events} never had {updates} updates")


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_ctrl_c_keeps_the_run_and_resume_ends_in_the_same_bits(command: str) -> None:
    """Exit code 130 and how to go on; what was interrupted and resumed equals what was not."""
    long = ["one.toml", "--set", "stop.rounds=30"]
    process = start(command, *long, "--out", "cut")
    run = Path("cut") if command == "simulate" else Path("cut/semisync-lambda-1")
    wait_for_updates(run / "events.jsonl", 10)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert "interrupted; continue with: metis resume cut" in stderr
    assert "iterations" in stdout  # the costs so far
    assert "Traceback" not in stderr

    resumed = metis("resume", "cut", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert metis("simulate", *long, "--out", "whole").exit_code == 0
    assert Run.load(run).community_model.sha256() == Run.load("whole").community_model.sha256()
    if command == "simulate":
        assert refused("resume", "cut") == "error: cut contains a finished run; there is nothing to resume"


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_a_killed_process_leaves_no_lock() -> None:
    """While it lives its run is its own; killed, also with workers, it blocks nobody."""
    process = start("simulate", "one.toml", "--set", "stop.rounds=3000", "--workers", "2", "--out", "par")
    wait_for_updates(Path("par/events.jsonl"), 5)
    assert refused("simulate", "one.toml", "--out", "par") == f"error: par {BEING_WRITTEN}choose another --out"
    assert refused("resume", "par") == f"error: par {BEING_WRITTEN}stop it"
    process.kill()
    process.communicate(timeout=60)
    assert "contains an interrupted run" in refused("simulate", "one.toml", "--out", "par")
    assert metis("simulate", "one.toml", "--out", "par", "--force").exit_code == 0


# --- data, init, report, help -----------------------------------------------------------------


def test_init_writes_a_file_that_runs_as_it_is(workplace: Path) -> None:
    """The commented example is a whole experiment; it is not overwritten by accident."""
    result = metis("init", "first.toml")
    assert result.exit_code == 0 and "metis simulate first.toml" in result.stdout
    assert (workplace / "first.toml").read_text("utf-8").count("#") > 20
    assert refused("init", "first.toml") == (
        "error: first.toml exists; choose another name, or overwrite it with --force"
    )
    assert metis("init", "first.toml", "--force").exit_code == 0
    for options in ([], ["--site-policy"]):
        assert refused("init", "-", *options) == (
            "error: '-' is not a file: give the name of one to write, as in metis init first.toml"
        )
    assert not Path("-").exists()
    assert metis("simulate", "first.toml", "--set", "stop.seconds=12").exit_code == 0


@pytest.mark.parametrize(
    ("policy", "solver"),
    [*((policy, "vanilla") for policy in POLICIES), *(("semisync_fedavg", solver) for solver in SOLVERS)],
)
def test_init_writes_any_policy_and_solver_with_all_settings(policy: str, solver: str, workplace: Path) -> None:
    """The file loads as it is; its commented lines are the defaults, so that taking away a # changes nothing."""
    assert metis("init", "own.toml", "--policy", policy, "--solver", solver).exit_code == 0
    file = workplace / "own.toml"
    plain = load_config(file)
    assert (plain.policy[0].name, plain.policy[0].training.solver) == (policy, solver)
    head, chosen = file.read_text("utf-8").split("[training]")
    chosen, tail = chosen.split("[stop]")
    settings = [line for line in chosen.splitlines() if re.match(r"# \w+ = ", line)]
    assert len(settings) >= len(POLICIES[policy].__annotations__) - 1
    for line in settings:
        if line.startswith(
            ("# max_local_epochs", "# exchange", "# returning", "# update_requests_an_hour", "# bytes_an_hour")
        ):  # these have no default
            chosen = chosen.replace(line, f"#{line}")
    everything = re.sub(r"(?m)^# (?=\w+ = )", "", chosen)
    file.write_text(f"{head}[training]{everything}[stop]{tail}", encoding="utf-8")
    assert load_config(file).policy == plain.policy


def test_init_lists_what_a_file_can_name() -> None:
    """One line for each definition; an unknown name gets the nearest one."""
    listed = metis("init", "--list").stdout
    for name in ("semisync_fedavg", "compression", "fedprox", "small_cnn", "digits", "torch"):
        assert re.search(rf"(?m)^  {name}\b +\S", listed), name
    assert refused("init") == "error: give the name of a file, as in metis init first.toml, or --list"
    assert refused("init", "x.toml", "--policy", "fedasink") == (
        "error: there is no policy 'fedasink'; did you mean 'fedasync'?"
    )
    assert (
        refused("init", "x.toml", "--solver", "fedprx") == "error: there is no solver 'fedprx'; did you mean 'fedprox'?"
    )
    assert not Path("x.toml").exists()


def test_data_list_names_the_bundled_digits() -> None:
    """Every data set with its size and where it is."""
    rows: list[dict[str, Any]] = json.loads(metis("data", "list", "--json").stdout)
    digits = next(row for row in rows if row["name"] == "digits")
    assert (digits["train"], digits["test"], digits["classes"], digits["bundled"]) == (1437, 360, 10, True)
    assert "in the package" in metis("data", "list").stdout


def test_data_show_prints_and_draws_the_partition(workplace: Path) -> None:
    """Classes by learner; the picture is written where --out says."""
    result = metis("data", "show", "one.toml", "--out", "who.png")
    assert result.exit_code == 0, result.output
    assert "fast-1" in result.stdout and "slow-1" in result.stdout
    assert (workplace / "who.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(metis("data", "show", "one.toml", "--json").stdout)
    assert sum(map(sum, document["counts"])) == 200


def test_data_show_counts_a_regression_by_ranges_of_its_target(workplace: Path) -> None:
    """Eight ranges as columns, the same in JSON and in the picture."""
    tables = ("data={dataset='brain_phantoms', train_examples=60}", "partition.classes=target_ranges", "evaluation={}")
    changes = [word for table in tables for word in ("--set", table)]
    result = metis("data", "show", "one.toml", *changes, "--out", "p.svg", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert len(document["ranges"]) == 8 and len(document["edges"]) == 9
    assert [len(row) for row in document["counts"]] == [8, 8, 8]
    assert sum(map(sum, document["counts"])) == 60
    assert (workplace / "p.svg").exists()
    shown = metis("data", "show", "one.toml", *changes).stdout
    assert document["ranges"][0] in shown and "figure in" in shown


def test_a_file_may_begin_with_a_byte_order_mark(workplace: Path) -> None:
    """As some editors write it."""
    text = (workplace / "one.toml").read_text("utf-8")
    (workplace / "bom.toml").write_text(text, encoding="utf-8-sig")
    assert load_config(workplace / "bom.toml") == load_config(workplace / "one.toml")


def test_data_fetch_knows_what_is_there_and_what_is_not() -> None:
    """The bundled set needs no download; a name nobody knows is refused."""
    assert "digits is already there" in metis("data", "fetch", "digits").stdout
    assert refused("data", "fetch", "digitz").startswith("error: there is no data set 'digitz'; did you mean 'digits'?")


def test_report_is_made_again_from_the_directories(workplace: Path) -> None:
    """From one run, or from several into a folder of their own."""
    assert "report in a/report.html" in metis("simulate", "one.toml", "--out", "a", "--report").output
    (workplace / "a" / "report.html").unlink()
    assert metis("report", "a").exit_code == 0
    assert (workplace / "a" / "report.html").exists()
    metis("simulate", "one.toml", "--out", "b", "--set", "policy.slowest_learner_epochs=2")
    assert metis("report", "a", "b", "--out", "both").exit_code == 0
    assert (workplace / "both" / "report.html").exists()


def test_the_version_and_the_help_teach() -> None:
    """`--version` is one line; the help of a command shows how it is used."""
    assert metis("--version").stdout == f"metis {__version__}\n"
    for command in ("simulate", "compare", "resume", "init", "report"):
        result = metis(command, "--help")
        assert result.exit_code == 0
        assert f"metis {command}" in result.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["init", "x.toml"], ["data", "list"]], ids=" ".join)
def test_quick_commands_do_not_wait_for_torch(arguments: list[str]) -> None:
    """Neither torch nor matplotlib is imported to answer them."""
    program = (
        "import sys\nfrom metis.cli.app import main\n"
        f"sys.argv = ['metis', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'matplotlib', 'pandas')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_mistake_of_ours_is_one_line_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 and how to see the traceback; with --debug the exception itself."""

    def broken(*arguments: object) -> None:
        raise RuntimeError("the roof\nis on fire")

    monkeypatch.setattr("metis.reproduction.environments.load_experiment", broken)
    result = metis("simulate", "one.toml")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: unexpected RuntimeError: the roof is on fire; for the traceback, run: metis --debug"
    )
    assert isinstance(metis("--debug", "simulate", "one.toml").exception, RuntimeError)
