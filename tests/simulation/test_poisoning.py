"""Rehearsed attacks: each does what its name says, and only at the learners that have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import metis
from metis.core.layers import Outgoing, Work
from metis.core.model import Layout, Model, TensorSpec
from metis.core.solvers import VanillaSGD
from metis.errors import ArgumentError, ConfigError
from metis.experiments.build import build_federation, build_policy
from metis.experiments.config.load import load_config
from metis.learning import ArrayExamples
from metis.simulation.poisoning import ATTACKS, Poison

LAYOUT = Layout((TensorSpec("w", (4,)),))


def model(*numbers: float) -> Model:
    return Model(LAYOUT, np.array(numbers, np.float32))


def sent(poison: Poison) -> np.ndarray:
    """What leaves a learner that went from 1 to (2, 0, 3, 1)."""
    work = Work(model(1, 1, 1, 1), VanillaSGD(0.1), {})
    return poison.encode(Outgoing(model(2, 0, 3, 1), {}), work, work).model.vector


def test_each_attack_does_what_it_says() -> None:
    delta = np.array([1, -1, 2, 0], np.float32)
    assert sent(Poison("sign_flip")) == pytest.approx(1 - delta)
    assert sent(Poison("sign_flip", 3.0)) == pytest.approx(1 - 3 * delta)
    assert sent(Poison("scale")) == pytest.approx(1 + 100 * delta)
    assert sent(Poison("label_flip")) == pytest.approx(1 + delta)
    shift = sent(Poison("collusion")) - (1 + delta)
    assert np.abs(shift) == pytest.approx(np.full(4, 1.5 * np.sqrt(6 / 4)))
    assert (shift == sent(Poison("collusion")) - (1 + delta)).all(), "all that collude push the same way"
    with pytest.raises(ArgumentError, match="attack of poison is 'theft'"):
        Poison("theft")  # type: ignore[arg-type]


def test_a_label_flip_mirrors_the_targets() -> None:
    examples = ArrayExamples(np.zeros((3, 2), np.float32), np.array([0, 1, 4]))
    taught = Poison("label_flip").taught(examples, np.array([0, 1, 2]))
    assert len(taught) == 3
    assert np.asarray(taught.batch(np.array([2, 0]))[1]).tolist() == [0, 4]
    assert Poison("scale").taught(examples, np.array([0])) is examples


FILE = """
seed = 3
[data]
dataset = "digits"
[[learners]]
name = "honest"
count = 4
batch_size = 50
time_per_batch = 0.1
[[learners]]
name = "attacker"
batch_size = 50
time_per_batch = 0.1
POISON
[training]
solver = "vanilla"
learning_rate = 0.1
[[policy]]
name = "sync_fedavg"
local_epochs = 1
ROBUST
[stop]
rounds = 3
"""


def accuracy(folder: Path, poison: str, robust: str) -> float:
    path = folder / "first.toml"
    path.write_text(FILE.replace("POISON", poison).replace("ROBUST", robust))
    config = load_config(path, [])
    return build_federation(config).simulate(build_policy(config.policy[0]), rounds=3).history[-1].metrics["accuracy"]


def test_a_file_rehearses_an_attack_and_its_defence(tmp_path: Path) -> None:
    """One of five sends a delta a hundred times too long the other way: the average is lost, the median is not."""
    poison = 'poison = { attack = "sign_flip", strength = 100 }'
    clean = accuracy(tmp_path, "", "")
    assert accuracy(tmp_path, poison, "") < clean - 0.2
    assert accuracy(tmp_path, poison, 'robust = { rule = "median" }') > clean - 0.15
    for wrong, why in (('poison = { attack = "theft" }', "theft"), ('robust = { rule = "mean" }', "mean")):
        with pytest.raises(ConfigError, match=why):
            accuracy(tmp_path, wrong if "poison" in wrong else "", wrong if "robust" in wrong else "")


def test_a_run_goes_on_with_the_same_attack_only(tmp_path: Path) -> None:
    """What a checkpoint is resumed with counts an attack in."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.integers(0, 2, 40)
    learners = [metis.SimulatedLearner(f"l{k}", np.arange(k, 40, 4), 5, metis.Speed(0.1)) for k in range(4)]

    def identity(poison: Poison | None) -> dict[str, str]:
        made = metis.Federation(
            network=lambda: metis.learning.mlp((3,), 2, hidden=(4,)),
            train=(x, y),
            learners=[replace(learners[0], poison=poison), *learners[1:]],
            solver=VanillaSGD(0.1),
        )
        return made.session(metis.sync_fedavg(1), rounds=1).identity

    assert identity(None) != identity(Poison("scale")) != identity(Poison("scale", 2.0))
    assert identity(None) == identity(None)
    assert set(ATTACKS) == {"sign_flip", "scale", "label_flip", "collusion"}
