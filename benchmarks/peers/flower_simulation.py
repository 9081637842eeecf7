"""Seconds of each round in Flower's simulation (Ray, one CPU a client), with FedAvg and no federated evaluation."""

from __future__ import annotations

import functools
import time

import numpy as np
import task
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

asked = task.spec()
client, server = ClientApp(), ServerApp()
moments: list[float] = []


@functools.cache
def work() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Once in each process of clients."""
    torch.set_num_threads(1)
    inputs, targets = task.examples(asked["network"])
    held = task.parts(asked["learners"], asked["examples"])
    return task.initial(asked["network"]), torch.from_numpy(inputs), torch.from_numpy(targets), held


@client.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content["arrays"]
    if asked["network"] is not None:
        network, inputs, targets, held = work()
        network.load_state_dict(arrays.to_torch_state_dict())
        mine = torch.from_numpy(held[int(context.node_config["partition-id"])])
        task.train(
            network, inputs[mine], targets[mine], batch_size=asked["batch_size"], epochs=1,
            learning_rate=asked["learning_rate"],
        )  # fmt: skip
        arrays = ArrayRecord(network.state_dict())
    metrics = MetricRecord({"num-examples": asked["examples"]})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    if asked["network"] is None:
        initial = ArrayRecord({k: torch.from_numpy(v) for k, v in task.layers(asked["megabytes"]).items()})
    else:
        initial = ArrayRecord(task.initial(asked["network"]).state_dict())
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=asked["learners"], min_train_nodes=asked["learners"])
    strategy.start(
        grid, initial, num_rounds=asked["rounds"] + 1, train_config=ConfigRecord(),
        evaluate_fn=lambda round_, arrays: moments.append(time.perf_counter()),
    )  # fmt: skip


if __name__ == "__main__":
    run_simulation(
        server, client, asked["learners"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False},
        },
    )  # fmt: skip
    task.answer(task.rounds_of(moments))
