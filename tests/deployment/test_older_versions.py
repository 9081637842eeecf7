"""A federation is resumed from the state folder of an earlier version.

The folders in fixtures/ were written by the code before the controller was divided into parts: the start of the
federation is an entry of its own kind in them, keys of [run] and [deployment] have other names, and the controller was
killed with SIGKILL in the middle of the run.
"""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")

from deployment.federations import by_name
from deployment.scripted_learner import HonestLearner, move_towards
from deployment.test_compressed_updates import Compressing
from metis.core.events import LearnersExpected
from metis.core.model import Layout
from metis.deployment.controller.durable import initial_model
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.controller.state import State
from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig, resolve_config
from metis.experiments.deploy import check_same_run, make_plan

FIXTURES = Path(__file__).parent / "fixtures"
EXPERIMENT: dict[str, Any] = {
    "data": {"dataset": "digits"},
    "network": {"name": "mlp", "hidden": [4]},
    "learners": [{"name": "all", "names": ["cleveland", "zurich", "absent"], "batch_size": 10, "time_per_batch": 0.1}],
    "training": {"learning_rate": 0.1},
    "deployment": {"minimum": 1, "lease": 30, "heartbeat": 1, "linger": 3, "durability": "process"},
}
POLICIES: dict[str, dict[str, Any]] = {
    "semisync": {
        "policy": {"name": "semisync_fedavg", "slowest_learner_epochs": 1},
        "stop": {"rounds": 8},
    },
    "async": {
        "policy": {"name": "async_fedavg", "local_epochs": 1, "compression": {"kind": "top_k", "share": 0.2}},
        "stop": {"update_requests": 40},
    },
}
KILLED_AT = {"semisync": 4, "async": 30}  # community model of the last entry


def experiment(name: str, **changes: Any) -> ExperimentConfig:
    return resolve_config({**EXPERIMENT, **POLICIES[name], **changes}, "federation.toml")


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", POLICIES)
def test_it_is_resumed_and_comes_to_its_end(name: str, tmp_path: Path) -> None:
    """Its journal gives the same community models, bit for bit, and the learners train on."""

    async def resume(state: State) -> ControllerProcess:
        facts = state.facts()
        assert facts is not None
        config, layout = experiment(name), Layout.from_json(facts["layout"])
        check_same_run(config, facts["experiment"])
        initial = initial_model(state, facts["initial"], layout)
        plan = make_plan(config, initial, facts["metric"], facts["higher_is_better"])
        process = ControllerProcess(
            plan, state, tmp_path / "run", evaluator=None, identify=by_name, report=lambda kind, text: None
        )
        assert process._view.standing.version == KILLED_AT[name]
        serving = asyncio.create_task(process.serve("127.0.0.1:0", None))
        while not hasattr(process, "address"):
            await asyncio.sleep(0.01)
        learners = []
        for record in list(process._writer.controller.roster):
            learner = Compressing if plan.wire else HonestLearner
            learners.append(
                learner(
                    record.learner, process.address, layout, train=move_towards(0.0), examples=record.examples,
                    batch_size=record.batch_size, seconds_per_batch=0.001,
                )
            )  # fmt: skip
            if plan.wire:
                learners[-1].compression = plan.wire  # type: ignore[attr-defined]
        await asyncio.wait_for(asyncio.gather(*(learner.run() for learner in learners)), 600)
        assert await serving
        return process

    with State.open(unpacked(name, tmp_path / "state"), "process") as state:
        process = asyncio.run(resume(state))
        assert any("start_with" in entry.record for entry in state.entries())
    run = process.result
    assert run.finish_reason == {"semisync": "8 rounds are done", "async": "40 update requests were made"}[name]
    assert [item for _, item in run.events if isinstance(item, LearnersExpected)] == [LearnersExpected(2)]


def test_a_different_file_is_refused(tmp_path: Path) -> None:
    """The sentence names the first difference."""
    with State.open(unpacked("semisync", tmp_path), "process") as state:
        facts = state.facts()
    assert facts is not None
    check_same_run(experiment("semisync", stop={"rounds": 99}), facts["experiment"])
    with pytest.raises(ConfigError, match=r"started with another \[policy\] .*learning_rate was 0\.1, is 0\.2"):
        check_same_run(experiment("semisync", training={"learning_rate": 0.2}), facts["experiment"])
