"""SemiSync without parameters learns with what it claims to go with; what it does not go with is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import metis
from metis.core.layers import HomomorphicEncryption, Layer
from metis.errors import ArgumentError
from simulation.federations import EXAMPLES, blobs, lively, network

RATE = metis.Schedule(1, 0.5, 20)
WITH: dict[str, tuple[list[Layer], dict[str, Any]]] = {
    "nothing else": ([], {}),
    "int8": ([metis.Compression("int8")], {}),
    "top_k": ([metis.Compression("top_k", share=0.2)], {}),
    "SCAFFOLD": ([], {"solver": metis.Scaffold(0.05, 0.5)}),
    "a schedule": ([metis.ScheduledRate(RATE)], {}),
    "a cap": ([metis.Cap(1.0)], {}),
    "a sample": ([metis.Sample(learners=3)], {}),
    "averaged statistics of BatchNorm": ([], {"buffers": "average"}),
    "AdamW": ([], {"solver": metis.AdamW(0.01)}),
    "mixed precision": ([], {"precision": "bf16"}),
    "a budget of messages": ([metis.MessageBudget(an_hour=3600)], {}),
    "masked sums": ([metis.SecureSum()], {"learners": "reliable", "buffers": "average"}),
    "masked sums and SCAFFOLD": (
        [metis.SecureSum()],
        {"learners": "reliable", "buffers": "average", "solver": metis.Scaffold(0.05, 0.5)},
    ),
}


def reliable() -> list[metis.SimulatedLearner]:
    """Four whose speeds differ by ten: masked rounds count nothing that comes late."""
    own = [np.arange(k, EXAMPLES, 4) for k in range(4)]
    return [metis.SimulatedLearner(f"site-{k}", own[k], 5, metis.Speed(0.02 if k % 2 else 0.2)) for k in range(4)]


def simulated(name: str) -> metis.Run:
    layers, changes = WITH[name]
    inputs, targets = blobs()
    settings = {"test": (inputs, targets), "solver": metis.MomentumSGD(0.05, 0.5), **changes}
    if settings.pop("learners", None):
        settings["learners"] = reliable()
    return lively(**settings).simulate(metis.semisync().with_layers(*layers), seconds=6.0, evaluate_every=6.0)


@pytest.mark.parametrize("name", WITH)
def test_semisync_learns_with(name: str) -> None:
    """Better than the first model by far, and the same bits once more."""
    run = simulated(name)
    assert run.history[-1].metrics["accuracy"] > 0.7 > run.history[0].metrics["accuracy"] + 0.2
    assert np.isfinite(run.community_model.vector).all()
    assert all(each.update_requests for each in run.costs.by_learner.values())
    assert simulated(name).community_model.sha256() == run.community_model.sha256()


@pytest.mark.parametrize("layer", [metis.FedNova(), metis.Median(), HomomorphicEncryption(), metis.AdaptivePeriod()])
def test_semisync_refuses_by_name(layer: Layer) -> None:
    with pytest.raises(ArgumentError, match=rf"^{layer.key} .*"):
        metis.semisync().with_layers(layer)


def test_a_network_with_batchnorm_is_what_is_tested_here() -> None:
    assert any("BatchNorm" in type(part).__name__ for part in network().modules())
