"""Windows: who hands in what is in the opening, members train from different models, and no update is in two sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from metis.core.ring import Ring
from metis.core.secure_sum import Opening, Statement, Trained
from metis.errors import Refused
from privacy.cohort import MODEL, Cohort

OLDER = b"2" * 32


@pytest.fixture
def cohort() -> Cohort:
    """Seven members that take part in windows."""
    made = Cohort(7, 1)
    made.pins = replace(made.pins, windows=True)
    made.members = {name: made.restarted(name) for name in made.names}
    return made


def window(cohort: Cohort, version: int, tasks: dict[str, int], again: dict[str, int] | None = None) -> Opening:
    """One to which these members hand in these tasks, the last of them trained from the version before.

    With some who hand in again what they did before, or none of these, it is a window of whole models.
    """
    opening, stale = cohort.opening(version), list(tasks)[-1] if version else ""
    places = tuple(
        replace(
            place,
            weight=2**-0.5 if place.name == stale else 1.0,
            trained=()
            if (task := tasks.get(place.name)) is None
            else (Trained(task, version - (place.name == stale), bytes([version - (place.name == stale)]) * 32, 1.0),),
            again=() if again is None or place.name not in again else (again[place.name],),
        )
        for place in opening.members
    )
    ring = Ring(32, 1000, 1.0) if again is None else Ring(64, 1000, 1024.0)
    return replace(opening, members=places, ring=ring, model=bytes([version]) * 32, whole=int(again is not None))


def accept(cohort: Cohort, opening: Opening, names: Sequence[str] | None = None) -> None:
    for name in cohort.names if names is None else names:
        cohort.accept(name, opening, model=None)


def test_the_sum_of_a_window_is_opened_by_all_and_made_of_some(cohort: Cohort) -> None:
    """Also of updates that are differences from different models; who hands in nothing votes and answers."""
    for version in range(3):
        first = cohort.names[version : version + 4]
        opening = window(cohort, version, {name: 10 * version + k for k, name in enumerate(first)})
        accept(cohort, opening)
        opener, bodies, plain = cohort.opener(opening), {}, opening.ring.total(cohort.layout)
        for name in first:
            bodies[name] = cohort.body(name, opening, version)
            opening.ring.add(plain, bodies[name], cohort.layout)
            opener.take(cohort.members[name].mask(opening.context, bodies[name], cohort.layout))
        statement = opener.statement()
        opener.close(statement)
        for name in cohort.names[1:]:
            opener.vote(cohort.members[name].vote(statement))
        for name in cohort.names[1:]:
            opener.answer(cohort.members[name].answer(opener.request(name)))
        assert np.array_equal(opener.open(bodies, cohort.layout), plain)


def test_who_has_no_place_hands_in_nothing(cohort: Cohort) -> None:
    """Neither does it mask, nor is what it sends taken."""
    opening = window(cohort, 0, dict(zip(cohort.names, range(5), strict=False)))
    accept(cohort, opening)
    other, last = cohort.members[cohort.names[0]], cohort.names[-1]
    with pytest.raises(Refused, match="hands in nothing"):
        cohort.members[last].mask(opening.context, cohort.body(last, opening), cohort.layout)
    upload = other.mask(opening.context, cohort.body(other.name, opening), cohort.layout)
    stranger = replace(upload, name=last)
    signed = replace(stranger, signature=cohort.identities[last].sign(stranger.digest))
    with pytest.raises(Refused, match="hands in nothing"):
        cohort.opener(opening).take(signed)


def test_an_update_is_in_one_window_ever(cohort: Cohort) -> None:
    """A controller that says that it came late gets another one, of another task; also after a restart."""
    name, tasks = cohort.names[0], dict(zip(cohort.names, range(5), strict=False))
    first = window(cohort, 0, tasks)
    accept(cohort, first)
    cohort.members[name].mask(first.context, cohort.body(name, first), cohort.layout)
    cohort.members[name] = cohort.restarted(name)
    with pytest.raises(Refused, match="task 0 of h00, or a later one, was in an earlier window"):
        accept(cohort, window(cohort, 1, tasks), [name])
    newer = {who: task + 5 for who, task in tasks.items()}
    accept(cohort, window(cohort, 2, newer), [name])
    with pytest.raises(Refused, match="was in an earlier window"):
        accept(cohort, window(cohort, 3, {**newer, name: 4}), [name])
    cohort.members[name].erase()
    cohort.members[name] = cohort.restarted(name)
    with pytest.raises(Refused, match="was in an earlier window"):
        accept(cohort, window(cohort, 4, newer), [name])
    fifth = window(cohort, 5, {who: task + 10 for who, task in tasks.items()})
    accept(cohort, fifth, [name])
    cohort.members[name].mask(fifth.context, cohort.body(name, fifth), cohort.layout)


def test_a_member_sees_what_others_handed_in_before(cohort: Cohort) -> None:
    """Also who hands in nothing itself, and if the others have lost what they remember."""
    tasks, last = dict(zip(cohort.names, range(5), strict=False)), cohort.names[-1]
    accept(cohort, window(cohort, 0, tasks), [last])
    with pytest.raises(Refused, match="task 3 of h03, or a later one, was in an earlier window"):
        accept(cohort, window(cohort, 1, {**dict.fromkeys(tasks, 9), "h03": 3}), [last])
    accept(cohort, window(cohort, 2, dict.fromkeys(tasks, 9)), [last])


def test_a_window_of_whole_models_has_the_latest_of_everybody(cohort: Cohort) -> None:
    """Those without something fresh mask their latest once more, and the sum is of the very same numbers."""
    names, tasks = cohort.names, {}
    for version in range(4):
        fresh = {name: 10 * version + k for k, name in enumerate(names) if version == 0 or (k + version) % 7 < 4}
        opening = window(cohort, version, fresh, {name: task for name, task in tasks.items() if name not in fresh})
        tasks |= fresh
        accept(cohort, opening)
        opener, bodies, plain = cohort.opener(opening), {}, opening.ring.total(cohort.layout)
        for name in names:
            bodies[name] = cohort.body(name, opening, seed=tasks[name])
            opening.ring.add(plain, bodies[name], cohort.layout)
            opener.take(cohort.members[name].mask(opening.context, bodies[name], cohort.layout))
        assert opener.enough
        opener.close(opener.statement())
        for name in names[:-1]:
            opener.vote(cohort.members[name].vote(opener.statement()))
        for name in names[:-1]:
            opener.answer(cohort.members[name].answer(opener.request(name)))
        assert np.array_equal(opener.open(bodies, cohort.layout), plain)


def test_a_member_hands_in_again_only_its_latest(cohort: Cohort) -> None:
    first, second = ({name: 10 * n + k for k, name in enumerate(cohort.names)} for n in range(2))
    accept(cohort, window(cohort, 0, first, {}))
    accept(cohort, window(cohort, 1, second, {}))
    name, fresh = cohort.names[-1], dict.fromkeys(cohort.names[:5], 50)
    for version, task in enumerate((first[name], 99), start=2):
        opening = window(cohort, version, {k: task + version for k, task in fresh.items()}, {name: task})
        accept(cohort, opening, [name])
        with pytest.raises(Refused, match=f"task {task} is not the latest of {name} that a window had, which is 16"):
            cohort.members[name].mask(opening.context, cohort.body(name, opening), cohort.layout)
    opening = window(cohort, 4, dict.fromkeys(fresh, 60), {name: second[name]})
    accept(cohort, opening, [name])
    cohort.members[name].mask(opening.context, cohort.body(name, opening), cohort.layout)


def test_a_sum_needs_enough_that_is_fresh(cohort: Cohort) -> None:
    """However many hand in again: the opening is refused, and so is a statement about fewer of them."""
    tasks = {name: k for k, name in enumerate(cohort.names)}
    accept(cohort, window(cohort, 0, tasks, {}))
    fresh = dict.fromkeys(cohort.names[:3], 20)
    again = {name: task for name, task in tasks.items() if name not in fresh}
    with pytest.raises(Refused, match="needs 4 to 3 learners"):
        accept(cohort, window(cohort, 1, fresh, again))
    fresh["h03"] = 20
    opening = window(cohort, 2, fresh, {name: task for name, task in again.items() if name != "h03"})
    accept(cohort, opening)
    uploads = {
        name: member.mask(opening.context, cohort.body(name, opening), cohort.layout)
        for name, member in cohort.members.items()
    }
    names = cohort.names[1:]
    statement = Statement(opening.context, names, tuple(uploads[name].digest for name in names))
    with pytest.raises(Refused, match="a sum of 3 learners with something fresh is refused; 4 are the fewest"):
        cohort.members["h06"].vote(statement)
    opener = cohort.opener(opening)
    for name in names:
        opener.take(uploads[name])
    assert not opener.enough


def test_a_round_does_not_count_tasks(cohort: Cohort) -> None:
    """Windows before it change nothing for it."""
    name = cohort.names[0]
    first = window(cohort, 0, dict(zip(cohort.names, range(5, 10), strict=False)))
    accept(cohort, first)
    cohort.members[name].mask(first.context, cohort.body(name, first), cohort.layout)
    opening = cohort.opening(1)
    cohort.accept(name, opening)
    cohort.members[name].mask(opening.context, cohort.body(name, opening), cohort.layout)


def test_a_version_has_one_model_in_all_windows_of_a_member(cohort: Cohort) -> None:
    """The window after the one on version 1 cannot say that version 1 was another model."""
    tasks = dict(zip(cohort.names, range(5), strict=False))
    accept(cohort, window(cohort, 1, tasks))
    later = window(cohort, 2, {name: task + 5 for name, task in tasks.items()})

    def other(trained: tuple[Trained, ...]) -> tuple[Trained, ...]:
        return tuple(replace(each, model=OLDER) if each.version == 1 else each for each in trained)

    places = tuple(replace(place, trained=other(place.trained)) for place in later.members)
    with pytest.raises(Refused, match="community model 1 is not the same"):
        accept(cohort, replace(later, members=places))
    accept(cohort, later)


def test_in_a_round_the_model_is_always_compared(cohort: Cohort) -> None:
    """Not to give one is for windows only."""
    with pytest.raises(Refused, match="the model of the opening"):
        cohort.accept(cohort.names[0], cohort.opening(0), model=None)
    with pytest.raises(Refused, match="the model of the opening"):
        cohort.accept(cohort.names[0], window(cohort, 0, dict(zip(cohort.names, range(5), strict=False))), model=MODEL)
