"""Seconds of each round in Flower's simulation (Ray, one CPU a client), with FedAvg and no federated evaluation."""

from __future__ import annotations

import os
import sys
import time

import simple
import task
import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

os.environ["METIS_BENCHMARK_SPEC"] = sys.argv[1]
asked = simple.spec()
server = ServerApp()
moments: list[float] = []
replies: list[int] = []  # of clients that did not fail, in each round


@server.main()
def main(grid: Grid, context: Context) -> None:
    if asked["network"] is None:
        initial = ArrayRecord({k: torch.from_numpy(v) for k, v in simple.layers(asked["megabytes"]).items()})
    else:
        initial = ArrayRecord(task.initial(asked["network"]).state_dict())
    strategy = FedAvg(
        fraction_evaluate=0.0, min_available_nodes=asked["learners"], min_train_nodes=asked["learners"],
        train_metrics_aggr_fn=lambda answers, _: MetricRecord({"replies": len(answers)}),
    )  # fmt: skip
    result = strategy.start(
        grid, initial, num_rounds=asked["rounds"] + 1,
        evaluate_fn=lambda round_, arrays: moments.append(time.perf_counter()),
    )  # fmt: skip
    replies.extend(metrics["replies"] for metrics in result.train_metrics_clientapp.values())


if __name__ == "__main__":
    from flower_clients import client

    run_simulation(
        server, client, asked["learners"],
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False},
        },
    )  # fmt: skip
    assert replies == [asked["learners"]] * (asked["rounds"] + 1), f"clients that answered in each round: {replies}"
    simple.answer(simple.rounds_of(moments))
