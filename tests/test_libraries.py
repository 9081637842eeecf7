"""The site files in examples/libraries: each with the real library, on data made on the spot."""

from __future__ import annotations

from pathlib import Path

import pytest

from metis.experiments.build import build_federation, build_policies
from metis.experiments.config.load import load_config

FOLDER = Path(__file__).parents[1] / "examples" / "libraries"
FILE = """
[site]
file = "{file}"

[[learners]]
name = "fast"
batch_size = 8
time_per_batch = 0.05

[[learners]]
name = "slow"
batch_size = 8
time_per_batch = 0.1

[training]
solver = "adamw"
learning_rate = {rate}
{more}

[policy]
name = "semisync_fedavg"
slowest_learner_epochs = 1

[stop]
rounds = 8
"""
ADAPTERS = 'parameters = {federated = ["*lora_*", "*classifier*"]}'
CASES = {
    "lightning": (("pytorch_lightning",), 0.02, "", 0.85),
    "huggingface": (("transformers", "accelerate"), 0.01, "", 0.7),
    "peft": (("transformers", "accelerate", "peft"), 0.005, ADAPTERS, 0.0),
    "monai": (("monai",), 0.02, "", 0.8),
}


def test_every_site_file_is_run_here() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == {f"{name}_site.py" for name in CASES}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", CASES)
def test_a_site_file_of_a_library_learns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, rate, more, enough = CASES[name]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(FOLDER)  # one site file imports its neighbour
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "federation.toml"
    file.write_text(FILE.format(file=FOLDER / f"{name}_site.py", rate=rate, more=more), "utf-8")
    config = load_config(file)
    ((policy, solver),) = build_policies(config)
    federation = build_federation(config, solver=solver)
    run = federation.simulate(policy, rounds=8)
    assert run.best_metric is not None and run.best_metric > enough
    assert federation.test is not None
    models = federation.engine.initial_model(config.seed), run.community_model
    before, after = (federation.engine.evaluate(model, federation.test)["loss"] for model in models)
    assert after < before
    if name == "peft":
        sent = [spec.name for spec in run.community_model.layout.tensors]
        assert sent and all("lora_" in tensor or "classifier" in tensor for tensor in sent)
