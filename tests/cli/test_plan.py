"""metis plan, probe and replay on the bundled digits: what they print, write and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from metis.cli.app import app
from metis.core.costs import CostLedger
from metis.core.events import CommunityPublished
from metis.experiments.build import build_federation, build_stop
from metis.experiments.compose import build_policy
from metis.experiments.config.load import load_config
from metis.planning.outlook import make_outlook, network_bytes
from metis.planning.timings import read_timings
from metis.runs.run import Run

FILE = """
[data]
train_examples = 300
test_examples = 60

[partition]
sizes = "power_law"

[[learners]]
name = "fast"
count = 2
batch_size = 10
time_per_batch = 0.03
watts = 180
idle_watts = 60
network = {{latency = 0.02, upload_mbps = 2, download_mbps = 8}}

[[learners]]
name = "slow"
count = 2
batch_size = 10
time_per_batch = 0.3
watts = 90

[network]
name = "logistic"

{policies}

[stop]
{stop}
"""
SEMI = '[policy]\nname = "semisync_fedavg"\nslowest_learner_epochs = 2'
SYNC = '[policy]\nname = "sync_fedavg"\nlocal_epochs = 2'
SITE = Path(__file__).parents[2] / "examples" / "site"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "semi.toml").write_text(FILE.format(policies=SEMI, stop="rounds = 4"), encoding="utf-8")
    (tmp_path / "sync.toml").write_text(FILE.format(policies=SYNC, stop="seconds = 40"), encoding="utf-8")
    return tmp_path


def metis(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def document(*arguments: str) -> dict[str, Any]:
    result = metis(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: str) -> str:
    result = metis(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split()).removeprefix("error: ")


def simulated(file: str = "semi.toml", out: str = "run", *changes: str) -> Run:
    """What `metis simulate` leaves, without the figures."""
    config = load_config(file, changes)
    policy = build_policy(config.policy[0])
    run = build_federation(config).simulate(policy, build_stop(config), out=out, evaluate_every=1e9)
    Path(out, "config.toml").write_text(config.to_toml(), encoding="utf-8")
    return run


# --- plan ---------------------------------------------------------------------------------------------


def test_a_plan_says_what_a_real_run_then_does(workplace: Path) -> None:
    """Planned from the file alone, then trained: B_k, the length of a round, requests, bytes, energy in watt hours."""
    plan = document("plan", "semi.toml", "--lambda", "1")
    run = simulated()

    planned = next(row for row in plan["policies"] if row["slowest_learner_epochs"] == 2)
    assert plan["model_bytes"] == run.setting.model_bytes
    tasks = {}
    versions = []
    for at, item in run.events:
        match type(item).__name__:
            case "SendTask":
                tasks[item.learner] = item.task.budget.steps  # type: ignore[union-attr]
            case "CommunityPublished":
                versions.append(at)
    assert {row["learner"]: row["steps"] for row in planned["learners"]} == tasks
    assert planned["round_seconds"] == pytest.approx(versions[-1] - versions[-2])
    assert planned["first_round_seconds"] == pytest.approx(versions[0])
    assert planned["update_requests_per_hour"] == pytest.approx(4 * 3600 / (versions[-1] - versions[-2]))
    assert planned["bytes_per_hour"] == pytest.approx(planned["update_requests_per_hour"] * 2 * plan["model_bytes"])
    assert plan["energy_unit"] == "watt hour"
    assert planned["energy_per_hour"]["equation"] == pytest.approx(2 * 180 + 2 * 90)


@pytest.mark.parametrize("policy", ["sync_fedavg", "fedbuff", "fedrec"])
def test_the_bytes_of_masked_sums_are_those_of_a_simulated_run(policy: str, workplace: Path) -> None:
    """Of the same file: words of 32 or 64 bits, keys, votes and shares, and models that are handed in again."""
    text = FILE.format(
        policies=f'[policy]\nname = "{policy}"\nlocal_epochs = 1\n[policy.secure_sum]', stop="rounds = 40"
    )
    (workplace / "masked.toml").write_text(text.replace("power_law", "uniform"), encoding="utf-8")
    planned = document("plan", "masked.toml", "--policy", policy)["policies"][0]
    run = simulated("masked.toml")
    ledger = CostLedger({}, run.setting.model_bytes, False, run.setting.update_bytes)
    costs = []
    for at, item in run.events:
        ledger.record(at, item)
        if isinstance(item, CommunityPublished):
            costs.append(ledger.costs(at))
    start, end = costs[19], costs[39]
    assert end.bytes_exchanged == run.costs.bytes_exchanged
    hours = (end.parallel_time - start.parallel_time) / 3600
    assert planned["bytes_per_hour"] * hours == pytest.approx(end.bytes_exchanged - start.bytes_exchanged, rel=1e-6)


def test_a_plan_is_a_table_of_at_most_a_hundred_columns() -> None:
    """All kinds of policies, each learner, the sensible range and warnings in words, and what it does not tell."""
    result = metis("plan", "semi.toml")
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert max(map(len, lines)) <= 100
    text = " ".join(result.stdout.split())
    for words in (
        "Sync 4 epochs", "SemiSync λ=0.5", "SemiSync λ=4", "Async 4 epochs", "B_k: batches between two mixings",
        "Local epochs between two mixings", "Idle share of the time", "Sensible λ:", "Wh", "fast-1", "slow-2",
        "warning: Under Sync 4 epochs", "Accuracy is not predicted",
    ):  # fmt: skip
        assert words in text, words


def test_a_plan_keeps_the_files_settings() -> None:
    """Its local epochs, its limits; what it has not is as in the paper."""
    plan = document("plan", "sync.toml", "--set", "policy.round_limit=5")
    labels = [row["label"] for row in plan["policies"]]
    assert labels == [
        "Sync 2 epochs",
        *(f"SemiSync λ={value}" for value in ("0.5", "1", "2", "3", "4")),
        "Async 4 epochs",
    ]
    assert plan["policies"][0]["round_seconds"] == pytest.approx(5.1, abs=0.2)


def test_a_plan_of_an_experiment_of_the_paper() -> None:
    """Its file has tables of its own, for `metis reproduce`; the plan is that of the paper's scale."""
    file = SITE.parent.parent / "experiments" / "cifar10-heterogeneous-uniform-iid.toml"
    result = metis("plan", str(file), "--policy", "semisync_fedavg", "--lambda", "2", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["model_bytes"] == 4 * 1_068_298
    (policy,) = plan["policies"]
    assert [learner["steps"] for learner in policy["learners"]] == [1000, 100] * 5


def test_a_plan_of_chosen_policies() -> None:
    """By the file's label, by a name that Metis knows, with lambdas of one's own."""
    plan = document("plan", "semi.toml", "--policy", "fedrec", "--policy", "semisync_fedavg", "--lambda", "0.7,1.4")
    assert [row["label"] for row in plan["policies"]] == [
        "SemiSync λ=0.7",
        "SemiSync λ=1.4",
        "SemiSync λ=2",
        "Async 4 epochs",
    ]
    assert document("plan", "semi.toml", "--policy", "fedrec")["lambda"] is None


def test_a_plan_of_many_learners_stays_readable() -> None:
    """Learners that are alike share a row; of many different ones the first and the last are shown."""
    many = ("--set", "data.train_examples=1000", "--set", "learners.0.count=60", "--set", "learners.1.count=60")
    result = metis("plan", "semi.toml", "--lambda", "1", *many, "--set", "partition.sizes=skewed")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) < 120
    assert "alike" in result.stdout


