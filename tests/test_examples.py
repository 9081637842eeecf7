"""The scripts in examples/bring: each is short, runs as it is, and shows what it says."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from metis.errors import ConfigError
from metis.experiments.build import build_federation, build_policies, build_stop
from metis.experiments.config.load import load_config
from metis.reporting.findings import findings

REHEARSAL = Path(__file__).parent.parent / "examples" / "rehearsal.toml"
FOLDER = Path(__file__).parent.parent / "examples" / "bring"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))


def ran(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / name), run_name="__main__")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_at_most_60_lines(name: str) -> None:
    assert len((FOLDER / name).read_text("utf-8").splitlines()) <= 60


def test_every_script_is_run_here() -> None:
    assert set(SCRIPTS) == {
        "fedbn.py", "imbalanced_auc.py", "lora.py", "personal_heads.py", "pretrained.py", "text_classifier.py",
        "unet_dice.py",
    }  # fmt: skip


def test_a_transformer_learns_from_padded_texts() -> None:
    assert ran("text_classifier.py")["run"].final_metric > 0.8


def test_a_unet_finds_discs() -> None:
    run = ran("unet_dice.py")["run"]
    assert run.final_metric > 0.7
    assert run.metric_values[0] < 0.4


def test_the_auc_is_scikit_learns_on_pooled_predictions() -> None:
    names = ran("imbalanced_auc.py")
    assert names["run"].final_metric == pytest.approx(names["by_hand"], abs=1e-9)
    assert names["run"].final_metric > 0.9


def test_own_normalisation_is_better_where_scanners_differ() -> None:
    names = ran("fedbn.py")
    assert names["fedbn"].final_metric > names["averaged"].final_metric + 0.1


def test_own_heads_are_better_where_sites_disagree() -> None:
    names = ran("personal_heads.py")
    assert names["personal"].final_metric > 0.9
    assert names["shared"].final_metric < 0.7
    assert names["ditto"].final_metric > 0.85
    assert names["apfl"].final_metric > 0.85


def test_only_the_adapters_of_lora_travel() -> None:
    pytest.importorskip("peft")
    names = ran("lora.py")
    run = names["run"]
    assert run.setting.model_bytes == 4 * names["adapters"] < 4 * names["whole"] / 10
    assert run.final_metric > run.metric_values[0] + 0.1


def test_a_pretrained_network_starts_every_policy_alike() -> None:
    names = ran("pretrained.py")
    assert len(names["shas"]) == 1
    assert len(set(names["starts"])) == 1
    assert names["starts"][0] > 0.6


def test_a_rehearsal_of_faults_runs_and_reports_them(tmp_path: Path) -> None:
    """Half a day of the example: sites leave, transfers are cut, the controller restarts, and all of it is counted."""
    config = load_config(REHEARSAL, ["stop.seconds=150", "evaluation.every_seconds=50"])
    federation = build_federation(config)
    runs = [federation.simulate(policy, build_stop(config), solver=solver) for policy, solver in build_policies(config)]
    for run in runs:
        assert run.rounds > 5
        assert run.faults["departures"] > 3 and run.faults["cuts"] > 0 and run.faults["resent_bytes"] > 0
        assert not [at for at, _ in run.events if 120 < at < 128]  # the controller is down
    sentences = findings(runs, [run.policy for run in runs])
    assert sum("transfers were cut" in sentence for sentence in sentences) == len(runs)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("faults={stall_every = 5}", "faults.stall_seconds: missing; stall_every needs it"),
        ("faults.restart_seconds=5", "faults.restart_every: missing; restart_seconds needs it"),
        ("faults.restarts=[[5, 2], [6, 1]]", "faults.restarts: must be in order of time"),
        ("learners.0.network={cut_every = 3}", "network.cut_seconds: missing; cut_every needs it"),
        (
            "learners.1.availability={kind = 'daily', opens = 8}",
            "availability.closes: missing; kind = 'daily' needs it",
        ),
        ("learners.1.availability={kind = 'daily', opens = 8, closes = 8}", "is the same hour as opens"),
        ("learners.1.availability={kind = 'daily', opens = 8, closes = 25}", "closes"),
        ("learners.1.availability.mean_away=3", "mean_away: is given, but kind = 'daily' does not use it"),
    ],
)
def test_faults_that_are_not_described_right(wrong: str, sentence: str) -> None:
    """One sentence that names the key."""
    restarts = [] if "restarts" in wrong or "{" in wrong else ["faults.restarts=[]"]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_config(REHEARSAL, [*restarts, wrong])


def test_restarts_are_drawn_or_listed() -> None:
    with pytest.raises(ConfigError, match="is given together with restart_every"):
        load_config(REHEARSAL, ["faults.restart_every=5", "faults.restart_seconds=5"])


@pytest.mark.skipif(not os.environ.get("METIS_DATA"), reason="needs heart_disease.csv in METIS_DATA")
def test_flambys_pooled_figure_is_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Seed 42: the published accuracies of its centres give a mean of 0.739."""
    if not (Path(os.environ["METIS_DATA"]) / "heart_disease.csv").is_file():
        pytest.skip("heart_disease.csv is not in METIS_DATA")
    names = runpy.run_path(str(FOLDER.parent / "flamby.py"))
    found = names["main"]("heart_disease", seeds=[42, 43], rounds=1)
    assert found["Pooled"] == [pytest.approx(0.7367, abs=0.005), pytest.approx(0.735, abs=0.005)]
    assert "published 0.735" in capsys.readouterr().out
