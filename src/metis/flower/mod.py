"""A mod for a Flower ClientApp: its training ends with the budget that a policy sent, and is timed by the step.

    app = ClientApp(mods=[metis.flower.budget_mod])

A message without a budget, as Flower's own strategies send it, passes unchanged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from flwr.app import Context, Message, MetricRecord

from metis.core.timing import robust_time_per_batch
from metis.errors import DataError
from metis.flower.records import (
    BATCH_SIZE,
    SECONDS,
    STEPS,
    TIME_PER_BATCH,
    arrays_of,
    content_with,
    model_of,
)
from metis.learning.clients import layout_of
from metis.learning.torch.foreign import bounded


def budget_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Train for as many steps as the config asks for, or until its seconds are over; then say how many they were."""
    budget = _budget_of(message)
    if budget is None:
        return call_next(message, context)
    steps, seconds = budget
    times: list[float] = []
    template, layout = message.content, layout_of(arrays_of(message.content), "the Flower app")
    with bounded(_turns(steps, seconds, times)) as bound:
        reply = call_next(message, context)
        done = 0
        while not bound.ended and steps and bound.steps > done:
            done = bound.steps
            message.content = content_with(template, model_of(reply.content, layout), {})
            reply = call_next(message, context)
    if bound.steps and (steps == 0 or bound.steps <= steps):
        found = {STEPS: bound.steps, TIME_PER_BATCH: robust_time_per_batch(times[: bound.steps] or [math.nan])}
        if bound.batch_size:
            found[BATCH_SIZE] = bound.batch_size
        reply.content["metis"] = MetricRecord(found)
    return reply


def _budget_of(message: Message) -> tuple[int, float] | None:
    if message.metadata.message_type.partition(".")[0] != "train":
        return None
    for config in message.content.config_records.values():
        if STEPS in config:
            steps, seconds = config[STEPS], config.get(SECONDS, math.inf)
            if not isinstance(steps, int) or not isinstance(seconds, (int, float)) or steps < 0:
                raise DataError(f"a message has {STEPS} = {steps!r} and {SECONDS} = {seconds!r}; both must be numbers")
            return steps, float(seconds)
    return None


def _turns(steps: int, seconds: float, times: list[float]) -> Iterator[Any]:
    """One turn after each step, as long as the budget lasts; 0 steps stand for as many as the client makes itself."""
    started = before = time.monotonic()
    while True:
        now = time.monotonic()
        if times or now > before:
            times.append(now - before)
        before = now
        if (steps and len(times) >= steps) or now - started >= seconds:
            return
        yield None