def test_what_a_plan_leaves_out_is_said() -> None:
    """Jitter, drift and absences are in the file, not in a plan of constant speeds."""
    changes = (
        "learners.0.jitter=0.2",
        "learners.1.drift=[[5, 2.0]]",
        "learners.1.availability={kind='random', mean_present=5, mean_away=1}",
    )
    notes = " ".join(
        document("plan", "semi.toml", *(part for change in changes for part in ("--set", change)))["notes"]
    )
    assert "fast: jitter is ignored" in notes
    assert "slow: drift is ignored" in notes
    assert "slow: absences are ignored" in notes


def test_a_plan_says_what_of_a_policy_it_does_not_forecast(workplace: Path) -> None:
    """Periods that are no fixed number of epochs; a cap and compressed updates are, and no lambda is too large."""
    plain = document("plan", "semi.toml")
    assert "adapt" not in " ".join(plain["notes"])
    assert plain["lambda"]["highest"] > 0
    compressed = document("plan", "semi.toml", "--set", "policy.compression={kind='int8'}")
    one, other = (
        next(row for row in found["policies"] if row["slowest_learner_epochs"] == 2) for found in (plain, compressed)
    )
    assert one["bytes_per_hour"] / one["update_requests_per_hour"] == pytest.approx(2 * plain["model_bytes"])
    exchange = other["bytes_per_hour"] / other["update_requests_per_hour"]
    assert plain["model_bytes"] < exchange < 1.5 * plain["model_bytes"]
    adaptive = FILE.format(policies='[policy]\nname = "semisync_fedavg"\nadaptive = {}', stop="rounds = 4")
    (workplace / "paced.toml").write_text(adaptive, encoding="utf-8")
    paced = document("plan", "paced.toml")
    assert "Periods that adapt or follow a schedule are not forecast" in " ".join(paced["notes"])
    cap = ("--set", "policy.max_local_epochs=5")
    assert document("plan", "semi.toml", *cap)["lambda"]["highest"] is None
    small = ("--set", "policy.slowest_learner_epochs=0.001", "--lambda", "0.001")
    assert "Sensible λ: none of these; from" in metis("plan", "semi.toml", *cap, *small).stdout
    assert "Sensible λ: 2, 4000. Below" in metis("plan", "semi.toml", *cap, "--lambda", "4000").stdout


