"""A controller that lies about windows: it opens as many as members let it, and combines what it has seen.

An opened window is a weighted sum of local models, of which each is an unknown: a learner and its task. What the
controller can compute from all windows together is what is in the span of these sums. It must not have anything there
that is made of fewer than three honest learners' models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

from metis.core.ring import Ring
from metis.core.secure_sum import FEWEST, WIDER, Opening, Trained, min_learners
from privacy.adversary import Adversary, tried
from privacy.cohort import Cohort

_PRIME = 2**61 - 1


class WindowAdversary(Adversary):
    """Windows of differences, as FedBuff's, or of whole models, as the cache's."""

    def __init__(self, count: int, colluders: int, *, whole: bool, seed: int) -> None:
        cohort = Cohort(count, colluders, bits=64 if whole else 32)
        cohort.pins = replace(cohort.pins, windows=True)
        cohort.members = {name: cohort.restarted(name) for name in cohort.names}
        super().__init__(cohort, random.Random(f"{count} {colluders} {whole} {seed}"))
        self.whole, self.version, self.number, self.least = whole, -1, 0, min_learners(colluders)
        self.trained = dict.fromkeys(cohort.names, -1)  # the latest task of each

    # --- openings ---------------------------------------------------------------------------------

    def train(self, *names: str) -> dict[str, int]:
        """New tasks."""
        for name in names:
            self.number += 1
            self.trained[name] = self.number
        return {name: self.trained[name] for name in names}

    def window(
        self,
        fresh: Mapping[str, int],
        again: Mapping[str, int] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Opening:
        """The next one, with these tasks called fresh and these called known."""
        self.version += 1
        opening = self.cohort.opening(self.version)
        places = tuple(
            replace(
                place,
                weight=(weights or {}).get(place.name, 0.5 + index / 64),
                trained=(Trained(fresh[place.name], 0, opening.model, 1.0),) if place.name in fresh else (),
                again=((again or {})[place.name],) if place.name in (again or {}) else (),
            )
            for index, place in enumerate(opening.members)
        )
        ring = Ring(64 if self.whole else 32, 1000, WIDER if self.whole else 1.0)
        return replace(opening, members=places, ring=ring, whole=int(self.whole))

    def task_of(self, opening: Opening, name: str) -> int | None:
        mine = opening.trained_by(name)
        return opening.again_by(name) if mine is None else mine.task

    def open_window(self, opening: Opening, names: Iterable[str] | None = None) -> None:
        """Show it to all, and have the sum of these opened; members mask what it says, if they accept it."""
        self.openings[opening.context] = opening
        for name in opening.names:
            task = self.task_of(opening, name)
            if tried(self.cohort.accept, name, opening, model=None) is None or task is None:
                continue
            body = self.cohort.body(name, opening, seed=task)
            upload = tried(self.cohort.members[name].mask, opening.context, body, self.cohort.layout)
            if upload is not None:
                self.digests[opening.context, name].add(upload.digest)
                self.uploads[opening.context][name] = upload
        self._boxes_of_colluders(opening)  # now: who accepts the next window has no keys of this one any more
        statement = self.statement(opening, set(opening.handing_in if names is None else names) & set(opening.names))
        for name in opening.names:
            self.vote(name, statement)
        for name in self.honest:
            any(self.ask(name, statement) for _ in range(6))  # each time with other votes

    # --- what it works out ------------------------------------------------------------------------

    def fewest(self) -> int:
        """Of how few honest learners' models it can compute something; more than all if of none."""
        rows = [
            {(name, self.task_of(opening, name)): Fraction(opening.weights[name]) for name in group}
            for opening in self.openings.values()
            for group in self.seen(opening)
        ]
        unknowns = sorted({unknown for row in rows for unknown in row}, key=str)
        whole = _rank(rows, unknowns)
        for size in range(1, len(self.honest) + 1):
            for chosen in combinations(self.honest, size):
                if _rank(rows, [unknown for unknown in unknowns if unknown[0] not in chosen]) < whole:
                    return size
        return len(self.honest) + 1

    def check(self) -> int:
        """Assert that nothing can be computed of fewer than three honest learners; how many windows were opened."""
        fewest = self.fewest()
        assert fewest >= FEWEST, f"something of {fewest} honest learners' models can be computed"
        return sum(bool(self.seen(opening)) for opening in self.openings.values())


def _rank(rows: Sequence[Mapping[object, Fraction]], columns: Sequence[object]) -> int:
    """Of the matrix, modulo a large prime."""
    left = [
        [(x := row.get(column, Fraction(0))).numerator * pow(x.denominator, -1, _PRIME) % _PRIME for column in columns]
        for row in rows
    ]
    rank = 0
    for column in range(len(columns)):
        pivot = next((row for row in left if row[column]), None)
        if pivot is None:
            continue
        rank += 1
        inverse = pow(pivot[column], -1, _PRIME)
        left = [
            [(x - row[column] * inverse * y) % _PRIME for x, y in zip(row, pivot, strict=True)]
            for row in left
            if row is not pivot
        ]
    return rank


# --- strategies -----------------------------------------------------------------------------------


