"""Seconds of Flower's FedAvg over models in memory: `aggregate_arrayrecords`, which its strategies call."""

from __future__ import annotations

import time

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from simple import answer, spec

asked, seconds = spec(), {}
for learners, numbers in asked["sizes"]:
    base = np.random.default_rng(1990).standard_normal(numbers, np.float32)
    records = [
        RecordDict(
            {
                "arrays": ArrayRecord({"w": Array(base * np.float32(1 + n / learners))}),
                "metrics": MetricRecord({"num-examples": 100 + n}),
            }
        )
        for n in range(learners)
    ]
    times = []
    for _ in range(asked["repeats"] + 1):  # the first warms up
        began = time.perf_counter()
        aggregate_arrayrecords(records, "num-examples")
        times.append(time.perf_counter() - began)
    seconds[f"{learners}x{numbers}"] = min(times[1:])
answer(seconds)