def test_a_plan_is_written_down(workplace: Path) -> None:
    """As text for people and as JSON for programs."""
    assert metis("plan", "semi.toml", "--out", "plan").exit_code == 0
    written = json.loads((workplace / "plan" / "plan.json").read_text("utf-8"))
    assert written == document("plan", "semi.toml")
    text = (workplace / "plan" / "plan.txt").read_text("utf-8")
    assert "Sensible λ" in text and "\x1b" not in text


def test_the_arithmetic_needs_no_torch(workplace: Path) -> None:
    """With the size of the model known from a run, nothing of the tensor library is loaded."""
    simulated()
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from metis.experiments.config.load import load_config\nfrom metis.planning.outlook import make_outlook\n"
        "from metis.planning.timings import read_timings\nfrom metis.reporting.planning import plan_view\n"
        "from metis.planning.counterfactual import compare_policies, load_recording, policies_named\n"
        "outlook = make_outlook(load_config('semi.toml'), 'semi.toml', timings=read_timings([Path('run')]))\n"
        "plan_view(outlook.to_json())\nrecording = load_recording(Path('run'))\n"
        "compare_policies(recording, policies_named(recording, 'fedrec', []))\n"
        "print('torch' in sys.modules)"
    )
    source = str(Path(sys.modules["metis"].__file__ or "").parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("semi.toml", "--lambda", "1,two"),
            "--lambda is '1,two'; it must be a comma-separated list of numbers, as in 0.5,1,2",
        ),
        (("semi.toml", "--lambda", "0"), "--lambda is '0'; every number must be finite and greater than 0"),
        (
            ("semi.toml", "--policy", "fedrek"),
            "there is no policy 'fedrek' in semi.toml or in Metis; did you mean 'fedrec'?",
        ),
        (
            ("semi.toml", "--policy", "fedrec", "--lambda", "1"),
            "--lambda needs a semi-synchronous policy, and none is asked for",
        ),
        (("none.toml",), "there is no file none.toml; write an example with: metis init none.toml"),
        (("semi.toml", "--timings", "nowhere"), "there is no file or directory nowhere to read timings from"),
        (("semi.toml", "--timings", "semi.toml"), "semi.toml is not a file that metis probe --json printed"),
        (("semi.toml", "--out", "semi.toml"), "--out is semi.toml, which is a file; choose a directory"),
    ],
)
def test_a_plan_refuses_with_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    """What was wrong, and what is allowed."""
    assert refused("plan", *arguments) == sentence


# --- timings --------------------------------------------------------------------------------------------


def test_timings_of_a_run_take_the_place_of_the_files(workplace: Path) -> None:
    """A run's measured times, examples and exchanges give the plan that its own file gives."""
    simulated()
    from_file = document("plan", "semi.toml")
    # The file is wrong by a factor; the run knows better.
    wrong = ("--set", "learners.0.time_per_batch=3", "--set", "learners.0.network={latency=9}")
    from_run = document("plan", "semi.toml", *wrong, "--timings", "run")

    for file_row, run_row in zip(from_file["learners"], from_run["learners"], strict=True):
        assert run_row["timing"] == "4 updates in run"
        for key in ("name", "examples", "batch_size"):
            assert run_row[key] == file_row[key]
        for key in ("time_per_batch", "exchange_seconds"):
            assert run_row[key] == pytest.approx(file_row[key], abs=1e-9)
    for file_row, run_row in zip(from_file["policies"], from_run["policies"], strict=True):
        assert [row["steps"] for row in run_row["learners"]] == [row["steps"] for row in file_row["learners"]]
        assert run_row["update_requests_per_hour"] == pytest.approx(file_row["update_requests_per_hour"])