def by_the_rules(adversary: WindowAdversary) -> None:
    """Enough that is fresh each time, of whoever comes; in windows of whole models everybody else again."""
    names, least = adversary.cohort.names, adversary.least
    for _ in range(5):
        again = {n: task for n, task in adversary.trained.items() if task >= 0} if adversary.whole else {}
        fresh = adversary.train(*adversary.chance.sample(names, adversary.chance.randint(least, len(names))))
        again = {name: task for name, task in again.items() if name not in fresh and adversary.chance.random() < 0.8}
        opening = adversary.window(fresh, again)
        adversary.open_window(opening)


def repeats(adversary: WindowAdversary) -> None:
    """The same window again with one of its learners left out: it says that the first was never opened."""
    names = adversary.cohort.names
    fresh = adversary.train(*names)
    adversary.open_window(adversary.window(fresh))
    for left_out in adversary.honest[:6]:  # a member makes eight keys for what it has not accepted
        adversary.open_window(adversary.window({name: task for name, task in fresh.items() if name != left_out}))


def called_fresh(adversary: WindowAdversary) -> None:
    """All but one have moved on, and are called fresh with what they had handed in before."""
    names, target = adversary.cohort.names, adversary.honest[0]
    known = adversary.train(*names)
    adversary.open_window(adversary.window(known))
    adversary.open_window(adversary.window({**known, **adversary.train(target)}))
    adversary.open_window(adversary.window({name: known[name] for name in names if name != target}))


def too_few_fresh(adversary: WindowAdversary) -> None:
    """Only one has something fresh, and the others hand in again; with every number that would allow it."""
    names, target = adversary.cohort.names, adversary.honest[0]
    known = adversary.train(*names)
    adversary.open_window(adversary.window(known))
    others = {name: known[name] for name in names if name != target} if adversary.whole else {}
    for least in (1, len(names), adversary.least):
        opening = adversary.window(adversary.train(target), others)
        adversary.open_window(replace(opening, least=least))


def too_few_fresh_in_the_sum(adversary: WindowAdversary) -> None:
    """Enough are called fresh, but the sum is closed with one of them and all that hand in again."""
    names, target = adversary.cohort.names, adversary.honest[0]
    known = adversary.train(*names)
    adversary.open_window(adversary.window(known))
    least = adversary.least
    fresh = adversary.train(*names[:least])
    again = {name: known[name] for name in names if name not in fresh} if adversary.whole else {}
    opening = adversary.window(fresh, again)
    adversary.open_window(opening, {target, *again})
    adversary.open_window(adversary.window(adversary.train(*names[:least]), again), set(again))


def other_weights(adversary: WindowAdversary) -> None:
    """One counts a million times as much as the others, or they count nothing."""
    names, target = adversary.cohort.names, adversary.honest[0]
    for weights in ({target: 1e9}, dict.fromkeys(names[1:], 1e-9), dict.fromkeys(names[1:], 0.0), {target: -1.0}):
        adversary.open_window(adversary.window(adversary.train(*names), weights=weights))


def older_again(adversary: WindowAdversary) -> None:
    """What is handed in again is another task than the latest, and after a failure the one that failed is fresh."""
    names = adversary.cohort.names
    first = adversary.train(*names)
    adversary.open_window(adversary.window(first))
    second = adversary.train(*names)
    adversary.open_window(adversary.window(second), names[:2])  # it fails
    adversary.open_window(adversary.window(second))
    least = adversary.least
    third = adversary.train(*names[:least])
    older = {name: first[name] for name in names[least:]} if adversary.whole else {}
    adversary.open_window(adversary.window(third, older))
    adversary.open_window(adversary.window({**second, **adversary.train(names[0])}))


def anything(adversary: WindowAdversary) -> None:
    """Random places for old and new tasks, random sums, and members that restart or erase in between."""
    names, chance = adversary.cohort.names, adversary.chance
    known: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(8):
        fresh, again = {}, {}
        for name in names:
            if chance.random() < 0.5 or not known[name]:
                fresh |= adversary.train(name)
            elif chance.random() < 0.4:
                fresh[name] = chance.choice(known[name])
            elif adversary.whole:
                again[name] = chance.choice(known[name])
        for name in fresh:
            known[name].append(fresh[name])
        opening = adversary.window(fresh, again)
        if chance.random() < 0.3:
            opening = replace(opening, least=chance.randint(1, len(names)))
        adversary.open_window(opening, chance.sample(names, chance.randint(1, len(names))))
        for name in names:
            if chance.random() < 0.2:
                adversary.cohort.members[name] = adversary.cohort.restarted(name)
            elif chance.random() < 0.1:
                adversary.cohort.members[name].erase()


STRATEGIES: Sequence[Callable[[WindowAdversary], None]] = (
    by_the_rules, repeats, called_fresh, too_few_fresh, too_few_fresh_in_the_sum, other_weights, older_again, anything,
)  # fmt: skip


def attack_windows(
    count: int, colluders: int, whole: bool, strategy: Callable[[WindowAdversary], None], seed: int = 0
) -> int:
    """One strategy against a new cohort; how many windows it could open."""
    adversary = WindowAdversary(count, colluders, whole=whole, seed=seed)
    strategy(adversary)
    return adversary.check()
