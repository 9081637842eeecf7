"""What a policy will cost, before anything is trained: the real controller in virtual time, with constant speeds.

Under a barrier a few rounds are played until they repeat; under an asynchronous policy every learner has a rhythm of
its own, which is its first task. All numbers are of that steady state, without the cold start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from metis.core.controller import Controller, StopRule
from metis.core.costs import CostLedger, Costs, Energy, Power
from metis.core.events import (
    Action,
    CommunityPublished,
    Event,
    LearnerId,
    LearnerJoined,
    SendTask,
    UpdateCommitted,
    UpdateRequest,
)
from metis.core.model import Model
from metis.core.policies import Policy
from metis.core.protocols import SemiSynchronous
from metis.simulation.loop import ScheduledEvent, play
from metis.simulation.speed import Speed
from metis.text import listed, number, percent, seconds

HOUR = 3600.0
# Rounds that are played: the cold start and some that must be alike; more if they are not, say because a limit makes
# somebody late at first.
_ROUNDS = (4, 24, 120)

# What is too much, for the sensible range of lambda and for warnings.
MOST_EXCHANGE = 0.1  # of the period
FEWEST_BATCHES = 10  # in a period: with fewer, whole batches may leave a tenth of it empty
# Local epochs between two mixings, averaged by what each model counts in the mixture. No lambda that the paper chose
# for any of its environments has more; that of CIFAR-10, power law, has 24.6.
MOST_EPOCHS = 25.0
MANY_EPOCHS = 50.0  # of one learner
FEW_BATCHES = 5  # in an epoch
STALE = 10  # updates of each other learner between two of one
DICTATES = 1.5  # times the epoch of the next slowest learner

Kind = Literal["synchronous", "semi-synchronous", "asynchronous"]


@dataclass(frozen=True)
class Member:
    """What a plan must know of one learner."""

    name: LearnerId
    examples: int
    batch_size: int
    time_per_batch: float
    download: float = 0.0  # seconds
    upload: float = 0.0
    power: Power = field(default_factory=Power)
    source: str = "the file"  # where the time per batch comes from

    @property
    def batches(self) -> int:
        """In an epoch."""
        return -(-self.examples // self.batch_size)

    @property
    def epoch_time(self) -> float:
        """t_k^e of Eq. 5."""
        return self.batches * self.time_per_batch

    @property
    def exchange(self) -> float:
        """Seconds that a task takes besides training."""
        return self.download + self.upload

    def work(self, action: SendTask, now: float) -> ScheduledEvent:
        """How a task sent now ends."""
        spent = Speed(self.time_per_batch).spend(action.task.budget, now, np.random.default_rng(0))
        update = UpdateRequest(
            self.name, action.task.number, spent.steps, spent.seconds, spent.time_per_batch, Model.empty()
        )
        return ScheduledEvent(now + self.download + spent.seconds + self.upload, update)


@dataclass(frozen=True)
class Share:
    """One learner between two mixings: what it does, and how it spends the time."""

    learner: LearnerId
    steps: int  # B_k
    local_epochs: float  # without mixing: the more, the further its model drifts from the others'
    seconds: float  # from one task to the next
    active: float  # shares of that time
    transfer: float
    idle: float
    weight: float  # what its model counts in the mixture, as a share; by its examples if asynchronous
    overtaken: float  # updates of others while it works; only an asynchronous policy has any
    energy: Energy  # an hour


@dataclass(frozen=True)
class Forecast:
    """One policy in its steady state."""

    policy: Policy
    learners: tuple[Share, ...]
    update_requests: float  # an hour
    models_exchanged: float  # an hour
    refused: float = 0.0  # an hour
    round: float | None = None  # seconds between two mixings; None if there are no rounds
    first_round: float | None = None  # seconds of the cold start, if there is one

    @property
    def kind(self) -> Kind:
        if self.policy.protocol.accepts_stale:
            return "asynchronous"
        return "semi-synchronous" if isinstance(self.policy.protocol, SemiSynchronous) else "synchronous"

    @property
    def slowest_learner_epochs(self) -> float | None:
        """Lambda."""
        protocol = self.policy.protocol
        return protocol.slowest_learner_epochs if isinstance(protocol, SemiSynchronous) else None

    @property
    def energy(self) -> Energy:
        """An hour, in epsilon-seconds or joules."""
        return sum((share.energy for share in self.learners), Energy())

    @property
    def idle(self) -> float:
        """Mean share of the learners' time."""
        return math.fsum(share.idle for share in self.learners) / len(self.learners)

    @property
    def transfer(self) -> float:
        """Mean share of the learners' time."""
        return math.fsum(share.transfer for share in self.learners) / len(self.learners)

    @property
    def local_epochs(self) -> float:
        """Between two mixings, averaged by what each model counts."""
        return math.fsum(share.weight * share.local_epochs for share in self.learners)