def test_a_state_folder_holds_its_run(workplace: Path) -> None:
    """DIR/run is found by DIR."""
    simulated(out="state/run")
    assert len(read_timings([workplace / "state"]).learners) == 4


def test_timings_of_some_learners_are_mixed_with_the_file(workplace: Path) -> None:
    """A learner without timings has those of the file, timings of unknown learners are ignored, and notes say so."""
    simulated()
    changes = ("--set", "learners.1.name=other", "--set", "learners.1.time_per_batch=0.4")
    plan = document("plan", "semi.toml", *changes, "--timings", "run")
    assert [row["time_per_batch"] for row in plan["learners"]] == pytest.approx([0.03, 0.4, 0.03, 0.4])
    notes = " ".join(plan["notes"])
    assert "There are no timings of other-1 and other-2; those of the file are used." in notes
    assert "The timings of slow-1 and slow-2 are ignored: the file has no such learner." in notes
    strangers = ("--set", "learners.0.name=a", "--set", "learners.1.name=b")
    assert "but the learners of the file are a-1" in refused("plan", "semi.toml", *strangers, "--timings", "run")


def test_a_folder_without_timings_is_refused(workplace: Path) -> None:
    """Neither a run nor probes; a run in which nobody handed anything in."""
    (workplace / "empty").mkdir()
    assert refused("plan", "semi.toml", "--timings", "empty").startswith("empty has no timings: it must be the")
    (workplace / "empty" / "events.jsonl").write_text("", encoding="utf-8")
    assert refused("plan", "semi.toml", "--timings", "empty") == (
        "empty has no timings: no learner sent an update in that run"
    )


# --- probe ----------------------------------------------------------------------------------------------


def test_a_probe_of_the_digits(workplace: Path) -> None:
    """The learner's own examples, the network's size, a time, and a snippet that the file takes as it is."""
    found = document("probe", "semi.toml", "--name", "fast-2", "--batches", "5")
    outlook = make_outlook(load_config("semi.toml"), "semi.toml")
    member = next(member for member in outlook.learners if member.name == "fast-2")
    assert (found["examples"], found["batches_per_epoch"]) == (member.examples, member.batches)
    assert (found["batch_size"], found["batches"], found["parameters"]) == (10, 5, 650)
    assert found["model_bytes"] == outlook.model_bytes == 4 * 650
    assert 0 < found["fastest"] <= found["time_per_batch"] <= found["slowest"]

    result = metis("probe", "semi.toml", "--learner", "fast-2", "--batches", "3")
    assert result.exit_code == 0, result.output
    _, _, snippet = result.stdout.partition("for the experiment's file:")
    (workplace / "pasted.toml").write_text(f"{snippet}\n{SEMI}\n[stop]\nrounds = 1\n", encoding="utf-8")
    assert load_config("pasted.toml").learners[0].learner_names == ["fast-2"]


def test_probes_of_sites_make_a_plan(workplace: Path) -> None:
    """Each site probes itself and sends what it printed; the plan needs no site's data."""
    probes = workplace / "probes"
    probes.mkdir()
    for name in ("north", "east", "south", "west"):
        found = document(
            "probe", "--site", str(SITE / "site.py"), "--name", name, "--batch-size", "16", "--batches", "2"
        )
        assert (found["batch_size"], found["learner"]) == (16, name)
        (probes / f"{name}.json").write_text(json.dumps({**found, "time_per_batch": 0.5}), encoding="utf-8")
    plan = document("plan", str(SITE / "federation.toml"), "--timings", str(probes))
    assert {row["name"] for row in plan["learners"]} == {"north", "east", "south", "west"}
    assert {(row["batch_size"], row["time_per_batch"]) for row in plan["learners"]} == {(16, 0.5)}

    other = json.loads((probes / "north.json").read_text("utf-8"))
    (probes / "north.json").write_text(json.dumps({**other, "model_bytes": 1}), encoding="utf-8")
    assert "networks of different sizes" in refused("plan", str(SITE / "federation.toml"), "--timings", str(probes))
    (probes / "north.json").write_text(json.dumps({**other, "time_per_batch": 0}), encoding="utf-8")
    assert "must be greater than 0" in refused("plan", str(SITE / "federation.toml"), "--timings", str(probes))


