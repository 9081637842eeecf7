"""A Flower App, copied into a folder of its own by flower_deployment.py: learners that train, or that do nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import simple
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

asked = json.loads(os.environ["METIS_BENCHMARK_SPEC"])
trains = "data" in asked
client = ClientApp()
server = ServerApp()  # `flwr run` looks for assignments of this form


@client.train()
def train(message: Message, context: Context) -> Message:
    arrays, examples = message.content["arrays"], 1
    if trains:
        import task  # with torch, which do-nothing learners need not wait for
        import torch

        torch.set_num_threads(1)
        place = int(context.node_config["partition-id"])
        data = np.load(asked["data"])
        mine = data[f"part{place}"]
        inputs, targets = torch.from_numpy(data["x_train"][mine]), torch.from_numpy(data["y_train"][mine])
        network = task.small()
        network.load_state_dict(arrays.to_torch_state_dict())
        task.train(
            network, inputs, targets, batch_size=asked["batch_size"], epochs=asked["local_epochs"],
            learning_rate=asked["learning_rate"], momentum=asked["momentum"], pace=asked["paces"][place],
        )  # fmt: skip
        arrays, examples = ArrayRecord(network.state_dict()), len(mine)
    metrics = MetricRecord({"num-examples": examples})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    learners = asked["learners"]

    def count(replies: list[RecordDict], _: str) -> MetricRecord:
        assert len(replies) == learners, f"{len(replies)} of {learners} clients have answered"
        return MetricRecord({"replies": len(replies)})

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=learners, min_available_nodes=learners, train_metrics_aggr_fn=count
    )
    while len(list(grid.get_node_ids())) < learners:  # their start is nobody's to measure
        time.sleep(0.1)
    moments = [time.perf_counter()]
    if trains:
        import task
        import torch

        data = np.load(asked["data"])
        inputs, targets = torch.from_numpy(data["x_test"]), torch.from_numpy(data["y_test"])
        network, reached = task.small(), [0.0]
        start = {name.removeprefix("initial/"): data[name] for name in data.files if name.startswith("initial/")}
        network.load_state_dict({name: torch.from_numpy(array) for name, array in start.items()})
        arrays = ArrayRecord(network.state_dict())
        while max(reached) < asked["target"] and moments[-1] - moments[0] < asked["seconds"]:
            result = strategy.start(grid, arrays, num_rounds=1)
            arrays = result.arrays
            network.load_state_dict(arrays.to_torch_state_dict())
            reached.append(task.accuracy(network, inputs, targets))
            moments.append(time.perf_counter())
        found = {"seconds": [moment - moments[0] for moment in moments], "accuracy": reached}
    else:
        arrays = ArrayRecord({name: Array(array) for name, array in simple.layers(asked["megabytes"]).items()})
        for _ in range(asked["rounds"] + 1):
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays
            moments.append(time.perf_counter())
        found = simple.rounds_of(moments)
    path = Path(os.environ["METIS_BENCHMARK_ANSWER"])
    path.with_suffix(".part").write_text(json.dumps(found), "utf-8")
    path.with_suffix(".part").rename(path)
