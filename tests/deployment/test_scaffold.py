"""SCAFFOLD in real federations: a learner's variate is as durable as its site's disk, and no more is needed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from deployment.chaos.harness import Process, free_port, until
from deployment.test_trainer import Trainer
from deployment.tiny import settings, write_site
from metis.deployment.wire.models import read_model, write_model
from metis.experiments.build import build_federation
from metis.experiments.compose import build_policy
from metis.experiments.config.load import load_config
from metis.experiments.silo import build_silo
from metis.runs.storage import load_model

# Two laws that have nothing in common; a batch is all that a site has, so that chance has no part in it.
SITE = """
import numpy as np
from torch import nn

task = "regression"

def network():
    return nn.Linear(3, 1, bias=False)

def training_data(site):
    rng = np.random.default_rng(ord(site[0]))
    inputs = rng.normal(size=(40, 3)) * rng.uniform(0.3, 1.5, size=3)
    return inputs, 2 * inputs @ rng.normal(size=3)

def test_data():
    (one, first), (other, second) = training_data("athens"), training_data("basel")
    return np.concatenate((one, other)), np.concatenate((first, second))
"""
FILE = """
seed = 1

[site]
file = "site.py"

[[learners]]
name = "all"
names = ["athens", "basel"]
batch_size = 40
time_per_batch = 0.1

[training]
solver = "SOLVER"
learning_rate = 0.05

[policy]
name = "sync_fedavg"
local_epochs = 15

[stop]
rounds = ROUNDS

[deployment]
listen = "127.0.0.1:PORT"
http = ""
lease = 100
linger = 20
"""


def write(folder: Path, rounds: int, solver: str = "scaffold") -> int:
    port = free_port()
    (folder / "site.py").write_text(SITE)
    text = FILE.replace("ROUNDS", str(rounds)).replace("SOLVER", solver).replace("PORT", str(port))
    (folder / "federation.toml").write_text(text)
    return port


def optimum() -> np.ndarray[Any, Any]:
    """Of the mean loss over the examples of both sites."""
    code: dict[str, Any] = {}
    exec(SITE, code)
    inputs, targets = code["test_data"]()
    return np.asarray(np.linalg.lstsq(inputs, targets, rcond=None)[0])


def rehearsed(folder: Path, rounds: int, solver: str = "scaffold") -> np.ndarray[Any, Any]:
    """What the same file gives in virtual time."""
    folder.mkdir()
    write(folder, rounds, solver)
    config = load_config(folder / "federation.toml", [])
    run = build_federation(config).simulate(build_policy(config.policy[0]), rounds=rounds)
    return run.community_model.vector


def federate(folder: Path, rounds: int, *, new_disk: bool) -> np.ndarray[Any, Any]:
    """A controller and two learners as processes; one learner is killed in the middle and started again."""
    folder.mkdir()
    port = write(folder, rounds)

    def learner(name: str) -> Process:
        words = ["learner", "--controller", f"127.0.0.1:{port}", "--insecure", "--name", name, "--site", "site.py"]
        return Process([*words, "--work", f"work-{name}", "--pace", "0.03", "--json"], folder / f"{name}.log")

    def version() -> int:
        events = folder / "state" / "run" / "events.jsonl"
        return events.read_text().count('"community_published"') if events.exists() else 0

    command = ["controller", "federation.toml", "--state", "state", "--insecure", "--json"]
    with Process(command, folder / "controller.log") as controller:
        controller.wait_for("listening on")
        with learner("athens") as athens, learner("basel") as killed:
            until(lambda: version() >= 3, "three rounds")
            killed.kill()
            if new_disk:
                shutil.rmtree(folder / "work-basel")
            with learner("basel") as back:
                assert controller.wait() == 0, controller.text()[-1500:]
                assert athens.wait() == 0
                assert back.wait() == 0
    final = load_model(folder / "state" / "run" / "community.safetensors")
    assert [spec.name for spec in final.layout.tensors] == ["weight"], "the network alone"
    for work in ("work-athens", "work-basel"):
        assert load_model(folder / work / "community.safetensors").sha256() == final.sha256()
    return final.vector


@pytest.mark.slow
def test_a_killed_learner_goes_on_with_its_variate(tmp_path: Path) -> None:
    """The same trace as in virtual time, where nobody is killed; FedAvg with as many steps goes elsewhere."""
    expected = rehearsed(tmp_path / "simulated", 7)
    assert federate(tmp_path / "real", 7, new_disk=False) == pytest.approx(expected, abs=1e-5)
    assert np.abs(rehearsed(tmp_path / "plain", 7, "vanilla") - expected).max() > 0.05


@pytest.mark.slow
def test_a_learner_with_a_new_disk_starts_anew_and_all_stays_right(tmp_path: Path) -> None:
    """Its variate is gone with its disk: the run is another one, and ends at the optimum all the same."""
    found = federate(tmp_path / "real", 30, new_disk=True)
    assert np.abs(found - optimum()).max() < 1e-3
    assert np.abs(rehearsed(tmp_path / "plain", 30, "vanilla") - optimum()).max() > 0.05


@pytest.mark.slow
def test_the_variate_outlives_the_process_and_a_task_that_is_given_again_starts_as_before(tmp_path: Path) -> None:
    """Two tasks in one process, or with the process killed in between, or the second task twice: the same bits."""
    site = write_site(tmp_path)
    asked = settings(site, training={"solver": "scaffold", "learning_rate": 0.1})
    silo = build_silo(asked, site, "zurich", 1)
    initial = silo.initial_model(1990)
    model = tmp_path / "initial.model"
    write_model(model, initial.with_vector(initial.vector + np.float32(0.01)))

    def prepared(folder: str) -> Trainer:
        trainer = Trainer()
        answer = trainer.prepare(site, settings=asked, memory=str(tmp_path / folder), layout=silo.layout.to_json())
        assert "done" in answer, answer
        return trainer

    def train(trainer: Trainer, task: int) -> str:
        return str(trainer.train(model, tmp_path / f"{task}.model", task)["done"]["sha256"])

    whole = prepared("a")
    first, second, again = train(whole, 1), train(whole, 2), train(whole, 2)
    whole.end()
    broken = prepared("b")
    assert train(broken, 1) == first
    broken.process.kill()
    broken.end()
    back = prepared("b")
    assert train(back, 2) == second == again
    measured = back.ask("evaluate", model=str(model))["done"]["metrics"]
    saved = back.ask(
        "save", model=str(tmp_path / "2.model"), layout=silo.layout.to_json(),
        out=str(tmp_path / "final.safetensors"), metadata={},
    )  # fmt: skip
    back.end()

    community, local = (read_model(path, silo.layout) for path in (model, tmp_path / "2.model"))
    assert silo.evaluation is not None
    assert measured == pytest.approx(silo.engine.evaluate(community.network, silo.evaluation))
    assert saved == {"done": {}}
    assert load_model(tmp_path / "final.safetensors").sha256() == local.network.sha256()
    assert silo.learner is not None
    one = silo.learner.train(silo.engine, community, 1, 5)
    two = silo.learner.train(silo.engine, community, 2, 5, one.memory)
    without = silo.learner.train(silo.engine, community, 2, 5)
    assert local.sha256() == two.model.sha256() != without.model.sha256()
