"""A controller that lies about everything, together with colluding members, and what it can work out.

It collects what honest members give it, whatever it asked for, puts shares together to seeds, and says which smallest
set of honest learners it can see the sum of. Nothing is assumed about what an answer should have contained: a share
counts if it fits the dealer's commitment, a seed if it fits its own.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeVar

from metis.core.canonical import HASH
from metis.core.secure_sum import (
    Abandonment,
    Opening,
    Request,
    Statement,
    Upload,
    Vote,
    min_learners,
    released,
    root,
    seed_commitment,
    threshold,
)
from metis.core.shamir import raw, recover
from metis.errors import Refused
from metis.privacy.keys import agree, pair_key, unseal
from privacy.cohort import Cohort, identity

Result = TypeVar("Result")


def tried(call: Callable[..., Result], *arguments: Any, **options: Any) -> Result | None:
    """What an honest member does; None if it refuses."""
    try:
        return call(*arguments, **options)
    except Refused:
        return None


class Adversary:
    """Owns the controller and the last c members of a cohort."""

    def __init__(self, cohort: Cohort, chance: random.Random) -> None:
        self.cohort, self.chance = cohort, chance
        self.colluders = cohort.names[len(cohort.names) - cohort.colluders :]
        self.honest = cohort.names[: len(cohort.names) - cohort.colluders]
        self.openings: dict[bytes, Opening] = {}
        self.uploads: dict[bytes, dict[str, Upload]] = defaultdict(dict)
        self.digests: dict[tuple[bytes, str], set[bytes]] = defaultdict(set)
        self.votes: dict[bytes, list[Vote]] = defaultdict(list)  # of honest members, by context
        self.shares: dict[tuple[bytes, int, int], dict[int, bytes]] = defaultdict(dict)  # context, dealer, secret

    # --- what it asks -----------------------------------------------------------------------------

    def open(self, opening: Opening, to: Iterable[str], **options: Any) -> list[str]:
        """Show an opening; who accepts it uploads the same local model as in every context of that version."""
        self.openings[opening.context] = opening
        accepted = []
        for name in to:
            if name in opening.names and tried(self.cohort.accept, name, opening, **options) is not None:
                body = self.cohort.body(name, opening, seed=opening.version)
                upload = self.cohort.members[name].mask(opening.context, body, self.cohort.layout)
                self.digests[opening.context, name].add(upload.digest)
                self.uploads[opening.context][name] = upload
                if name in self.honest:
                    accepted.append(name)
        return accepted

    def statement(self, opening: Opening, names: Iterable[str]) -> Statement:
        """With the true digests of what was uploaded, and invented ones for the rest."""
        uploads, names = self.uploads[opening.context], tuple(sorted(names))
        return Statement(
            opening.context, names, tuple(uploads[n].digest if n in uploads else bytes(HASH) for n in names)
        )

    def vote(self, name: str, statement: Statement) -> None:
        if name in self.honest and (vote := tried(self.cohort.members[name].vote, statement)):
            self.votes[statement.context].append(vote)

    def refuse(self, name: str, context: bytes) -> None:
        if name in self.honest and (vote := tried(self.cohort.members[name].refuse, context)):
            self.votes[context].append(vote)

    def collected(self, context: bytes, statement: bytes) -> tuple[Vote, ...]:
        """Everything that may pass for t votes: colluders vote for all, other votes are relabelled, some come twice."""
        real = [vote for vote in self.votes[context] if vote.statement == statement]
        bought = [self._signed(name, context, statement) for name in self.colluders]
        twice = [*real, *bought]
        other = [replace(vote, statement=statement) for votes in self.votes.values() for vote in votes]
        strange = [replace(vote, name=name) for vote in twice[:1] for name in self.honest]
        mixes = [twice, twice * 3, [vote for votes in self.votes.values() for vote in votes] + twice]
        return tuple(self.chance.choice([*mixes, twice + other, twice + strange]))

    def _signed(self, name: str, context: bytes, statement: bytes) -> Vote:
        vote = Vote(context, name, statement, b"")
        return replace(vote, signature=identity(name).sign(vote.signed))

    def ask(self, name: str, statement: Statement) -> bool:
        """Ask an honest member for shares and keep those that are shares; whether it answered."""
        opening = self.openings[statement.context]
        names, uploads = opening.names, self.uploads[statement.context]
        if name not in self.honest or name not in names:
            return False
        dealers = [uploads.get(dealer) for dealer in statement.names]
        index = names.index(name)
        boxes = tuple(b"" if upload is None else upload.boxes[index] for upload in dealers)
        roots = tuple(bytes(HASH) if upload is None else upload.roots[index] for upload in dealers)
        votes = self.collected(statement.context, statement.digest)
        answer = tried(self.cohort.members[name].answer, Request(statement, votes, boxes, roots))
        if answer is None:
            return False
        summed = frozenset(names.index(n) for n in statement.names)
        for dealer_name, given, committed in zip(statement.names, answer.rows, roots, strict=True):
            dealer = names.index(dealer_name)
            for opened in (released(dealer, summed, len(names)), range(len(names))):
                if root(opening.context, dealer, index, given, frozenset(opened)) == committed:
                    for k in opened:
                        self.shares[opening.context, dealer, k][index + 1] = given[HASH * k : HASH * (k + 1)]
        return True

    def ask_all(self, statements: Iterable[Statement]) -> None:
        for statement in statements:
            for name in self.honest:
                self.ask(name, statement)

    # --- what it works out ------------------------------------------------------------------------

    def _boxes_of_colluders(self, opening: Opening) -> None:
        """Colluders open all that was sealed to them."""
        names, context = opening.names, opening.context
        for name in set(self.colluders) & set(names):
            member, state = names.index(name), self.cohort.members[name]._state
            private = [held.private for held in state.keys if held.public.version == opening.version]
            for dealer_name, upload in self.uploads[context].items():
                if dealer_name == name or not private:
                    continue
                dealer = names.index(dealer_name)
                pair = agree(private[0], opening.members[dealer].key.key)
                shares = unseal(pair_key(pair, "box", context, dealer_name, name), upload.boxes[member], upload.digest)
                for k in range(len(names)) if shares else ():
                    assert shares is not None
                    self.shares[context, dealer, k][member + 1] = shares[HASH * k : HASH * (k + 1)]

    def seed(self, opening: Opening, dealer: int, k: int) -> bytes | None:
        """A secret of a dealer, if there are enough shares of it."""
        context, upload = opening.context, self.uploads[opening.context].get(opening.names[dealer])
        shares = self.shares[context, dealer, k]
        if upload is None or len(shares) < threshold(len(opening.names)):
            return None
        members = sorted(shares)[: opening.threshold]
        found = raw(recover({member: int.from_bytes(shares[member], "big") for member in members}))
        return found if seed_commitment(context, dealer, k, found) == upload.commitments[k] else None

    def smallest(self, opening: Opening) -> list[str] | None:
        """The smallest set of honest learners whose sum it sees; None if none."""
        seen = self.seen(opening)
        return min(seen, key=len) if seen else None

    def seen(self, opening: Opening) -> list[list[str]]:
        """The sets of honest learners whose sums it sees.

        Learners whose pair's seed is unknown are seen together or not at all.
        """
        self._boxes_of_colluders(opening)
        names, context = opening.names, opening.context
        honest = [n for n in range(len(names)) if names[n] in self.honest]
        own = {n for n in honest if self.seed(opening, n, n) is not None}
        groups = {n: {n} for n in honest}
        for one, other in combinations(honest, 2):
            if self.seed(opening, one, other) is None and self.seed(opening, other, one) is None:
                joined = groups[one] | groups[other]
                for n in joined:
                    groups[n] = joined
        seen = [
            group
            for group in groups.values()
            if group <= own and {names[n] for n in group} <= set(self.uploads[context])
        ]
        return [list(group) for group in sorted({tuple(sorted(names[n] for n in group)) for group in seen})]

    def check(self) -> int:
        """Assert that nothing was shown that may not be; how many contexts it could open."""
        opened: dict[int, int] = defaultdict(int)
        for opening in self.openings.values():
            found = self.smallest(opening)
            if found is not None:
                opened[opening.version] += 1
                fewest = min_learners(self.cohort.colluders) - self.cohort.colluders
                assert len(found) >= max(fewest, opening.least - self.cohort.colluders), f"it sees the sum of {found}"
        assert all(count == 1 for count in opened.values()), "the same models were summed twice"
        assert all(len(digests) == 1 for digests in self.digests.values()), "a body was masked twice"
        return sum(opened.values())


# --- strategies -------------------------------------------------------------------------------


def honest_round(adversary: Adversary, opening: Opening) -> None:
    """Everything by the rules, with everybody's votes: the largest cohort, the smallest sum."""
    adversary.open(opening, opening.names)
    statement = adversary.statement(opening, opening.names[: opening.least])
    for name in opening.names:
        adversary.vote(name, statement)
    adversary.ask_all([statement])