def forecast(policy: Policy, members: Sequence[Member]) -> Forecast:
    """The policy's steady state with these learners, all of them there and equally fast all the time."""
    return _rhythms(policy, members) if policy.protocol.accepts_stale else _rounds(policy, members)


def _joins(members: Sequence[Member]) -> list[ScheduledEvent]:
    return [ScheduledEvent(0.0, LearnerJoined(member.name, member.examples, member.batch_size)) for member in members]


def _fresh(policy: Policy, members: Sequence[Member], stop: StopRule | None = None) -> Controller:
    return Controller(policy, Model.empty(), stop=stop, learners_expected=len(members))


def _ledger(policy: Policy, members: Sequence[Member]) -> CostLedger:
    powers = {member.name: member.power for member in members}
    return CostLedger(powers, 0, policy.protocol.fills_the_period)


# --- with a barrier ------------------------------------------------------------------------------


def _rounds(policy: Policy, members: Sequence[Member]) -> Forecast:
    for rounds in _ROUNDS:
        bills, steps, values = _played(policy, members, rounds)
        steady = _alike(bills) and len(steps) == len(members)
        if steady:
            break
    since = len(bills) - 2 if steady else len(bills) // 2
    before, after = bills[since], bills[-1]
    span, rounds = after.parallel_time - before.parallel_time, len(bills) - 1 - since
    total = math.fsum(values.values())
    shares = []
    for member in members:
        then, now = before.by_learner[member.name], after.by_learner[member.name]
        shares.append(
            Share(
                member.name,
                steps.get(member.name, 0),
                steps.get(member.name, 0) / member.batches,
                span / rounds,
                (now.active - then.active) / span,
                max(0.0, now.transfer - then.transfer) / span,
                max(0.0, now.idle - then.idle) / span,  # a difference of sums may be a hair under 0
                values.get(member.name, 0.0) / total,
                0.0,
                _an_hour(now.energy, then.energy, span),
            )
        )
    return Forecast(
        policy,
        tuple(shares),
        (after.update_requests - before.update_requests) * HOUR / span,
        (after.models_exchanged - before.models_exchanged) * HOUR / span,
        (after.refused - before.refused) * HOUR / span,
        span / rounds,
        bills[0].parallel_time if isinstance(policy.protocol, SemiSynchronous) else None,
    )


def _played(
    policy: Policy, members: Sequence[Member], rounds: int
) -> tuple[list[Costs], dict[LearnerId, int], dict[LearnerId, float]]:
    """The bill at the end of each round, and each learner's latest steps and contribution value."""
    by_name = {member.name: member for member in members}
    ledger, bills = _ledger(policy, members), []
    steps: dict[LearnerId, int] = {}
    values: dict[LearnerId, float] = {}
    course: Iterator[tuple[float, Event | Action]] = play(
        _fresh(policy, members, StopRule(rounds=rounds)),
        _joins(members),
        lambda action, now: by_name[action.learner].work(action, now),
    )
    for now, item in course:
        ledger.record(now, item)
        match item:
            case UpdateRequest():
                steps[item.learner] = item.steps
            case UpdateCommitted():
                values[item.learner] = item.contribution_value
            case CommunityPublished():
                bills.append(ledger.costs(now))
            case _:
                pass
    return bills, steps, values


def _alike(bills: Sequence[Costs]) -> bool:
    """Whether the last two rounds were the same."""
    last, before = (
        (
            bills[-k].parallel_time - bills[-k - 1].parallel_time,
            *(
                costs.steps - bills[-k - 1].by_learner[name].steps
                for name, costs in bills[-k].by_learner.items()
            ),
        )
        for k in (1, 2)
    )  # fmt: skip
    return all(math.isclose(one, other, rel_tol=1e-9) for one, other in zip(last, before, strict=True))


def _an_hour(now: Energy, then: Energy, span: float) -> Energy:
    factor = HOUR / span
    return Energy(
        (now.equation - then.equation) * factor,
        (now.active - then.active) * factor,
        (now.idle_charged - then.idle_charged) * factor,
    )


# --- without ------------------------------------------------------------------------------------


