"""`Federation.from_dataset`, and what federations and runs say about themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

import metis
from metis.errors import ConfigError
from metis.experiments.build import build_federation
from metis.experiments.config.load import resolve_config
from metis.reporting.console import errors

SMALL: dict[str, Any] = {"learners": 4, "train_examples": 200, "test_examples": 60}


def test_a_federation_from_a_name_is_that_of_a_file() -> None:
    """The same division, network and learners, so the same bits."""
    made = metis.Federation.from_dataset("digits", sizes="power_law", speeds=[0.03, 0.3], **SMALL)
    content = {
        "data": {"train_examples": 200, "test_examples": 60},
        "partition": {"sizes": "power_law"},
        "learners": [
            {"name": "fast", "names": ["site-1", "site-3"], "batch_size": 20, "time_per_batch": 0.03},
            {"name": "slow", "names": ["site-2", "site-4"], "batch_size": 20, "time_per_batch": 0.3},
        ],
        "policy": {"name": "sync_fedavg"},
        "stop": {"rounds": 1},
    }
    filed = build_federation(resolve_config(content, "f.toml"), solver=metis.MomentumSGD(0.05, 0.75))
    assert [(one.name, one.indices.tolist(), one.speed) for one in made.learners] == [
        (one.name, one.indices.tolist(), one.speed) for one in filed.learners
    ]
    policy = metis.semisync_fedavg(1)
    first, second = (federation.simulate(policy, rounds=2).community_model for federation in (made, filed))
    assert first.sha256() == second.sha256()


def test_another_seed_divides_again() -> None:
    """The division, the initial model and all else come from the seed."""
    made = metis.Federation.from_dataset("digits", **SMALL)
    other = made.with_seed(7)
    assert other.learners[0].indices.tolist() != made.learners[0].indices.tolist()
    assert other.with_seed(made.seed).learners[0].indices.tolist() == made.learners[0].indices.tolist()
    assert other.initial_model.sha256() != made.initial_model.sha256()


def test_a_network_is_a_name_or_a_function() -> None:
    """Both are trained; sizes may be a list."""
    for network in ("logistic", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))):
        made = metis.Federation.from_dataset("digits", sizes=[120, 80], network=network, train_examples=200)
        assert made.initial_model.layout.size == 650
        assert [len(learner.indices) for learner in made.learners] == [120, 80]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "digit"}, "data.dataset: there is no data set 'digit'; did you mean 'digits'?"),
        ({"speeds": []}, "speeds is []; give the seconds that a batch takes, as in [0.03, 0.3]"),
        ({"learners": 2, "speeds": [1, 2, 3]}, "speeds has 3 entries, but there are 2 learners"),
        ({"speeds": "fast"}, "speeds is 'fast'; give the seconds that a batch takes, as in [0.03, 0.3]"),
        ({"solver": "AdamW"}, "solver is 'AdamW'; it must be a solver such as metis.AdamW("),
        ({"learners": 0}, "learners is 0; it must be a whole number, 1 or more"),
        ({"sizes": "powerlaw"}, "partition.sizes: "),
        ({"classes": "dirichlet"}, "partition.alpha: missing; classes = 'dirichlet' needs it"),
        ({"network": 3}, "network is 3; give a name, or a function that makes a torch module"),
        ({"network": "mpl"}, "network.name: there is no network 'mpl'; did you mean 'mlp'?"),
        ({"classes": "class_dirichlet", "alpha": 1.0, "sizes": "zipf"}, "the sizes follow from alpha"),
        ({"network": nn.Identity, "network_options": {"a": 1}}, "network_options are for a network by name"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    """It names the argument, or the key that a file would have."""
    given: dict[str, Any] = {"dataset": "digits", **SMALL, **arguments}
    with pytest.raises(ConfigError) as raised:
        metis.Federation.from_dataset(given.pop("dataset"), **given)
    assert message in str(raised.value) and not str(raised.value).startswith(":") and "\n" not in str(raised.value)


def test_a_federation_describes_itself() -> None:
    """How many learners hold how much, how fast they are, and what is measured."""
    made = metis.Federation.from_dataset("digits", sizes=[120, 80], speeds=[0.03, 0.3], train_examples=200)
    assert repr(made) == (
        "<Federation of 2 learners on digits, each with 80 to 120 examples and 0.03 to 0.3 s a batch; "
        "360 test examples, accuracy; MomentumSGD, seed 1990>"
    )


def test_a_run_in_which_nothing_was_mixed_says_so() -> None:
    """Every update is refused because its numbers are not finite: the metric is that of the initial model."""
    made = metis.Federation.from_dataset("digits", **SMALL)
    run = made.simulate(metis.sync_fedavg(1), rounds=3, solver=metis.VanillaSGD(1e38))
    assert run.rounds == 0
    assert "nothing was mixed" in repr(run) and "updates refused, the first because learner 'site-1'" in repr(run)
    assert "the initial model has accuracy" in repr(run)
    assert any("nothing was mixed" in line for line in errors(run))


def test_a_run_that_diverged_says_so() -> None:
    """The community model is finite, but its loss is not."""
    made = metis.Federation.from_dataset("digits", batch_size=50, **SMALL)  # one step, after which nothing is computed
    run = made.simulate(metis.sync_fedavg(1), rounds=1, solver=metis.VanillaSGD(1e35))
    assert run.rounds == 1 and run.diverged
    assert "DIVERGED" in repr(run) and any("diverged" in line for line in errors(run))


def test_an_undefined_metric_is_not_called_a_divergence() -> None:
    """The AUC of test examples of one class is not a number, however well the network was trained."""
    x = np.zeros((40, 3), np.float32)
    made = metis.Federation(
        network=lambda: nn.Linear(3, 2),
        train=(x, np.arange(40) % 2),
        test=(x, np.zeros(40, np.int64)),
        metrics=["auc"],
        learners=[metis.SimulatedLearner("a", np.arange(40), 10, metis.Speed(0.1))],
        solver=metis.VanillaSGD(0.1),
    )
    run = made.simulate(metis.sync_fedavg(1), rounds=1)
    assert run.undefined and not run.diverged
    assert "auc is undefined on these test examples" in repr(run)
    assert any("auc is not a number although the loss is" in line for line in errors(run))


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the command that installs it."""
    run = metis.Federation.from_dataset("digits", **SMALL).simulate(metis.sync_fedavg(1), rounds=1)
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    for table in (run.to_pandas, run.learners_to_pandas, metis.Comparison([run]).to_pandas):
        with pytest.raises(ConfigError, match=r"needs the package pandas.*\.\[tables\]"):
            table()