def split_views(adversary: Adversary, opening: Opening) -> None:
    """A different set of survivors to each member, so that the omissions cover everybody but the target."""
    adversary.open(opening, opening.names)
    target, times = adversary.chance.choice(adversary.honest), dict.fromkeys(opening.names, 0)
    statements = []
    for name in opening.names:
        others = sorted(
            (n for n in opening.names if n != target), key=lambda n: (times[n] >= opening.threshold, times[n])
        )
        omitted = others[: len(opening.names) - opening.least]
        for n in omitted:
            times[n] += 1
        statements.append(adversary.statement(opening, set(opening.names) - set(omitted)))
        adversary.vote(name, statements[-1])
    for name, statement in zip(opening.names, statements, strict=True):
        adversary.ask(name, statement)
    adversary.ask_all(statements)


def random_views(adversary: Adversary, opening: Opening) -> None:
    """Several sets of survivors, also too small ones, in any order, with members that are asked again after a crash."""
    chance = adversary.chance
    shown = adversary.open(opening, opening.names)
    for name in shown:
        if chance.random() < 0.3:
            adversary.cohort.members[name] = adversary.cohort.restarted(name)
            adversary.open(opening, [name])
    sizes = [chance.randint(1, len(opening.names)) for _ in range(4)]
    statements = [adversary.statement(opening, chance.sample(opening.names, size)) for size in sizes]
    statements.append(replace(statements[0], digests=tuple(bytes(HASH) for _ in statements[0].names)))
    for _ in range(3 * len(opening.names)):
        name, statement = chance.choice(opening.names), chance.choice(statements)
        chance.choice([adversary.vote, adversary.ask])(name, statement)
        if chance.random() < 0.1:
            adversary.refuse(name, opening.context)
    adversary.ask_all(statements)


