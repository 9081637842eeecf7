"""How long synchronization periods were, and why each of them changed, in words; from the trace alone.

Only protocols that explain themselves say so (`PeriodBegun`). Periods follow measured times, so that every one is a
little different: what is worth a sentence is a change of the reason, of whom nobody waits for, or of a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from metis.core.events import (
    Action,
    Event,
    LearnerJoined,
    LearnerLeft,
    LearnerSetAside,
    LearnerWithdrawn,
    MemberRemoved,
    MembersAwaited,
    PeriodBegun,
    SpeedChanged,
)
from metis.text import listed, number, plural, printable, seconds

_WORTH_SAYING = 1.25  # times longer or shorter
_MAX_NAMES = 5
MAX_CHANGES = 200  # the latest


@dataclass(frozen=True, slots=True)
class PeriodChange:
    """A period that is not like the one before."""

    at: float
    number: int  # of the period; 0 is the probe
    seconds: float  # infinite in a probe, which ends with the answers
    text: str


@dataclass(slots=True)
class PeriodsFold:
    """Folds events into the periods and their changes as they come."""

    changes: list[PeriodChange] = field(default_factory=list)
    latest: PeriodBegun | None = None
    count: int = 0  # of periods so far, without probes
    awaited: tuple[float, MembersAwaited] | None = None  # since when no masked round begins, and why
    _latest_said: PeriodBegun | None = None  # the one of the latest change
    _meanwhile: dict[str, str] = field(default_factory=dict)  # since the latest period: what happened, by learner

    def record(self, now: float, item: Event | Action) -> PeriodBegun | None:
        """Takes one item; returns it if a period begins with it."""
        match item:
            case PeriodBegun():
                self._begin(now, item)
                return item
            case MembersAwaited():
                self.awaited = (now if self.awaited is None else self.awaited[0], item) if item.reason else None
            case SpeedChanged():
                slower = item.now > item.before
                factor = item.now / item.before if slower else item.before / item.now
                how = f"has become {number(factor)} times {'slower' if slower else 'faster'}"
                self._meanwhile[item.learner] = how
            case LearnerJoined():
                self._meanwhile[item.learner] = "has joined"
            case LearnerLeft() | LearnerWithdrawn() | MemberRemoved() | LearnerSetAside():
                self._meanwhile[item.learner] = "has left"
            case _:
                pass
        return None

    def _begin(self, now: float, begun: PeriodBegun) -> None:
        before, self.latest = self._latest_said, begun
        probe = math.isinf(begun.seconds)
        self.count += not probe
        if before is None or self._differs(before, begun):
            self.changes.append(
                PeriodChange(now, 0 if probe else self.count, begun.seconds, self._words(before, begun))
            )
            del self.changes[:-MAX_CHANGES]
            self._latest_said = begun
        self._meanwhile.clear()

    def _differs(self, before: PeriodBegun, begun: PeriodBegun) -> bool:
        if (before.reason, before.not_awaited) != (begun.reason, begun.not_awaited):
            return True
        if math.isinf(begun.seconds) or math.isinf(before.seconds):
            return False
        return not 1 / _WORTH_SAYING < begun.seconds / before.seconds < _WORTH_SAYING

    def _words(self, before: PeriodBegun | None, begun: PeriodBegun) -> str:
        if math.isinf(begun.seconds):
            return f"A probe: {begun.reason}."
        text = f"Periods of {seconds(begun.seconds)}"
        if before is not None and math.isfinite(before.seconds):
            ratio = begun.seconds / before.seconds
            if not 0.95 < ratio < 1 / 0.95:
                text += f" instead of {seconds(before.seconds)}"
        text += f": {begun.reason}."
        left_out = set() if before is None else set(before.not_awaited)
        for learners, what in (
            (set(begun.not_awaited) - left_out, "not waited for from now on, because one batch takes too long"),
            (left_out - set(begun.not_awaited), "waited for again"),
        ):
            if learners:
                names = listed([f"'{printable(name)}'" for name in sorted(learners)], _MAX_NAMES)
                text += f" {names}: {what}."
        # At the start everybody joins: that explains nothing.
        if self.count > 1 and self._meanwhile:
            happened = [f"'{printable(learner)}' {how}" for learner, how in self._meanwhile.items()]
            text += f" Since the period before, {listed(happened, _MAX_NAMES)}."
        return text


def periods_of(events: Iterable[tuple[float, Event | Action]]) -> tuple[list[tuple[float, float]], list[PeriodChange]]:
    """When each period of a run began and how long it was to be, and the changes worth a sentence."""
    fold, points = PeriodsFold(), []
    for now, item in events:
        begun = fold.record(now, item)
        if begun is not None and math.isfinite(begun.seconds):
            points.append((now, begun.seconds))
    return points, fold.changes


def periods_in_short(points: list[tuple[float, float]]) -> str:
    """The lengths of all periods in one sentence."""
    if not points:
        return "no period yet"
    lengths = [length for _, length in points]
    low, high = seconds(min(lengths)), seconds(max(lengths))
    return f"{plural(len(points), 'period')}, {f'of {low}' if low == high else f'from {low} to {high}'}"