def test_a_site_file_alone_can_be_probed(workplace: Path) -> None:
    """Before there is an experiment, and a name; the answer names whose data is needed."""
    (workplace / "site.py").write_text(
        "import numpy as np\nfrom torch import nn\n\n\n"
        "def network():\n    return nn.Linear(3, 2)\n\n\n"
        "def training_data(site):\n    assert site == 'site'\n"
        "    return np.ones((8, 3), np.float32), np.zeros(8, np.int64)\n"
    )
    result = metis("probe", "--site", "site.py", "--batches", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["learner"] == "site"
    assert result.stderr == "note: using the data that site.py has for 'site'; choose another learner with --name\n"
    assert refused("probe", "--site", "no.py").startswith("no.py: site.file: there is no file ")


def test_a_probe_with_the_experiments_file_and_its_site(workplace: Path) -> None:
    """The batch size is the experiment's, unless another is asked for."""
    file = str(SITE / "federation.toml")
    assert document("probe", file, "--name", "north", "--batches", "2")["batch_size"] == 20
    assert document("probe", file, "--name", "north", "--batches", "2", "--batch-size", "7")["batch_size"] == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give a FILE, or a site file with --site"),
        (("semi.toml",), "give the name of the learner that runs on this machine: --name NAME"),
        (("semi.toml", "--name", "fats-1"), "the experiment has no learner 'fats-1'; did you mean 'fast-1'?"),
    ],
)
def test_a_probe_refuses_with_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    """What was wrong, and what is allowed."""
    assert refused("probe", *arguments) == sentence


def test_a_probe_tells_what_is_wrong_in_a_site_file(workplace: Path) -> None:
    """A network that does not fit its data, with the shape that torch names."""
    (workplace / "site.py").write_text(
        "import numpy as np\nfrom torch import nn\n"
        "def network(): return nn.Linear(3, 2)\n"
        "def training_data(site): return np.zeros((10, 4), 'float32'), np.zeros(10, 'int64')\n",
        encoding="utf-8",
    )
    text = refused("probe", "--site", "site.py", "--name", "a")
    assert text.startswith("learner 'a' cannot train on its 10 examples in batches of 32: ")


# --- the network's size -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "example", ["demo.toml", "deployment.toml", "site/federation.toml", "cifar10_heterogeneous.toml"]
)
def test_the_size_of_a_model_is_known_without_the_data(example: str) -> None:
    """As many bytes as the engine's own model, also where the data set is not on this machine."""
    config = load_config(SITE.parent / example)
    size = network_bytes(config, example)
    assert size > 1000
    if example != "cifar10_heterogeneous.toml":
        assert size == build_federation(config).initial_model.nbytes


# --- replay -----------------------------------------------------------------------------------------------


def test_the_recorded_policy_gives_the_recorded_bill(workplace: Path) -> None:
    """All costs are those of the run, and the sequence is reported to be the same."""
    run = simulated("sync.toml")
    replayed = document("replay", "run")
    assert replayed["recorded_course_reproduced"] is True
    assert {**replayed["what_if"][0]} == replayed["recorded"]
    assert replayed["recorded"]["update_requests"] == run.costs.update_requests
    assert replayed["recorded"]["energy"]["active"] == pytest.approx(run.costs.energy.active / 3600)
    assert replayed["accuracy"] == "not predicted"


def test_a_replay_says_that_another_compression_is_left_out(workplace: Path) -> None:
    simulated("semi.toml", "run", "policy.compression={kind='int8'}")
    replayed, as_it_was = document("replay", "run", "compression={kind='top_k'}"), document("replay", "run")
    assert any(note.startswith("A different compression is ignored") for note in replayed["notes"])
    assert as_it_was["notes"] == []
    assert replayed["what_if"][0]["bytes_exchanged"] == as_it_was["recorded"]["bytes_exchanged"]


def test_a_course_with_normalised_averaging_is_known_again(workplace: Path) -> None:
    """Its momentum is that of the solver, of which a replay knows nothing."""
    changes = ("policy.nova={}", "training.solver=momentum", "training.momentum=0.5")
    simulated("semi.toml", "run", *changes)
    assert document("replay", "run")["recorded_course_reproduced"] is True