def picked_cohort(adversary: Adversary, opening: Opening) -> None:
    """The target and colluders, with every t and least that would open it."""
    chance = adversary.chance
    few = max(3, adversary.cohort.colluders + chance.randint(1, 2))
    names = sorted({*adversary.colluders, *adversary.honest[:few]})[: max(few, 3)]
    if len(names) < 3:
        return
    places = tuple(place for place in opening.members if place.name in names)
    weak = replace(
        opening, members=places, ring=replace(opening.ring, learners=len(names)),
        threshold=chance.choice([threshold(len(names)), 1, 2]), least=chance.choice([1, 2, 3, len(names)]),
    )  # fmt: skip
    honest_round(adversary, weak)


def weak_threshold(adversary: Adversary, opening: Opening) -> None:
    """Everybody, but two votes or learners are enough."""
    honest_round(adversary, replace(opening, threshold=2, least=2))


def abandon_twice(adversary: Adversary, opening: Opening) -> None:
    """Some are made to refuse, the rest vote; the version is opened again without the target, and both are opened."""
    chance = adversary.chance
    adversary.open(opening, opening.names)
    first = adversary.statement(opening, opening.names)
    refusing = chance.randint(0, len(adversary.honest))
    for name in chance.sample(adversary.honest, refusing):
        adversary.refuse(name, opening.context)
    for name in opening.names:
        adversary.vote(name, first)
    votes = adversary.collected(opening.context, b"")
    again = replace(opening, attempt=1)
    adversary.open(again, opening.names, abandoned=[Abandonment(opening.context, votes)])
    second = adversary.statement(again, opening.names[1:])
    for name in opening.names:
        adversary.vote(name, second)
    adversary.ask_all([first, second])


def repeated_version(adversary: Adversary, opening: Opening) -> None:
    """The same version again, with nothing to show for it."""
    honest_round(adversary, opening)
    honest_round(adversary, replace(opening, attempt=1))
    honest_round(adversary, replace(opening, attempt=2, least=len(opening.names)))


def split_openings(adversary: Adversary, opening: Opening) -> None:
    """Members see different openings of one version, and everything is combined."""
    half = adversary.honest[: len(adversary.honest) // 2]
    other = replace(opening, attempt=1)
    adversary.open(opening, {*half, *adversary.colluders})
    adversary.open(other, {*adversary.honest, *adversary.colluders} - {*half})
    for shown in (opening, other):
        statement = adversary.statement(shown, shown.names)
        for name in shown.names:
            adversary.vote(name, statement)
        adversary.ask_all([statement])


STRATEGIES: Sequence[Callable[[Adversary, Opening], None]] = (
    honest_round, split_views, random_views, picked_cohort, weak_threshold, abandon_twice, repeated_version,
    split_openings,
)  # fmt: skip


def attack(count: int, colluders: int, least: int, strategy: Callable[[Adversary, Opening], None], seed: int) -> int:
    """One strategy against a new cohort; how many sums it could open."""
    cohort = Cohort(count, colluders)
    adversary = Adversary(cohort, random.Random(f"{count} {colluders} {least} {strategy.__name__} {seed}"))
    strategy(adversary, cohort.opening(least=least))
    return adversary.check()


def settings(counts: Iterable[int]) -> list[tuple[int, int, int]]:
    """Every N, c and least that members accept."""
    return [
        (count, colluders, least)
        for count in counts
        for colluders in range(count)
        if colluders <= min(2 * threshold(count) - count - 1, threshold(count) - 3)
        for least in range(min_learners(colluders), count + 1)
    ]
