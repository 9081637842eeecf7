"""The clients of flower_simulation.py, in a module that the processes of clients import: they train, or do nothing."""

from __future__ import annotations

import functools
import json
import os

import numpy as np
import simple
import task
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

asked = json.loads(os.environ["METIS_BENCHMARK_SPEC"])
client = ClientApp()


@functools.cache
def work() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor, list[np.ndarray]]:
    """Once in each process of clients."""
    torch.set_num_threads(1)
    inputs, targets = simple.examples(task.SHAPES[asked["network"]])
    held = simple.parts(asked["learners"], asked["examples"])
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
