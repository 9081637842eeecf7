"""The scripts in examples/bring: each is short, runs as it is, and shows what it says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

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


def test_only_the_adapters_of_lora_travel() -> None:
    names = ran("lora.py")
    run = names["run"]
    assert run.setting.model_bytes == 4 * names["adapters"] < 4 * names["whole"] / 10
    assert run.final_metric > run.metric_values[0] + 0.1


def test_a_pretrained_network_starts_every_policy_alike() -> None:
    names = ran("pretrained.py")
    assert len(names["shas"]) == 1
    assert len(set(names["starts"])) == 1
    assert names["starts"][0] > 0.6
