"""Mixed precision: 16 bits in the forward pass only, chosen by the user, refused where it cannot be."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from metis.core.solvers import VanillaSGD
from metis.errors import ConfigError
from metis.learning import TorchEngine, as_examples
from metis.learning.torch import precision
from metis.learning.torch.precision import Precision
from metis.planning.probe import Probe
from simulation.federations import lively

RNG = np.random.default_rng(2)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int64)
CPU = torch.device("cpu")


class Seen(nn.Module):
    """Remembers in which dtype it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Any) -> Any:
        outputs = self.layer(x)
        self.dtypes.add(outputs.dtype)
        return outputs


def test_training_is_in_16_bits_weights_and_evaluations_in_32() -> None:
    """The result is near that of float32 and not the same."""
    data = [as_examples((X, Y)).batch(np.arange(64))] * 20
    models = {}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        engine = TorchEngine(Seen, precision=name)
        models[name] = engine.train(engine.initial_model(0), data, VanillaSGD(0.1)).model
        module: Any = engine.module
        assert module.dtypes == {dtype}
        assert module.layer.weight.dtype == module.layer.weight.grad.dtype == torch.float32
        module.dtypes.clear()
        assert engine.evaluate(models[name], as_examples((X, Y)))["accuracy"] > 0.8
        assert module.dtypes == {torch.float32}
    assert models["bf16"].sha256() != models["float32"].sha256()
    assert models["bf16"].vector == pytest.approx(models["float32"].vector, abs=0.01)


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bf16"), (False, "float32")])
def test_auto_is_bf16_where_the_hardware_has_it(fast: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "fast_bf16", lambda device: fast)
    assert TorchEngine(Seen, precision="auto").precision == chosen
    assert TorchEngine(Seen, precision="auto", dtype="float64").precision == "float32"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "bf61"}, "precision is 'bf61'; allowed: float32, tf32, bf16, fp16, auto"),
        ({"precision": "tf32"}, "precision is 'tf32', which needs a GPU, but device is 'cpu'; bf16 does not"),
        ({"precision": "fp16"}, "precision is 'fp16', which needs a GPU, but device is 'cpu'; bf16 does not"),
        ({"precision": "bf16", "dtype": "float64"}, "precision is 'bf16', but dtype is torch.float64; weights must be"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TorchEngine(Seen, **options)


def test_a_scale_that_is_too_large_leaves_a_step_out_and_is_halved() -> None:
    """Loss scaling, whose arithmetic needs no GPU: an infinite gradient makes no step, later ones are as they were."""
    scaled = Precision("float32", CPU, torch.float32)
    scaled.name = "fp16"
    scaled.start()
    weight = torch.nn.Parameter(torch.tensor([3e38]))
    scaled.backward((weight * 1e34).sum())
    assert weight.grad is not None
    assert not scaled.restore(weight.grad)
    weight.grad = None
    scaled.backward((weight * 0.5).sum())
    assert weight.grad is not None and float(weight.grad) == 0.5 * 2**15
    assert scaled.restore(weight.grad)
    assert float(weight.grad) == 0.5


@pytest.mark.parametrize(
    ("bf16", "advice"),
    [(0.05, 'bf16 is 2.0 times as fast .* training.precision = "bf16" pays'), (0.2, "bf16 is not faster .* keep")],
)
def test_a_probe_recommends_what_it_measured(bf16: float, advice: str) -> None:
    probe = Probe("site", 10, 5, 2, 0.1, 0.1, 0.1, 20, 7, 28, "cpu", {"float32": 0.1, "bf16": bf16})
    assert re.search(advice, probe.advice)
    assert probe.to_json()["advice"] == probe.advice


def test_tf32_is_on_while_it_computes_and_as_it_was_afterwards() -> None:
    """torch has this setting for the whole process; the code that sets it needs no GPU."""
    precise = Precision("float32", CPU, torch.float32)
    precise.name = "tf32"
    before = torch.backends.cuda.matmul.allow_tf32
    with precise.lowered():
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 is before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_warned_of(dtype: str) -> None:
    with pytest.warns(UserWarning, match=f"dtype is '{dtype}': weights of 16 bits .* lose most steps of training"):
        lively(dtype=dtype)
