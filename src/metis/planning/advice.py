"""Which lambda suits a federation, and what to warn about, in sentences that name the learner and the number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from metis.planning.forecast import Forecast, PlannedLearner
from metis.text import listed, number, percent, plural, seconds

MAX_EXCHANGE = 0.1  # share of the period
MIN_BATCHES = 10  # in a period: with fewer, rounding to whole batches may leave a tenth of it empty
# Local epochs between two mixings, weighted by the models' shares of the mixture. No lambda that the paper chose for
# any of its environments has more; the one for CIFAR-10 with a power law has 24.6.
MAX_EPOCHS = 25.0
MANY_EPOCHS = 50.0  # for one learner
FEW_BATCHES = 5  # in an epoch
STALE = 10  # updates of each other learner between two of one
DOMINANT = 1.5  # times the epoch of the second slowest learner

Assessment = Literal["too small", "sensible", "too large"]


@dataclass(frozen=True)
class LambdaRange:
    """The lambdas to choose from, and why not a smaller or a larger one."""

    lowest: float
    highest: float
    why: str

    @property
    def exists(self) -> bool:
        return self.lowest <= self.highest

    def assess(self, slowest_learner_epochs: float) -> Assessment:
        if slowest_learner_epochs < self.lowest:
            return "too small"
        return "sensible" if slowest_learner_epochs <= self.highest else "too large"


def sensible_range(
    learners: Sequence[PlannedLearner], weights: Sequence[float] | None = None, max_local_epochs: float = math.inf
) -> LambdaRange:
    """From below, a period must be long compared with transfers and batches; from above, models must not drift apart.

    `weights` are the models' shares of the mixture, by default proportional to the examples. A cap on local epochs may
    keep models close in periods of any length.
    """
    slowest = max(learners, key=lambda learner: learner.epoch_time)
    epoch = slowest.epoch_time
    far = max(learners, key=lambda learner: learner.exchange)
    coarse = max(learners, key=lambda learner: learner.time_per_batch)
    by_transfer, by_batches = far.exchange / MAX_EXCHANGE / epoch, MIN_BATCHES * coarse.time_per_batch / epoch
    lowest = max(by_transfer, by_batches)
    given = [float(learner.examples) for learner in learners] if weights is None else weights
    total = math.fsum(given)
    # At lambda = 1 a period is an epoch of the slowest, in which learner k runs epoch / t_k^e of its own.
    at_one = math.fsum(w / total * epoch / learner.epoch_time for w, learner in zip(given, learners, strict=True))
    highest = MAX_EPOCHS / at_one
    fastest = min(learners, key=lambda learner: learner.epoch_time)
    if by_transfer >= by_batches:
        below = (
            f"below {rounded_up(lowest)} the transfers of {far.name} ({seconds(far.exchange)}) take more than "
            f"{percent(MAX_EXCHANGE)} of a period"
        )
    else:
        below = (
            f"below {rounded_up(lowest)} a period has fewer than {MIN_BATCHES} batches of {coarse.name} "
            f"({seconds(coarse.time_per_batch)} each), and rounding to whole batches leaves part of it unused"
        )
    above = (
        f"above {rounded_down(highest)} learners run more than {MAX_EPOCHS:g} local epochs between two mixings, "
        f"averaged by the weights of their models ({fastest.name} {number(highest * epoch / fastest.epoch_time)}), "
        "and drift apart"
    )
    if max_local_epochs <= MAX_EPOCHS:
        highest = math.inf
        above = (
            f"none is too large, since no learner runs more than {number(max_local_epochs)} local epochs in a period"
        )
    if lowest <= highest:
        why = f"{below[0].upper()}{below[1:]}; {above}."
    else:
        why = f"No lambda is sensible: {below}; {above}."
    return LambdaRange(lowest, highest, why)


def rounded_up(value: float) -> str:
    """Two digits, rounded up."""
    return _two_digits(value, math.ceil)


def rounded_down(value: float) -> str:
    """Two digits, rounded down."""
    return _two_digits(value, math.floor)


def _two_digits(value: float, whole: Callable[[float], int]) -> str:
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{float(f'{whole(round(value / unit, 6)) * unit:.3g}'):g}"


def names(learners: Sequence[str]) -> str:
    """The first few: a, b, c and 4 others."""
    return listed(learners, 3)


def warnings(
    learners: Sequence[PlannedLearner], forecasts: Sequence[Forecast], reference: float | None = None
) -> list[str]:
    """What is wrong with these learners and policies; of the lambdas tried, `reference` is the one to speak about."""
    return [
        *_dominant_learner(learners, reference),
        *_waiting(forecasts),
        *_transfers(forecasts),
        *_few_batches(learners),
        *_drift(learners, forecasts, reference),
        *_stale(forecasts),
        *_refused(forecasts),
    ]


def _dominant_learner(learners: Sequence[PlannedLearner], reference: float | None) -> Iterator[str]:
    if len(learners) < 2:
        return
    slowest, following = sorted(learners, key=lambda learner: learner.epoch_time, reverse=True)[:2]
    ratio = slowest.epoch_time / following.epoch_time
    if ratio < DOMINANT:
        return
    text = (
        f"{slowest.name} alone determines how long a round takes: its epoch lasts {seconds(slowest.epoch_time)}, "
        f"{number(ratio)} times that of {following.name}, the second slowest. "
    )
    if reference is not None:
        without, period = (seconds(reference * learner.epoch_time) for learner in (following, slowest))
        text += f"Without it a period at lambda = {reference:g} would last {without} instead of {period}. "
    yield text + "Fewer examples or a faster machine there would help every learner."


def _waiting(forecasts: Sequence[Forecast]) -> Iterator[str]:
    for found in forecasts:
        waiting = sorted((one for one in found.learners if one.idle > 0.5), key=lambda one: -one.idle)
        if waiting:
            who, longest = names([one.learner for one in waiting]), waiting[0].idle
            yield f"Under {found.policy.label}, {who} would wait more than half of the time (up to {percent(longest)})."


def _transfers(forecasts: Sequence[Forecast]) -> Iterator[str]:
    worst: dict[str, float] = {}
    where: list[str] = []
    for found in forecasts:
        far = {one.learner: one.transfer for one in found.learners if one.transfer > MAX_EXCHANGE}
        if far:
            where.append(found.policy.label)
            worst |= {name: max(share, worst.get(name, 0.0)) for name, share in far.items()}
    if worst:
        who = sorted(worst, key=lambda name: -worst[name])
        yield (
            f"Transfers take more than {percent(MAX_EXCHANGE)} of the time of {names(who)} under {names(where)} "
            f"(up to {percent(worst[who[0]])})."
        )


def _few_batches(learners: Sequence[PlannedLearner]) -> Iterator[str]:
    few = [learner for learner in learners if learner.batches < FEW_BATCHES]
    if few:
        fewest = min(few, key=lambda learner: learner.batches)
        yield (
            f"{names([learner.name for learner in few])} hold{'s' if len(few) == 1 else ''} fewer than {FEW_BATCHES} "
            f"batches of examples ({fewest.name} {fewest.batches}), so an epoch is only a few steps; a smaller "
            "batch_size there would use the data better."
        )


def _drift(learners: Sequence[PlannedLearner], forecasts: Sequence[Forecast], reference: float | None) -> Iterator[str]:
    batches = {learner.name: learner.batches for learner in learners}
    for found in forecasts:
        if found.slowest_learner_epochs not in (None, reference):
            continue
        many = sorted(
            (one for one in found.learners if one.local_epochs > MANY_EPOCHS), key=lambda one: -one.local_epochs
        )
        if many:
            most, whose = (
                many[0],
                "their own data; their models have" if len(many) > 1 else "its own data; its model has",
            )
            yield (
                f"Under {found.policy.label}, {names([one.learner for one in many])} would run more than "
                f"{MANY_EPOCHS:g} local epochs between two mixings ({most.learner} {number(most.local_epochs)}, on "
                f"{plural(batches[most.learner], 'batch', 'batches')}) and overfit {whose} "
                f"{percent(math.fsum(one.weight for one in many))} of the weight."
            )


def _stale(forecasts: Sequence[Forecast]) -> Iterator[str]:
    for found in forecasts:
        most = max(found.learners, key=lambda one: one.overtaken)
        if most.overtaken > STALE * (len(found.learners) - 1) > 0:
            yield (
                f"Under {found.policy.label}, {number(most.overtaken)} updates of others are mixed between two of "
                f"{most.learner}: its model is stale when it arrives."
            )


def _refused(forecasts: Sequence[Forecast]) -> Iterator[str]:
    for found in forecasts:
        if found.refused > 0:
            yield (
                f"Under {found.policy.label}, {number(found.refused)} updates per hour would arrive late and be "
                "refused; allow a longer limit or more grace."
            )
