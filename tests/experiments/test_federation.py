"""The Python interface: what a script or a notebook may get wrong, and what it gets back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import metis
from metis.core.events import CommunityPublished
from metis.errors import ConfigError

RNG = np.random.default_rng(1990)
INPUTS = RNG.normal(size=(42, 4)).astype(np.float32)
LABELS = (INPUTS.sum(axis=1) > 0).astype(np.int64)


def federation(network: Any = lambda: nn.Linear(4, 2), **changes: Any) -> metis.Federation:
    """Two learners with 21 examples each, in batches of 20: the last batch of an epoch is one example."""
    halves = np.split(np.arange(42), 2)
    settings: dict[str, Any] = {
        "train": (INPUTS, LABELS),
        "test": (INPUTS, LABELS),
        "learners": [
            metis.SimulatedLearner(f"site-{k}", half, 20, metis.Speed(0.1 * (k + 1))) for k, half in enumerate(halves)
        ],
        "solver": metis.VanillaSGD(0.1),
    }
    return metis.Federation(network=network, **{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"policy": "fedrec"}, r"policy must be a Policy such as metis\.fedrec\(\), not 'fedrec'"),
        ({"policy": metis.fedrec}, "policy must be a Policy"),
        ({"stop": metis.StopRule(seconds=1)}, "either a StopRule or rounds"),
        ({"store": "dsk"}, "store is 'dsk'; allowed: memory, disk"),
        ({"evaluate_every": -1.0}, "evaluate_every must be 0 seconds or more, not -1"),
        ({"evaluate_every": math.nan}, "evaluate_every must be 0 seconds or more"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
        ({"rounds": 0}, "rounds is 0; it must be greater than 0"),
        ({"refusals_allowed": -5}, "refusals_allowed must be a whole number, 0 or more, not -5"),
        ({"workers": "2"}, "workers must be a whole number, 0 or more, not '2'"),
    ],
)
def test_a_wrong_argument_of_simulate_is_told_in_one_sentence(changes: dict[str, Any], sentence: str):
    """Nothing is ignored or guessed."""
    with pytest.raises(ConfigError, match=sentence):
        federation().simulate(**{"policy": metis.sync_fedavg(1), "rounds": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"metric": "f2"}, "metric is 'f2'; an evaluation measures loss, accuracy"),
        ({"metrics": ["f1"], "metric": "auc"}, "metric is 'auc'; an evaluation measures loss, f1"),
        ({"metrics": ["recal"]}, "there is no metric 'recal'; did you mean 'recall'"),
        ({"collate": 3}, "collate is 3; it must be a function that makes a batch of a list of items"),
        ({"seed": None}, "seed must be a whole number, 0 or more, not None"),
        ({"network": lambda: None}, "network must make a torch.nn.Module, not NoneType"),
        ({"learners": []}, "at least one learner"),
    ],
)
def test_a_wrong_federation_is_told_in_one_sentence(changes: dict[str, Any], sentence: str):
    """Before anything starts."""
    with pytest.raises(ConfigError, match=sentence):
        federation(**changes)


def test_power_in_two_units_is_refused():
    """Watts and epsilons cannot be added up."""
    learners = [
        metis.SimulatedLearner("a", np.arange(20), 20, metis.Speed(0.1), power=metis.Power(180, unit="watt")),
        metis.SimulatedLearner("b", np.arange(20, 42), 20, metis.Speed(0.1)),
    ]
    with pytest.raises(ConfigError, match="one unit"):
        federation(learners=learners)


def test_out_that_is_a_file_is_refused(tmp_path: Path):
    """And the file is left alone."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="which is a file"):
        federation().simulate(metis.sync_fedavg(1), rounds=1, out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_users_network_raises_names_the_learner(workers: int):
    """A label beyond the outputs of the network, say."""
    with pytest.raises(ConfigError, match=r"learner 'site-0' cannot train on its 21 examples in batches of 20: Index"):
        federation(train=(INPUTS, LABELS + 7), test=None).simulate(metis.sync_fedavg(1), rounds=1, workers=workers)


def test_what_the_users_network_raises_in_an_evaluation_is_told():
    """The test examples may be of another shape."""
    with pytest.raises(ConfigError, match="cannot be evaluated on the 42 test examples: RuntimeError"):
        federation(test=(INPUTS[:, :3], LABELS)).simulate(metis.sync_fedavg(1), rounds=1)


def test_a_last_batch_of_one_example_passes_batch_norm():
    """It is normalised by the running statistics, because one example has no variance."""
    run = federation(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))).simulate(
        metis.sync_fedavg(2), rounds=3
    )
    assert run.costs.steps == 3 * 2 * 2 * 2
    assert run.refused == []


def test_what_was_handed_in_is_mixed_when_all_learners_are_gone():
    """The run ends for lack of learners, but not without what they did."""
    gone = math.inf
    learners = [
        metis.SimulatedLearner(
            name, indices, 20, metis.Speed(speed), availability=metis.RecordedAvailability(((leaves, gone),))
        )
        for name, indices, speed, leaves in [("a", np.arange(21), 0.1, 2.0), ("b", np.arange(21, 42), 5.0, 3.0)]
    ]
    run = federation(learners=learners).simulate(metis.sync_fedavg(1), rounds=5)
    assert run.finish_reason == "no learner is left that could go on"
    assert [item.contributors for _, item in run.events if isinstance(item, CommunityPublished)] == [1]
    assert run.history[-1].version == 1


def test_a_run_draws_itself_however_it_was_imported(tmp_path: Path):
    """`from metis.runs.run import Run` is enough."""
    federation().simulate(metis.semisync_fedavg(1), rounds=2).plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_every_policy_starts_from_the_same_pretrained_weights() -> None:
    """A function that returns one module each time: the second policy does not start where the first one ended."""
    pretrained = nn.Linear(4, 2)
    shared = federation(lambda: pretrained)
    policies = (metis.sync_fedavg(1), metis.semisync_fedavg(1), metis.fedrec(1))
    starts = [shared.simulate(policy, rounds=3).metric_values[0] for policy in policies]
    assert starts[0] == starts[1] == starts[2]
    assert shared.initial_model.sha256() == federation(pretrained).initial_model.sha256()
