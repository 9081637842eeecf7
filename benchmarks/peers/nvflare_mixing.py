"""Seconds of NVFlare's weighted average over models in memory: the helper that its FedAvg and aggregators call."""

from __future__ import annotations

import time

import numpy as np
import torch
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from simple import answer, spec

asked, seconds = spec(), {}
for learners, numbers in asked["sizes"]:
    base = np.random.default_rng(1990).standard_normal(numbers, np.float32)
    # Tensors of torch, which it adds in place; arrays of numpy would take it longer.
    models = [torch.from_numpy(base * np.float32(1 + n / learners)) for n in range(learners)]
    times = []
    for _ in range(asked["repeats"] + 1):  # the first warms up
        helper = WeightedAggregationHelper()
        began = time.perf_counter()
        for n, model in enumerate(models):
            helper.add({"w": model}, 100 + n, f"site-{n}", 0)
        helper.get_result()
        times.append(time.perf_counter() - began)
    seconds[f"{learners}x{numbers}"] = min(times[1:])
answer(seconds)
