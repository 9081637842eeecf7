"""Where a federation starts from: files of torch, safetensors and Hugging Face, state dicts, modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import metis
from metis.core.model import Model
from metis.errors import ConfigError, DataError
from metis.experiments.start import started_from
from metis.learning import TorchEngine


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def pretrained() -> nn.Module:
    torch.manual_seed(77)
    return network()


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pretrained().state_dict().items()}


def _shards(folder: Path) -> Path:
    """A folder as `save_pretrained(..., max_shard_size=...)` writes it."""
    whole = tensors()
    names = sorted(whole)
    parts = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, own in parts.items():
        save_file({name: whole[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def _safe(path: Path, **changes: torch.Tensor) -> Path:
    save_file(tensors() | changes, path)
    return path


SOURCES: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda folder: _safe(folder / "x.safetensors"),
    "state dict on disk": lambda folder: _saved(folder / "x.pt", tensors()),
    "checkpoint of a script": lambda folder: _saved(folder / "x.pth", {"epoch": 3, "state_dict": tensors()}),
    "DataParallel": lambda folder: _saved(folder / "x.bin", {f"module.{n}": t for n, t in tensors().items()}),
    "folder": lambda folder: _safe(folder / "model.safetensors").parent,
    "folder of torch": lambda folder: _saved(folder / "pytorch_model.bin", tensors()).parent,
    "shards": _shards,
    "path as text": lambda folder: str(_safe(folder / "x.safetensors")),
    "state dict": lambda folder: tensors(),
    "module": lambda folder: pretrained(),
}


def federation(**options: Any) -> metis.Federation:
    x, y = np.eye(3, dtype=np.float32).repeat(8, 0), np.arange(24) % 2
    learners = [metis.SimulatedLearner("a", np.arange(24), 8, metis.Speed(0.1))]
    given: dict[str, Any] = {"network": network, "solver": metis.VanillaSGD(0.1), **options}
    return metis.Federation(train=(x, y), test=(x, y), learners=learners, **given)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_start(source: str, tmp_path: Path) -> None:
    """That of `network=module`; runs from it have the same bits."""
    wanted = federation(network=pretrained()).simulate(metis.sync_fedavg(1), rounds=2)
    made = federation(initial_model=SOURCES[source](tmp_path))
    assert made.initial_model.sha256() == federation(network=pretrained()).initial_model.sha256()
    assert made.simulate(metis.sync_fedavg(1), rounds=2).community_model.sha256() == wanted.community_model.sha256()


def test_weights_of_16_bits_are_taken(tmp_path: Path) -> None:
    """As large language models are published; what they hold is exact in float32."""
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors().items()}
    save_file(half, tmp_path / "x.safetensors")
    made = federation(initial_model=tmp_path / "x.safetensors").initial_model
    assert np.array_equal(made.tensors()["0.weight"], half["0.weight"].float().numpy())


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the file was executed')",)


def _index(folder: Path, content: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def _text(path: Path) -> Path:
    path.write_text("not weights", encoding="utf-8")
    return path


def _archive(path: Path) -> Path:
    path.write_bytes(b"PK\x03\x04 and no more")
    return path


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (lambda folder: folder / "no.pt", "there is no file .*no.pt"),
    "code in a pickle": (lambda f: _saved(f / "x.pt", {"a": _Evil()}), "more than tensors, and is not loaded"),
    "a whole module": (lambda f: _saved(f / "x.pt", nn.Linear(2, 2)), "more than tensors.*state dict alone"),
    "not a pickle": (lambda f: _text(f / "x.pt"), "x.pt is not a model: neither of torch.save"),
    "a damaged archive": (lambda f: _archive(f / "x.pt"), "x.pt cannot be read as a state dict of torch: "),
    "not safetensors": (lambda f: _text(f / "x.safetensors"), "cannot be read as a safetensors file"),
    "a list": (lambda f: _saved(f / "x.pt", [torch.zeros(2)]), "is not a state dict: it has a list"),
    "a number inside": (lambda f: _saved(f / "x.pt", {"lr": 0.1}), "'lr' is a float, not a tensor"),
    "an empty folder": (lambda folder: folder, "has no weights: none of model.safetensors"),
    "an index without a map": (lambda f: _index(f, {"files": []}), "it has no weight_map"),
    "a shard elsewhere": (lambda f: _index(f, {"weight_map": {"a": "../x"}}), "names the shard '../x'"),
    "a missing tensor": (lambda f: {n: t for n, t in tensors().items() if n != "2.bias"}, "it has no tensor '2.bias'"),
    "an extra tensor": (lambda f: tensors() | {"head": torch.zeros(1)}, "it has a tensor 'head', which the network"),
    "another shape": (lambda f: tensors() | {"2.bias": torch.zeros(3)}, r"tensor '2.bias' is \[3\] of float32, the"),
    "NaN": (lambda f: tensors() | {"2.bias": torch.tensor([1.0, torch.nan])}, "numbers that are not finite"),
    "a number": (lambda folder: 7, "initial_model is 7; it must be a file, a folder, a state dict or a torch module"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_one_sentence(case: str, tmp_path: Path) -> None:
    """Nothing in a file is executed."""
    make, words = WRONG[case]
    with pytest.raises((DataError, ConfigError), match=words) as refusal:
        federation(initial_model=make(tmp_path))
    assert "\n" not in str(refusal.value)


def test_what_a_layer_adds_is_kept() -> None:
    """Control variates lie behind the network and are not in any file."""
    engine = federation().engine
    model = engine.initial_model(0)
    longer = Model(
        model.layout.with_controls(4), np.arange(model.layout.with_controls(4).size, dtype=np.float32), model.counters
    )
    found = started_from(tensors(), longer)
    size = model.layout.size
    assert np.array_equal(found.vector[size:], longer.vector[size:])
    assert not np.array_equal(found.vector[:size], longer.vector[:size])


def test_the_frozen_part_has_a_digest() -> None:
    """Of every number in it and of no other; without a frozen part it is empty."""
    frozen = {"frozen": ["0.*"]}
    made = TorchEngine(pretrained(), parameters=frozen)
    changed = pretrained()
    with torch.no_grad():
        changed[2].weight.add_(1)  # type: ignore[union-attr,operator]
    assert made.frozen_sha256 == TorchEngine(changed, parameters=frozen).frozen_sha256 != ""
    with torch.no_grad():
        changed[0].weight[0, 0] += 1  # type: ignore[index,operator]
    assert made.frozen_sha256 != TorchEngine(changed, parameters=frozen).frozen_sha256
    assert TorchEngine(network).frozen_sha256 == ""


def test_adapters_of_peft_travel_and_nothing_else() -> None:
    """LoRA on a small network by the package peft: bytes are those of the adapters, the base never changes."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    made = federation(network=lambda: adapted, parameters={"federated": ["*lora_*"]})
    adapters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    assert made.initial_model.nbytes == 4 * adapters == 4 * 2 * (3 + 16 + 16 + 2)
    before = made.engine.frozen_sha256  # type: ignore[attr-defined]
    run = made.simulate(metis.sync_fedavg(2), rounds=3)
    assert run.community_model.sha256() != made.initial_model.sha256()
    assert before == TorchEngine(adapted, parameters={"federated": ["*lora_*"]}).frozen_sha256 != ""


@pytest.mark.parametrize("kind", ["local", "frozen"])
def test_a_start_fills_the_parts_that_are_not_sent(kind: str, tmp_path: Path) -> None:
    """A whole file may be given where some of it is local or frozen: the run is that of the whole network."""
    source = _safe(tmp_path / "x.safetensors")
    parts = {"parameters": {kind: ["0.*"]}}
    by_file, by_module = federation(initial_model=source, **parts), federation(network=pretrained, **parts)
    assert by_file.engine.frozen_sha256 == by_module.engine.frozen_sha256  # type: ignore[attr-defined]
    runs = [made.simulate(metis.sync_fedavg(2), rounds=2, workers=workers) for made, workers in (
        (by_file, 0), (by_file, 1), (by_module, 0)
    )]  # fmt: skip
    assert len({run.community_model.sha256() for run in runs}) == 1
    assert len({tuple(run.metric_values) for run in runs}) == 1
    wrong = _safe(tmp_path / "wrong.safetensors", **{"0.weight": torch.zeros(4, 9)})
    with pytest.raises(DataError, match=r"its tensor '0.weight' is \[4, 9\], the network's \[4, 3\]"):
        federation(initial_model=wrong, **parts)