def _rhythms(policy: Policy, members: Sequence[Member]) -> Forecast:
    """Nobody waits for anybody, so each learner repeats its first task for ever."""
    by_name = {member.name: member for member in members}
    course = play(_fresh(policy, members), _joins(members), lambda *_: None)
    firsts = {item.learner: item for _, item in course if isinstance(item, SendTask)}
    examples = sum(member.examples for member in members)
    answers = {name: by_name[name].work(first, 0.0) for name, first in firsts.items()}
    rate = math.fsum(1 / answer.at for answer in answers.values())  # updates a second
    shares = []
    for (joined, member), answer in zip(zip(_joins(members), members, strict=True), answers.values(), strict=True):
        ledger = _ledger(policy, [member])
        for at, item in ((0.0, joined.event), (0.0, firsts[member.name]), (answer.at, answer.event)):
            ledger.record(at, item)
        bill = ledger.costs(answer.at)
        costs = bill.by_learner[member.name]
        shares.append(
            Share(
                member.name,
                costs.steps,
                costs.steps / member.batches,
                answer.at,
                costs.active / answer.at,
                costs.transfer / answer.at,
                costs.idle / answer.at,
                member.examples / examples,
                (rate - 1 / answer.at) * answer.at,
                _an_hour(costs.energy, Energy(), answer.at),
            )
        )
    return Forecast(policy, tuple(shares), rate * HOUR, 2 * rate * HOUR)


# --- advice -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SensibleRange:
    """Which lambda to choose from, and why not a smaller or a larger one."""

    lowest: float
    highest: float
    why: str

    @property
    def exists(self) -> bool:
        return self.lowest <= self.highest

    def evaluator(self, slowest_learner_epochs: float) -> Literal["too small", "sensible", "too large"]:
        if slowest_learner_epochs < self.lowest:
            return "too small"
        return "sensible" if slowest_learner_epochs <= self.highest else "too large"


def sensible_range(
    members: Sequence[Member], weights: Sequence[float] | None = None, max_local_epochs: float = math.inf
) -> SensibleRange:
    """From below, a period must be long against transfers and batches; from above, models must not drift too far.

    `weights` say what each learner's model counts in the mixture; by default its examples. A cap on local epochs may
    keep models together in periods of any length.
    """
    slowest = max(members, key=lambda member: member.epoch_time)
    epoch = slowest.epoch_time
    far = max(members, key=lambda member: member.exchange)
    coarse = max(members, key=lambda member: member.time_per_batch)
    by_transfer, by_batches = far.exchange / MOST_EXCHANGE / epoch, FEWEST_BATCHES * coarse.time_per_batch / epoch
    lowest = max(by_transfer, by_batches)
    given = [float(member.examples) for member in members] if weights is None else weights
    total = math.fsum(given)
    # At lambda = 1 a period is an epoch of the slowest, in which learner k runs epoch / t_k^e of its own.
    at_one = math.fsum(w / total * epoch / member.epoch_time for w, member in zip(given, members, strict=True))
    highest = MOST_EPOCHS / at_one
    fastest = min(members, key=lambda member: member.epoch_time)
    if by_transfer >= by_batches:
        below = (
            f"below {up(lowest)} the transfers of {far.name} ({seconds(far.exchange)}) take more than "
            f"{percent(MOST_EXCHANGE)} of a period"
        )
    else:
        below = (
            f"below {up(lowest)} a period has fewer than {FEWEST_BATCHES} batches of {coarse.name} "
            f"({seconds(coarse.time_per_batch)} each), and whole batches do not fill it"
        )
    above = (
        f"above {down(highest)} learners run more than {MOST_EPOCHS:g} local epochs between two mixings, weighted by "
        f"what their models count ({fastest.name} {number(highest * epoch / fastest.epoch_time)}), so that they drift "
        "apart"
    )
    if max_local_epochs <= MOST_EPOCHS:
        highest = math.inf
        above = f"however large it is, nobody runs more than {number(max_local_epochs)} local epochs in a period"
    if lowest <= highest:
        why = f"{below[0].upper()}{below[1:]}; {above}."
    else:
        why = f"No lambda is sensible: {below}; {above}."
    return SensibleRange(lowest, highest, why)


def up(value: float) -> str:
    """Two digits, rounded up."""
    return _rounded(value, math.ceil)


def down(value: float) -> str:
    """Two digits, rounded down."""
    return _rounded(value, math.floor)


def _rounded(value: float, how: Any) -> str:
    if value <= 0:
        return "0"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{float(f'{how(round(value / unit, 6)) * unit:.3g}'):g}"


