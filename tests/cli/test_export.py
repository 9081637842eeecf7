"""`metis export`: the community model for other tools, each written file read back by the tool that it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import metis
from metis.cli.app import app
from metis.reporting.card import privacy_sentences

FILE = """
[data]
dataset = "digits"

[network]
name = "mlp"
hidden = [16]

[[learners]]
name = "fast"
count = 2
batch_size = 40
time_per_batch = 0.02

[[learners]]
name = "slow"
batch_size = 40
time_per_batch = 0.2

[training]
learning_rate = 0.1

[policy]
name = "semisync_fedavg"
slowest_learner_epochs = 1

[stop]
rounds = 3
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "first.toml").write_text(FILE, "utf-8")
    done = CliRunner().invoke(app, ["simulate", str(folder / "first.toml"), "--out", str(folder / "run")])
    assert done.exit_code == 0, done.output
    return folder / "run"


def exported(run: Path, out: Path, to: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["export", str(run), "--to", to, "--out", str(out), *options])


def inputs_and_outputs(run: Path) -> tuple[Any, Any]:
    """Some digits, and what the trained network makes of them."""
    import torch

    from metis.experiments.build import build_federation
    from metis.experiments.config.load import load_config

    federation = build_federation(load_config(run / "config.toml"))
    engine: Any = federation.engine
    x, _ = federation.test.batch(np.arange(7))  # type: ignore[union-attr]
    with torch.inference_mode():
        return x.numpy(), engine.load(metis.Run.load(run).community_model)(x).numpy()


def test_the_layout_of_hugging_face(run: Path, tmp_path: Path) -> None:
    """The weights under the network's own names, and a card that says what they are."""
    from safetensors.numpy import load_file

    done = exported(run, tmp_path / "hub", "huggingface")
    assert done.exit_code == 0, done.output
    loaded, model = load_file(tmp_path / "hub" / "model.safetensors"), metis.Run.load(run).community_model
    assert {name: array.tolist() for name, array in loaded.items()} == {
        name: array.tolist() for name, array in model.tensors().items()
    }
    assert set(json.loads((tmp_path / "hub" / "config.json").read_text("utf-8"))["tensors"]) == set(loaded)
    card = (tmp_path / "hub" / "README.md").read_text("utf-8")
    finished = metis.Run.load(run)
    for words in (
        "| sites | 3 |", "| policy | SemiSync (λ=1) |", "| rounds | 3 |", "Simulated", "Differential privacy: none.",
        f"| bytes exchanged | {finished.costs.bytes_exchanged:,} |", model.sha256(), "model-index:",
    ):  # fmt: skip
        assert words in card


def test_onnx_gives_the_same_outputs(run: Path, tmp_path: Path) -> None:
    """For any number of examples."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    done = exported(run, tmp_path / "onnx", "onnx", "--best")
    assert done.exit_code == 0 and "differ by at most" in done.output, done.output
    done = exported(run, tmp_path / "onnx", "onnx", "--force")
    assert done.exit_code == 0, done.output
    inputs, outputs = inputs_and_outputs(run)
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"input": inputs})[0], outputs, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of MLflow's own modules
def test_mlflow_has_a_signature(run: Path, tmp_path: Path) -> None:
    """And refuses inputs of another shape by it."""
    for package in ("mlflow", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    done = exported(run, tmp_path / "model", "mlflow")
    assert done.exit_code == 0, done.output
    import mlflow

    loaded = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    inputs, outputs = inputs_and_outputs(run)
    np.testing.assert_allclose(loaded.predict({"input": inputs})["output"], outputs, atol=1e-5)
    with pytest.raises(mlflow.exceptions.MlflowException):
        loaded.predict({"input": inputs[:, :, :4]})
    assert loaded.metadata.metadata["sites"] == 3 and (tmp_path / "model" / "README.md").is_file()


SITE = """
import numpy as np
from torch import nn


def network():
    return nn.Linear(4, 2)


