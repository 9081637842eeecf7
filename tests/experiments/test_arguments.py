"""What a user gives from Python: wrong values are refused in one sentence, before anything starts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metis
from metis.errors import MetisError

X = np.random.default_rng(3).normal(size=(20, 3)).astype(np.float32)
Y = np.arange(20) % 2


def learner(**changes: Any) -> metis.SimulatedLearner:
    return metis.SimulatedLearner(
        **{"name": "site", "indices": np.arange(20), "batch_size": 5, "speed": metis.Speed(0.1), **changes}
    )


def federation(**changes: Any) -> metis.Federation:
    given = {
        "network": lambda: nn.Linear(3, 2),
        "train": (X, Y),
        "test": (X, Y),
        "learners": [learner()],
        "solver": metis.VanillaSGD(0.1),
    }
    return metis.Federation(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"solver": "AdamW"}, "solver is 'AdamW'; it must be a solver such as metis.AdamW(learning_rate=0.001)"),
        ({"solver": torch.optim.AdamW}, "solver is the class AdamW; it must be"),
        ({"solver": torch.optim.AdamW([nn.Parameter(torch.ones(1))])}, "solver is of the type AdamW; it must be"),
        ({"learners": 4}, "learners is 4; it must be a list of metis.SimulatedLearner"),
        ({"learners": ["oslo", "lyon"]}, "learners is ['oslo', 'lyon']; it must be a list of metis.SimulatedLearner"),
        ({"learners": []}, "a federation needs at least one learner"),
        ({"learners": [learner(speed=0.02)]}, "the speed of learner 'site' is 0.02; it must be a metis.Speed"),
        ({"loss": "cross_entropy"}, "loss is 'cross_entropy'; it must be a function of (outputs, targets)"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; give an object of it: CrossEntropyLoss()"),
        ({"step": 3}, "step is 3; it must be a function of (module, batch)"),
    ],
)
def test_a_wrong_argument_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MetisError) as raised:
        federation(**changes)
    assert str(raised.value).startswith(sentence) and "\n" not in str(raised.value)


def test_the_solver_of_a_run_is_checked_too() -> None:
    with pytest.raises(MetisError, match=r"^solver is 'sgd'; it must be a solver"):
        federation().simulate(metis.sync_fedavg(1), rounds=1, solver="sgd")  # type: ignore[arg-type]


def test_a_target_is_a_share_where_the_metric_is_one() -> None:
    """As in a file; a function of the user's may be in per cent, and an error is in its own unit."""
    policy = metis.sync_fedavg(1)
    with pytest.raises(MetisError, match=r"^target is 90, but accuracy lies between 0 and 1$"):
        federation().simulate(policy, rounds=1, target=90)
    stop = metis.StopRule(rounds=1, target=metis.Target("f1", 90))
    with pytest.raises(MetisError, match=r"^target is 90, but f1 lies between 0 and 1$"):
        federation(metrics=["f1"]).simulate(policy, stop)
    in_per_cent = federation(metrics={"accuracy": lambda outputs, targets: 100.0})
    assert in_per_cent.simulate(policy, rounds=1, target=90).costs_at_target is not None
    years = {"network": lambda: nn.Linear(3, 1), "train": (X, X[:, 0]), "test": (X, X[:, 0])}
    assert federation(task="regression", **years).simulate(policy, rounds=1, target=90).costs_at_target is not None


def test_a_run_counts_in_good_english() -> None:
    run = federation().simulate(metis.sync_fedavg(0.25), rounds=1)
    assert "after 1 round, 0.1 s parallel time, 1 update request, 1 step>" in repr(run)