def warnings(members: Sequence[Member], forecasts: Sequence[Forecast], reference: float) -> list[str]:
    """What is unfortunate about these learners, in words; `reference` is the lambda to speak of."""
    return [
        *_dictates(members, forecasts, reference),
        *_waits(forecasts),
        *_transfers(forecasts),
        *_few_batches(members),
        *_drifts(members, forecasts, reference),
        *_stale(forecasts),
        *_refused(forecasts),
    ]


def _dictates(members: Sequence[Member], forecasts: Sequence[Forecast], reference: float) -> Iterator[str]:
    if len(members) < 2:
        return
    slowest, following = sorted(members, key=lambda member: member.epoch_time, reverse=True)[:2]
    ratio = slowest.epoch_time / following.epoch_time
    if ratio < DICTATES:
        return
    text = (
        f"{slowest.name} is so slow that it alone dictates the period: an epoch takes it "
        f"{seconds(slowest.epoch_time)}, {number(ratio)} times as long as {following.name}, the next. "
    )
    if any(found.kind == "semi-synchronous" for found in forecasts):
        without, period = (seconds(reference * member.epoch_time) for member in (following, slowest))
        text += f"Without it a period at lambda = {reference:g} would be {without} instead of {period}. "
    yield text + "Fewer examples or a faster machine there would help everybody."


def _waits(forecasts: Sequence[Forecast]) -> Iterator[str]:
    for found in forecasts:
        waiting = sorted((share for share in found.learners if share.idle > 0.5), key=lambda share: -share.idle)
        if waiting:
            who, most = listed([share.learner for share in waiting], 3), waiting[0].idle
            yield f"Under {found.policy.label}, {who} would wait more than half of the time (up to {percent(most)})."


def _transfers(forecasts: Sequence[Forecast]) -> Iterator[str]:
    worst: dict[str, float] = {}
    where: list[str] = []
    for found in forecasts:
        far = {share.learner: share.transfer for share in found.learners if share.transfer > MOST_EXCHANGE}
        if far:
            where.append(found.policy.label)
            worst |= {name: max(share, worst.get(name, 0.0)) for name, share in far.items()}
    if worst:
        who = sorted(worst, key=lambda name: -worst[name])
        yield (
            f"Transfers take more than {percent(MOST_EXCHANGE)} of the time of {listed(who, 3)} under "
            f"{listed(where, 3)} (up to {percent(worst[who[0]])})."
        )


def _few_batches(members: Sequence[Member]) -> Iterator[str]:
    few = [member for member in members if member.batches < FEW_BATCHES]
    if few:
        least = min(few, key=lambda member: member.batches)
        yield (
            f"{listed([member.name for member in few], 3)} hold{'s' if len(few) == 1 else ''} fewer than {FEW_BATCHES} "
            f"batches of examples ({least.name} {least.batches}): an epoch is hardly more than a step; a smaller "
            "batch_size there would make more of the data."
        )


def _drifts(members: Sequence[Member], forecasts: Sequence[Forecast], reference: float) -> Iterator[str]:
    batches = {member.name: member.batches for member in members}
    for found in forecasts:
        if found.slowest_learner_epochs not in (None, reference):
            continue
        many = sorted(
            (share for share in found.learners if share.local_epochs > MANY_EPOCHS),
            key=lambda share: -share.local_epochs,
        )
        if many:
            most, whose = many[0], "they hold; their models count" if len(many) > 1 else "it holds; its model counts"
            yield (
                f"Under {found.policy.label}, {listed([share.learner for share in many], 3)} would run more than "
                f"{MANY_EPOCHS:g} local epochs between two mixings ({most.learner} {number(most.local_epochs)}, on "
                f"{batches[most.learner]} batch{'' if batches[most.learner] == 1 else 'es'}) and fit what "
                f"{whose} {percent(math.fsum(share.weight for share in many))} of the mixture."
            )


def _stale(forecasts: Sequence[Forecast]) -> Iterator[str]:
    for found in forecasts:
        most = max(found.learners, key=lambda share: share.overtaken)
        if most.overtaken > STALE * (len(found.learners) - 1) > 0:
            yield (
                f"Under {found.policy.label}, {number(most.overtaken)} updates of others come between two of "
                f"{most.learner}: its model is stale when it is mixed."
            )


def _refused(forecasts: Sequence[Forecast]) -> Iterator[str]:
    for found in forecasts:
        if found.refused > 0:
            yield (
                f"Under {found.policy.label}, {number(found.refused)} updates an hour would come late and be refused; "
                "give it a longer limit or more grace."
            )
