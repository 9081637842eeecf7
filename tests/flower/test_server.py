"""Policies of Metis over a Flower grid: by calls, by budgets, and with nodes that fail, leave and come back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

import metis.flower
from metis.core.events import LearnerLeft, SendTask, TaskFailed, UpdateCommitted, UpdateRequest
from metis.core.policies import async_fedavg, fedrec, semisync_fedavg, sync_fedavg
from metis.core.stop import StopRule
from metis.errors import ConfigError
from metis.flower.opening import identify
from metis.flower.server import Runtime
from metis.runs.run import Run

PROJECT = Path(__file__).parent / "project"
FAST, SLOW = 2, 3


class VirtualGrid:
    """Nodes whose calls take virtual time: a message is answered when its time has come."""

    def __init__(self, client: Any, seconds: dict[int, float], steps_take: float = 0.0) -> None:
        self.client, self.seconds, self.steps_take = client, seconds, steps_take
        self.now, self.there = 0.0, set(seconds)
        self.due: dict[str, tuple[float, Any]] = {}
        self.sent: list[tuple[int, str, int]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.there)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        numbers = []
        for message in messages:
            number, node = f"m{len(self.sent)}", message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = number
            self.sent.append((node, message.metadata.message_type, len(self.sent)))
            reply, steps = self.client(message, node)
            took = self.seconds[node] if steps is None else steps * self.steps_take * self.seconds[node]
            self.due[number] = (self.now + took, reply)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        ready = [number for number in message_ids if number in self.due and self.due[number][0] <= self.now]
        return [self.due.pop(number)[1] for number in sorted(ready, key=lambda number: self.due[number][0])]


def adding(message: Any, node: int, *, examples: int = 10, fails: bool = False, shape: Any = None) -> Any:
    """A client whose training adds 1 to its model for each call, or for each step of the budget."""
    from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict

    if fails:
        return _answering(Message(Error(code=2, reason="no scanner today"), reply_to=message), message), None
    if message.metadata.message_type == "evaluate":
        numbers = MetricRecord({"eval_acc": node / 10, "num-examples": examples})
        return _answering(Message(RecordDict({"metrics": numbers}), reply_to=message), message), None
    arrays = {name: array.numpy() + 1 for name, array in message.content["arrays"].items()}
    if shape is not None:
        arrays = {name: np.zeros(shape, np.float32) for name in arrays}
    numbers = MetricRecord({"train_loss": 1.0, "num-examples": examples})
    record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    return _answering(Message(RecordDict({"arrays": record, "metrics": numbers}), reply_to=message), message), None


def _answering(reply: Any, message: Any) -> Any:
    reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
    return reply


def run_on(grid: VirtualGrid, policy: Any, **options: Any) -> Runtime:
    from flwr.app import Array, ArrayRecord

    identify()
    initial = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    stop = options.pop("stop", StopRule(rounds=4))
    runtime = Runtime(
        grid, policy, initial, stop, learners=len(grid.seconds), clock=grid.clock, sleep=grid.sleep, **options
    )
    runtime.run()
    return runtime


def steps_of(runtime: Runtime, node: int) -> list[int]:
    return [
        event.steps
        for _, event in runtime.events
        if isinstance(event, UpdateRequest) and event.learner == f"node-{node}"
    ]


def test_a_fast_node_is_called_again_until_the_period_ends() -> None:
    grid = VirtualGrid(adding, {FAST: 1.0, SLOW: 10.0})
    runtime = run_on(grid, semisync_fedavg(slowest_learner_epochs=1))
    fast, slow = steps_of(runtime, FAST), steps_of(runtime, SLOW)
    assert slow == [1] * 4
    assert fast[0] == 1 and all(
        8 <= steps <= 10 for steps in fast[1:]
    )  # the first is the call that everybody begins with
    assert runtime.result.evaluate_metrics_clientapp[4]["accuracy"] == pytest.approx(0.25)
    assert runtime.result.train_metrics_clientapp[1]["train_loss"] == 1.0


def test_the_first_call_is_the_first_contribution() -> None:
    """Synchronous rounds therefore send exactly the messages that Flower would, and end in the same model."""
    grid = VirtualGrid(adding, {FAST: 1.0, SLOW: 10.0})
    runtime = run_on(grid, sync_fedavg(local_epochs=1), evaluates=False)
    assert [kind for _, kind, _ in grid.sent] == ["train"] * 8
    np.testing.assert_allclose(runtime.controller.community.model.vector, 4.0)
    assert grid.now == pytest.approx(40.0, abs=2.0)


@pytest.mark.parametrize("policy", [async_fedavg(local_epochs=1), fedrec(local_epochs=1)])
def test_without_rounds_nobody_waits(policy: Any) -> None:
    grid = VirtualGrid(adding, {FAST: 1.0, SLOW: 10.0})
    runtime = run_on(grid, policy, stop=StopRule(seconds=40.0))
    assert len(steps_of(runtime, FAST)) > 4 * len(steps_of(runtime, SLOW)) > 0


def test_a_node_that_fails_does_not_end_the_federation() -> None:
    calls = {SLOW: 0}

    def client(message: Any, node: int) -> Any:
        calls[SLOW] += node == SLOW
        return adding(message, node, fails=node == SLOW and calls[SLOW] > 1)

    runtime = run_on(VirtualGrid(client, {FAST: 1.0, SLOW: 2.0}), sync_fedavg(local_epochs=1))
    failed = [event for _, event in runtime.events if isinstance(event, TaskFailed)]
    assert failed and "node-3 failed: no scanner today" in failed[0].reason
    assert runtime.controller.rounds == 4


def test_another_model_is_refused_in_one_sentence() -> None:
    calls = {SLOW: 0}

    def client(message: Any, node: int) -> Any:
        calls[SLOW] += node == SLOW
        return adding(message, node, shape=(9, 9) if node == SLOW and calls[SLOW] > 1 else None)

    runtime = run_on(VirtualGrid(client, {FAST: 1.0, SLOW: 2.0}), sync_fedavg(local_epochs=1))
    (failed, *_) = [event for _, event in runtime.events if isinstance(event, TaskFailed)]
    assert failed.reason.startswith("the Flower client returned another model than it was given: tensor 'w' has shape")


def test_a_node_may_leave_and_come_back() -> None:
    grid = VirtualGrid(adding, {FAST: 1.0, SLOW: 1.0})
    original = grid.sleep

    def sleep(seconds: float) -> None:
        original(seconds)
        grid.there = {FAST} if 5.0 < grid.now < 15.0 else {FAST, SLOW}

    grid.sleep = sleep  # type: ignore[method-assign]
    runtime = run_on(grid, sync_fedavg(local_epochs=1), stop=StopRule(rounds=25))
    left = [now for now, event in runtime.events if isinstance(event, LearnerLeft)]
    committed = [
        now for now, event in runtime.events if isinstance(event, UpdateCommitted) and event.learner == "node-3"
    ]
    assert len(left) == 1 and committed[-1] > 15.0


def test_a_budget_is_kept_by_the_mod() -> None:
    """A loop of torch behind the mod: one message a task, and exactly the steps of the budget."""
    sys.path.insert(0, str(PROJECT))
    from flwr.app import ArrayRecord, Context, RecordDict
    from flwr.clientapp import ClientApp
    from tiny import client_app  # type: ignore[import-not-found]
    from tiny.task import Net  # type: ignore[import-not-found]

    app = ClientApp(mods=[metis.flower.budget_mod])
    app.train()(client_app.train_)
    app.evaluate()(client_app.evaluate)
    config = {"local-epochs": 1, "data.batch-size": 10}

    def client(message: Any, node: int) -> Any:
        context = Context(1, node, {"partition-id": node - 2, "num-partitions": 2}, RecordDict(), config)
        reply = _answering(app(message, context), message)
        said = reply.content.metric_records.get("metis", {})
        if "metis-time-per-batch" in said:
            said["metis-time-per-batch"] = grid.seconds[node]
        return reply, said.get("metis-steps")

    grid = VirtualGrid(client, {FAST: 0.1, SLOW: 1.0}, steps_take=1.0)
    identify()
    runtime = Runtime(
        grid,  # type: ignore[arg-type]
        semisync_fedavg(slowest_learner_epochs=1),
        ArrayRecord(Net().state_dict()),
        StopRule(rounds=4),
        learners=2,
        train_config={"lr": 0.1},
        clock=grid.clock,
        sleep=grid.sleep,
    )
    runtime.run()
    budgets = {
        action.task.number: action.task.budget.steps for _, action in runtime.events if isinstance(action, SendTask)
    }
    updates = [event for _, event in runtime.events if isinstance(event, UpdateRequest)]
    assert steps_of(runtime, SLOW)[1:] == [5] * 3  # an epoch of it
    assert all(steps > 30 for steps in steps_of(runtime, FAST)[1:])
    assert all(update.steps == budgets[update.task] for update in updates)
    assert sum(kind == "train" for _, kind, _ in grid.sent) == len(updates)


def test_an_app_changes_by_one_line(tmp_path: Path) -> None:
    sys.path.insert(0, str(PROJECT))
    from flwr.app import Context, RecordDict
    from tiny import client_app, server_app  # type: ignore[import-not-found]

    config = {"num-server-rounds": 2, "learning-rate": 0.1, "local-epochs": 1, "data.batch-size": 10}

    def client(message: Any, node: int) -> Any:
        context = Context(1, node, {"partition-id": node - 2, "num-partitions": 2}, RecordDict(), config)
        return _answering(client_app.app(message, context), message), None

    grid = VirtualGrid(client, {FAST: 0.0, SLOW: 0.0})
    app = metis.flower.ServerApp(server_app.app, semisync_fedavg(slowest_learner_epochs=1), out=tmp_path / "run")
    identify()
    app(grid, Context(1, 1, {}, RecordDict(), config))
    (result,) = server_app.results
    assert set(result.arrays) >= {"out.weight"} and 2 in result.evaluate_metrics_clientapp
    run = Run.load(tmp_path / "run")
    assert run.rounds == 2 and {info.examples for info in run.setting.learners} == {40, 50}
    from flwr.serverapp.strategy import Strategy

    assert Strategy.start.__module__.startswith("flwr")


def test_what_cannot_be_is_said() -> None:
    from flwr.serverapp import ServerApp

    with pytest.raises(ConfigError, match="needs a ServerApp with a main function"):
        metis.flower.ServerApp(ServerApp(), semisync_fedavg())
    app = ServerApp()
    app.main()(lambda grid, context: None)
    with pytest.raises(ConfigError, match="there is no policy 'fedsgd'"):
        metis.flower.ServerApp(app, "fedsgd")
    from metis import Compression

    with pytest.raises(ConfigError, match="parts that run at learners"):
        metis.flower.ServerApp(app, sync_fedavg().with_layers(Compression("int8")))


@pytest.mark.slow
def test_a_flower_deployment_runs_semisync_to_the_end() -> None:
    """A SuperLink and two SuperNodes as processes, one of them ten times slower; the app has one line of Metis."""
    script = Path(__file__).parents[2] / "examples" / "flower" / "deploy.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=850, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "community model 5 of 2 nodes" in output and "5 rounds are done" in output, output
    assert "final {5:" in output, output
