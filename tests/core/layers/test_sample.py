"""A sample of learners in each round, and periods that have room for the exchange."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from core.play import Actor, Play
from metis.core.events import Budget, CommunityPublished, SendTask, UpdateRequest
from metis.core.layers import AdaptivePeriod
from metis.core.layers.sample import Sample
from metis.core.policies import semisync_fedavg, sync_fedavg
from metis.core.roster import LearnerRecord

NAMES = [f"site-{number}" for number in range(20)]


def records(names: list[str]) -> list[LearnerRecord]:
    return [LearnerRecord(name, 100, 10) for name in names]


# --- the draw ---------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), st.integers(1, 30), st.integers(0, 10**6))
def test_a_draw_is_of_the_size_asked_for_and_does_not_depend_on_the_order(names, wanted, round_number):
    sample = Sample(learners=wanted)
    drawn = [record.learner for record in sample.draw(records(names), round_number)]

    assert len(drawn) == min(wanted, len(names))
    assert [name for name in names if name in drawn] == drawn, "in the order that was given"
    again = sample.draw(records(sorted(names, reverse=True)), round_number)
    assert {record.learner for record in again} == set(drawn)


@given(st.integers(1, 20), st.floats(0.01, 1))
def test_a_share_is_rounded_up(count, share):
    drawn = Sample(share=share).draw(records(NAMES[:count]), 1)
    assert len(drawn) == max(1, math.ceil(share * count * (1 - 1e-9)))


def test_everybody_has_the_same_chance():
    """Over 2,000 rounds each of 20 learners is drawn 500 times, give or take five standard deviations."""
    sample = Sample(learners=5)
    drawn = Counter(record.learner for number in range(2000) for record in sample.draw(records(NAMES), number))

    deviation = math.sqrt(2000 * 0.25 * 0.75)
    assert set(drawn) == set(NAMES)
    assert all(abs(count - 500) < 5 * deviation for count in drawn.values())


def test_another_seed_draws_others():
    one, other = (
        [{r.learner for r in Sample(learners=5, seed=seed).draw(records(NAMES), n)} for n in range(10)]
        for seed in (1, 2)
    )
    assert one != other
    assert len({frozenset(names) for names in one}) > 5, "and each round others"


# --- rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(1)], ids=lambda policy: policy.name)
def test_each_round_has_its_sample_and_waits_for_nobody_else(policy):
    """Three of ten train, the model is theirs, and over some rounds everybody has its turn."""
    play = Play(policy.with_layers(Sample(learners=3)), **dict.fromkeys(NAMES[:10], 0.1))
    play.run_until(community_version=25)

    by_version: dict[int, set[str]] = {}
    for item in play.items(SendTask):
        by_version.setdefault(item.task.based_on.version, set()).add(item.learner)
    assert {len(names) for names in by_version.values()} == {3}
    assert set().union(*by_version.values()) == set(NAMES[:10])
    assert {item.contributors for item in play.published()} == {3}
    assert not play.controller.policy.fills_the_period


def test_the_period_is_that_of_the_sample():
    """A slow learner that does not take part in a round does not make it longer; one that was never measured does
    its own cold start in the period of the others."""
    speeds = {name: (1.0 if name == NAMES[0] else 0.1) for name in NAMES[:6]}
    play = Play(semisync_fedavg(1).with_layers(Sample(learners=2)), **speeds).run_until(community_version=30)

    seen: set[str] = set()
    rounds: dict[int, list[SendTask]] = {}
    for _, item in play.log:
        if isinstance(item, SendTask):
            rounds.setdefault(item.task.based_on.version, []).append(item)
    for tasks in rounds.values():
        known = [task.learner for task in tasks if task.learner in seen]
        if known:
            period = max(50 * speeds[learner] for learner in known)
            for task in tasks:
                steps = math.floor(period / speeds[task.learner] + 1e-6) if task.learner in seen else 50
                assert task.task.budget == Budget(steps, pytest.approx(period))
        seen |= {task.learner for task in tasks}
    assert seen == set(speeds)


def test_a_replay_draws_the_same():
    policy = semisync_fedavg(timings="smoothed").with_layers(AdaptivePeriod()).with_layers(Sample(share=0.4))
    plays = [Play(policy, **dict.fromkeys(NAMES[:8], 0.1)).run_until(community_version=12) for _ in range(2)]
    assert plays[0].log == plays[1].log


def test_a_sample_whose_learners_have_left_is_drawn_again():
    play = Play(sync_fedavg(1).with_layers(Sample(learners=1)), a=0.1, b=0.1)
    play.step(), play.step()
    (first,) = play.tasks()
    play.leave(first, at=0.0)
    play.run_until(community_version=3)
    assert {item.learner for item in play.items(UpdateRequest)} == {"a", "b"} - {first}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "sample needs either learners or share, not both"),
        ({"learners": 2, "share": 0.5}, "sample needs either learners or share, not both"),
        ({"learners": 0}, "learners of sample is 0; it must be at least 1"),
        ({"share": 1.5}, "share of sample is 1.5; it must be greater than 0 and at most 1"),
    ],
)
def test_impossible_samples_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        Sample(**settings)


# --- room for the exchange ----------------------------------------------------------------------


def test_a_period_has_room_for_download_training_and_upload():
    """Near and far learners hand in at the same moment; outside the period, all wait for the far exchange."""
    cast = (Actor("near", 0.1), Actor("far", 0.1, transfer=4.0))
    inside, outside = (
        Play(semisync_fedavg(2, exchange=exchange), *cast).run_until(community_version=6)
        for exchange in ("inside", None)
    )
    for play in (inside, outside):
        gaps = [
            late - early
            for early, late in zip(play.times(CommunityPublished)[1:], play.times(CommunityPublished)[2:], strict=False)
        ]
        assert gaps == pytest.approx([2 * 50 * 0.1 + 4.0] * len(gaps)), "the far learner does its two epochs"
    assert inside.tasks() == {"near": 140, "far": 100}
    assert outside.tasks() == {"near": 100, "far": 100}
    assert inside.costs().by_learner["near"].idle < outside.costs().by_learner["near"].idle / 3


def test_a_learner_whose_exchange_fills_the_period_does_one_batch():
    cast = (Actor("near", 0.1), Actor("far", 0.1, transfer=60.0))
    play = Play(semisync_fedavg(0.5, exchange="inside", longest_period=10.0), *cast).run_until(community_version=2)
    assert play.tasks()["far"] == 1
