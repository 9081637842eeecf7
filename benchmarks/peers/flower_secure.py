"""Seconds of Flower's SecAgg+: what its mod does at a client, and its workflow at the server; all are neighbours."""

from __future__ import annotations

import os
import time

import numpy as np
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from simple import answer, spec

asked = spec()
learners, gone, numbers = asked["learners"], asked["gone"], asked["numbers"]
CLIP, TARGET, MODULUS = 8.0, 1 << 22, 1 << 32  # the defaults of SecAggPlusWorkflow
update = [np.random.default_rng(7).standard_normal(numbers)]


def masked(parameters, seeds):
    shapes = [array.shape for array in parameters]
    for at, seed in enumerate(seeds):
        mask = pseudo_rand_gen(seed, MODULUS, shapes)
        parameters = parameters_subtraction(parameters, mask) if at % 2 else parameters_addition(parameters, mask)
    return parameters_mod(parameters, MODULUS)


began = time.process_time()
words = factor_combine(100, quantize(update, CLIP, TARGET))
quantized = time.process_time()
words = masked(words, [os.urandom(32) for _ in range(learners)])  # its own, and one with each other
mask = time.process_time() - quantized
rest = learners - gone
began_open = time.process_time()
total = words
for _ in range(rest - 1):
    total = parameters_addition(total, words)
masked(total, [os.urandom(32) for _ in range(rest * (1 + gone))])
opened = time.process_time() - began_open
sent = sum(array.nbytes for array in words)
answer({"quantize": quantized - began, "mask": mask, "open": opened, "upload": sent / (4 * numbers)})