def test_a_replay_of_another_policy_is_a_simulation_of_it(workplace: Path) -> None:
    """Recorded synchronously, asked for semi-synchronous and asynchronous: the costs of direct runs."""
    simulated("sync.toml")
    for name, change in (("semisync_fedavg", "slowest_learner_epochs=1.5"), ("fedrec", "local_epochs=2")):
        replayed = document("replay", "run", "--policy", name, change)["what_if"][0]
        direct = simulated("sync.toml", name, f"policy={{name='{name}', {change}}}")
        assert replayed["rounds"] == direct.rounds
        assert replayed["update_requests"] == direct.costs.update_requests
        assert replayed["steps"] == direct.costs.steps
        assert replayed["bytes_exchanged"] == direct.costs.bytes_exchanged
        for key in ("equation", "active", "idle_charged"):
            assert replayed["energy"][key] * 3600 == pytest.approx(getattr(direct.costs.energy, key))


def test_a_replay_prints_the_comparison_and_what_it_is_not(workplace: Path) -> None:
    """Recorded first, then every policy of a file; it says that accuracy is not predicted."""
    simulated("sync.toml")
    (workplace / "others.toml").write_text(
        '[[policy]]\nname = "fedrec"\n'
        '[[policy]]\nname = "semisync_fedavg"\nlabel = "Half"\nslowest_learner_epochs = 0.5\n',
        encoding="utf-8",
    )
    result = metis("replay", "run", "--policy", "others.toml", "--out", "what-if")
    assert result.exit_code == 0, result.output
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 100
    for words in ("recorded", "what if", "FedRec", "Half", "Accuracy is not predicted", "slow-2"):
        assert words in result.stdout
    held = sorted(path.name for path in (workplace / "what-if").iterdir())
    assert held == ["events-1.jsonl", "events-2.jsonl", "replay.json", "replay.txt"]


def test_a_run_that_has_not_ended_can_be_replayed(workplace: Path) -> None:
    """Without its summary the size of a model is not known, the rest is."""
    simulated("sync.toml")
    (workplace / "run" / "summary.json").unlink()
    replayed = document("replay", "run", "--policy", "fedrec")
    assert replayed["recorded"]["bytes_exchanged"] is None
    assert replayed["recorded"]["energy"]["active"] > 0
    (workplace / "run" / "config.toml").unlink()
    assert "has neither config.toml nor summary.json" in refused("replay", "run", "--policy", "fedrec")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere",), "there is no directory nowhere; give the directory of a run, or a controller's state folder"),
        (("run", "--policy", "fedrek"), "there is no policy and no file 'fedrek'; did you mean 'fedrec'?"),
        (
            ("run", "local_epochs"),
            "'local_epochs' is not a parameter of a policy; write KEY=VALUE, as in local_epochs=4",
        ),
        (
            ("run", "--policy", "fedrec", "lambda=2"),
            "lambda: unknown key; choose one of local_epochs, rebuild_every, name, label, training, schedule, "
            "adaptive, cap, ckks, compression, differences, nova, late, messages, pace, probe, proximal, rate, robust, "
            "sample, secure_sum, server, share, shortest_period",
        ),
        (("run", "--policy", "none.toml"), "there is no file none.toml; write an example with: metis init none.toml"),
    ],
)
def test_a_replay_refuses_with_a_sentence(workplace: Path, arguments: tuple[str, ...], sentence: str) -> None:
    """What was wrong, and what is allowed."""
    simulated("sync.toml")
    assert refused("replay", *arguments) == sentence


def test_a_folder_that_is_no_run_is_not_replayed(workplace: Path) -> None:
    """Empty, a comparison, damaged, or without a task."""
    folder = workplace / "folder"
    folder.mkdir()
    assert refused("replay", "folder") == "folder has no events.jsonl: it is not the directory of a run"
    (folder / "comparison.json").write_text("{}", encoding="utf-8")
    assert refused("replay", "folder").endswith("it is a comparison: give one of its runs")
    (folder / "events.jsonl").write_text("{}\n", encoding="utf-8")
    assert "line 1 is not an event of a run" in refused("replay", "folder")
    (folder / "events.jsonl").write_text("", encoding="utf-8")
    assert refused("replay", "folder") == "folder cannot be replayed: no task was sent in that run"


# --- the documentation ------------------------------------------------------------------------------------


def test_the_documentation_shows_what_is_printed() -> None:
    """Every line of the plan in docs/plan.md is a line of the real one."""
    page = (SITE.parent.parent / "docs" / "plan.md").read_text("utf-8")
    shown = page.split("```text")[1].split("```")[0].strip().splitlines()
    result = metis("plan", str(SITE.parent / "cifar10_heterogeneous.toml"))
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert [line for line in shown if line not in printed] == []
