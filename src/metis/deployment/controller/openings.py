"""The openings of masked rounds and windows: what all members must see alike, from where the federation stands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from metis.core.controller import Controller
from metis.core.events import CohortFixed, LearnerId, LocalTask, RoundClosed
from metis.core.mixing.windows import CachedWindows
from metis.core.model import Layout
from metis.core.ring import Ring
from metis.core.secure_sum import MOST_STEPS, PROTOCOL, Opening, Place, SignedKey, Trained, threshold


@dataclass(frozen=True, slots=True)
class MaskedRound:
    """Where the masked round stands after an event; for the event loop."""

    version: int
    sha256: str  # of the community model
    values: Mapping[LearnerId, float]  # what each member counts; none: no round has begun
    tasks: Mapping[LearnerId, LocalTask]  # that are still open
    ring: Ring | None
    least: int
    fewest: int
    fixed: bool
    closed: RoundClosed | None
    uploads: Mapping[LearnerId, str]  # the blobs of those that have handed in
    models: Mapping[int, str]  # SHA-256 of the community models that tasks are based on
    window: int = 0  # how many updates fill a window; 0 in rounds
    whole: bool = False  # whether a window is the sum of everybody's whole latest models
    latest: Mapping[LearnerId, tuple[int, float]] = field(default_factory=dict)  # then: their tasks, what they count
    resends: Mapping[LearnerId, int] = field(default_factory=dict)  # who is to hand its own in again, as which update
    away: frozenset[LearnerId] = frozenset()  # of those that have joined


def masked_round(
    controller: Controller, hashes: Mapping[int, str], blobs: Mapping[LearnerId, str]
) -> MaskedRound | None:
    """In the writer: of a run whose sums are masked; None of any other."""
    secure = controller.secure
    if secure is None:
        return None
    stamp = controller.community.stamp
    training = {record.learner: record.task for record in controller.roster.training if record.task is not None}
    cache = secure if isinstance(secure, CachedWindows) else None
    return MaskedRound(
        stamp.version,
        hashes[stamp.version],
        controller.member_values() if secure.values else {},
        {learner: task for learner, task in training.items() if secure.windowed or task.based_on == stamp},
        secure.ring if secure.values else None,
        secure.least,
        secure.fewest,
        secure.fixed,
        controller.closed,
        {learner: blobs[learner] for learner in secure.learners if learner in blobs},
        {task.based_on.version: hashes[task.based_on.version] for task in training.values()},
        secure.wanted if secure.windowed else 0,
        cache is not None,
        {} if cache is None else dict(cache.latest),
        secure.missing,
        frozenset(record.learner for record in controller.roster if not record.available),
    )


def handing_in(
    round_: MaskedRound, keys: Mapping[LearnerId, SignedKey], trained: Mapping[LearnerId, int]
) -> list[LearnerId]:
    """Who has something fresh for the next window: the first that have trained, or all if nobody else can.

    Nobody as long as these are too few.
    """
    there = [k for k, number in trained.items() if k in keys and k in round_.tasks and round_.tasks[k].number == number]
    full = len(there) >= min(round_.window, len(round_.tasks.keys() & keys.keys()))
    if not full or len(there) < round_.least:
        return []
    return there if round_.whole else there[: round_.window]


def made_opening(
    round_: MaskedRound,
    keys: Mapping[LearnerId, SignedKey],
    first: list[LearnerId],  # who has something fresh for a window
    run: str,
    layout: Layout,
    settings: bytes,
) -> Opening:
    """The opening of a round or window of all that have given a key."""
    tasks, members = round_.tasks, sorted(learner for learner in round_.tasks if learner in keys)
    assert round_.ring is not None, "it has begun"
    return Opening(
        protocol=PROTOCOL,
        run=run,
        version=round_.version,
        attempt=0,
        model=bytes.fromhex(round_.sha256),
        layout=bytes.fromhex(layout.fingerprint),
        settings=settings,
        rate=1.0 if round_.window else float(tasks[members[0]].rate),
        extra_vectors=int(layout.control.size > 0),
        ring=round_.ring if round_.window else replace(round_.ring, learners=len(members)),
        threshold=threshold(len(members)),
        least=round_.least,
        members=tuple(_place(round_, name, keys[name], name in first) for name in members),
        whole=int(round_.whole),
    )


def _place(round_: MaskedRound, name: LearnerId, key: SignedKey, fresh: bool) -> Place:
    task, again = round_.tasks[name], not fresh and name in round_.latest
    return Place(
        round_.latest[name][1] if again else round_.values[name],
        min(task.budget.steps or MOST_STEPS, MOST_STEPS),
        key,
        (_trained(round_, task),) if fresh else (),
        (round_.latest[name][0],) if again else (),
    )


def _trained(round_: MaskedRound, task: LocalTask) -> Trained:
    version = task.based_on.version
    return Trained(task.number, version, bytes.fromhex(round_.models[version]), float(task.rate))


def fixed_by(opening: Opening, waited: Mapping[LearnerId, float] | None = None) -> CohortFixed:
    """The event that everybody of a round, or who hands in what to a window, is known."""
    places = [place for place in opening.members if place.name in opening.handing_in]
    tasks = [task for place in places for task in (*(each.task for each in place.trained), *place.again)]
    seconds = () if not waited else tuple(round(waited.get(name, 0.0), 3) for name in opening.handing_in)
    return CohortFixed(opening.version, opening.handing_in, tuple(tasks), seconds)


def too_many_away(round_: MaskedRound, opening: Opening, done: Collection[LearnerId]) -> str:
    """Why a sum cannot be opened, in words; empty if it can, by those who have said what is asked, or are there."""
    away = sorted(round_.away & set(opening.names) - set(done))
    if len(opening.names) - len(away) >= opening.threshold:
        return ""
    names = ", ".join(f"'{learner}'" for learner in away)
    return f"the sum on community model {round_.version} cannot be opened before some of these are back: {names}"