def training_data(site):
    rng = np.random.default_rng(len(site))
    x = rng.normal(size=(40, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)
"""


def test_a_site_files_network_and_a_controllers_folder(tmp_path: Path) -> None:
    """A state folder has its run in `run`; the network comes from the site file."""
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    (tmp_path / "site.py").write_text(SITE, "utf-8")
    file = FILE.partition("[data]")[0] + '[site]\nfile = "site.py"\n\n[[learners]]' + FILE.partition("[[learners]]")[2]
    (tmp_path / "federation.toml").write_text(file, "utf-8")
    state = tmp_path / "state"
    state.mkdir()
    (state / "controller.db").write_bytes(b"")  # what a controller keeps besides the run
    done = exported(state, tmp_path / "out", "onnx")
    assert done.exit_code == 2 and "has not ended" in done.output
    done = CliRunner().invoke(app, ["simulate", str(tmp_path / "federation.toml"), "--out", str(state / "run")])
    assert done.exit_code == 0, done.output
    done = exported(state, tmp_path / "out", "onnx")
    assert done.exit_code == 0 and (tmp_path / "out" / "model.onnx").is_file(), done.output
    (tmp_path / "site.py").unlink()
    done = exported(state, tmp_path / "other", "onnx")
    assert done.exit_code == 2 and "there is no file" in done.output and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--to", "onnx", "--site", "no.py"], "there is no site file no.py"),
        (["--to", "onnx"], "exists already; give --force"),
        (["--to", "keras"], "'keras'"),
    ],
)
def test_what_is_wrong_is_one_sentence(run: Path, tmp_path: Path, options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path), *options])
    assert done.exit_code == 2 and sentence in " ".join(done.output.split()), done.output
    assert "Traceback" not in done.output


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_force_replaces_an_earlier_export_only(run: Path, tmp_path: Path) -> None:
    """Not a run, its folder or one around it, not a folder of the user's; nothing of them is lost."""
    whole = files(run.parent)
    for out, words in (
        (run, "has a run in it"),
        (run.parent, "has a run in it"),
        (run / "models", "is inside"),
        (run / "models" / "onnx", "is inside"),
    ):
        done = exported(run, out, "huggingface", "--force")
        assert done.exit_code == 2 and words in done.output, done.output
        assert files(run.parent) == whole
    (tmp_path / "mine").mkdir()
    for name, text in (("README.md", "my own model"), ("thesis.tex", "mine")):
        (tmp_path / "mine" / name).write_text(text, "utf-8")
        done = exported(run, tmp_path / "mine", "huggingface", "--force")
        assert done.exit_code == 2 and f"contains {name}, which no export of Metis wrote" in done.output.replace(
            "\n", " "
        )
        assert (tmp_path / "mine" / name).read_text("utf-8") == text
    (tmp_path / "file").write_text("mine", "utf-8")
    done = exported(run, tmp_path / "file", "huggingface", "--force")
    assert done.exit_code == 2 and "is a file" in done.output and "Traceback" not in done.output


def no_room_for_the_new(path: Path, target: Path) -> Path:
    """`Path.rename`, which fails where the new export should take the place of the earlier one."""
    if path.name == "model":
        raise OSError("no room")
    return path.replace(target)


def test_an_export_replaces_the_earlier_one_and_a_failing_one_does_not(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the folder of the run, where it is written by default."""
    for place in (["--out", str(tmp_path / "hub")], []):
        made = tmp_path / "hub" if place else run / "huggingface"
        command = ["export", str(run), "--to", "huggingface", *place]
        for more in ([], ["--force", "--name", "second"]):
            done = CliRunner().invoke(app, [*command, *more])
            assert done.exit_code == 0, done.output
        assert "second" in (made / "README.md").read_text("utf-8")
        (made / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier export")
        before = files(made)
        with monkeypatch.context() as patch:
            patch.setattr("metis.reporting.card.model_card", lambda *arguments: 1 / 0)
            assert CliRunner().invoke(app, [*command, "--force"]).exit_code != 0
        assert files(made) == before
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", no_room_for_the_new)
            assert CliRunner().invoke(app, [*command, "--force"]).exit_code != 0
        assert files(made) == before and not list(made.parent.glob(".export-*"))
        assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0
        assert set(files(made)) == {"README.md", "config.json", "model.safetensors"}


def test_the_card_says_what_protected_the_sites() -> None:
    """From the run's own configuration, in sentences."""
    private = {"noise": 1.1, "clip": 1.0, "budget": 8.0, "delta": 1e-5}
    groups = [{"name": "hospitals", "privacy": private}, {"name": "others"}]
    said = privacy_sentences({"learners": groups, "policy": [{"name": "sync_fedavg", "secure_sum": {"members": 3}}]})
    assert any("at most epsilon 8 at delta 1e-05" in sentence for sentence in said)
    assert "Differential privacy: none at the other sites." in said
    assert any(sentence.startswith("Secure sums: the controller saw sums") for sentence in said)
    assert "the controller saw the model of each site" in privacy_sentences({"policy": [{"name": "fedrec"}]})[-1]
    encrypted = privacy_sentences({"policy": [{"name": "fedrec", "ckks": {}}]})
    assert encrypted[-1].startswith("Homomorphic encryption (CKKS)") and not any("none;" in line for line in encrypted)
    assert "Not known" in privacy_sentences(None)[0]
