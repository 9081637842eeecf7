"""Masked rounds in the core: what is closed, when it is published, what is refused, and that nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from core.layers.test_contract import EXAMPLES
from core.play import Actor, Play, model, snapshot
from metis.core.contribution import capped
from metis.core.controller import Controller
from metis.core.costs import CostLedger
from metis.core.events import (
    CohortFixed,
    CommunityPublished,
    CommunityStamp,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    MembersAwaited,
    RolledBack,
    RoundAbandoned,
    RoundClosed,
    RoundFailed,
    SendTask,
    StopRequested,
    StopRuleChanged,
    SumOpened,
    UpdateRefused,
)
from metis.core.layers import (
    AcceptLate,
    AdaptivePeriod,
    Cap,
    Compression,
    ControlVariates,
    FedAdam,
    FedNova,
    LargestShare,
    Layer,
    Median,
    Sample,
    SecureSum,
)
from metis.core.mixing import MemoryStore
from metis.core.mixing.secure import MessageBytes, SecureAverage, fewest_members
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import async_fedavg, fedasync, fedbuff, semisync, semisync_fedavg, sync_fedavg
from metis.core.policy import Policy
from metis.core.ring import Ring
from metis.core.secure_sum import min_learners
from metis.core.solvers import MomentumSGD, Scaffold
from metis.core.stop import StopRule
from metis.errors import ArgumentError, Refused, UnexpectedEvent

FIVE = {"ann": 0.1, "bob": 0.2, "eve": 0.3, "ida": 0.1, "max": 0.2}


def _cast(examples: int = 50) -> list[Actor]:
    return [
        Actor(name, time, examples=examples + 10 * index, batch_size=10)
        for index, (name, time) in enumerate(FIVE.items())
    ]


def _play(policy: Policy | None = None, stop: StopRule | None = None) -> Play:
    return Play(policy or sync_fedavg(1).with_layers(SecureSum()), *_cast(), stop=stop or StopRule(rounds=3))


def _secure(play: Play) -> SecureAverage:
    assert play.controller.secure is not None
    return play.controller.secure


def _buffer(size: int, colluders: int) -> object:
    policy = fedbuff(buffer_size=size).with_layers(SecureSum(colluders=colluders))
    return policy.start_community(model(), MemoryStore())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: fedasync().with_layers(SecureSum()), "publishes after every single update"),
        (lambda: sync_fedavg(weighting="steps").with_layers(SecureSum()), "before it is trained"),
        (lambda: semisync_fedavg(budget="deadline").with_layers(SecureSum()), "end with the time"),
        (lambda: sync_fedavg().with_layers(SecureSum(), Compression("top_k")), "leaves some out"),
        (lambda: sync_fedavg().with_layers(SecureSum(), Sample(learners=4)), "leaves most out"),
        (lambda: sync_fedavg().with_layers(SecureSum(), Median()), "compares local models"),
        (lambda: semisync_fedavg().with_layers(SecureSum(), AcceptLate()), "mixes what comes late"),
        (lambda: async_fedavg().with_layers(SecureSum()).for_solver(Scaffold(0.1)), "async_fedavg has no rounds"),
        (lambda: _buffer(3, colluders=1), "buffer_size is 3; under secure_sum with 1 colluders .* at least 4 learners"),
    ],
)
def test_what_cannot_work_under_masks_is_refused_with_the_reason(make: Callable[[], object], reason: str) -> None:
    """Whatever needs single models, other weights or no rounds says so before a run starts."""
    with pytest.raises(ArgumentError, match=reason):
        make()


def test_periods_caps_and_optimizers_keep_working() -> None:
    """They need the mixture, the public weights or the summed lengths only."""
    policy = semisync_fedavg(2).with_layers(SecureSum(), AdaptivePeriod(), FedAdam(), Cap(2.0))
    play = Play(policy, *_cast(), stop=StopRule(rounds=4)).run()
    assert play.version == 4 and "masked" in policy.label
    assert all(published.measure is not None for published in play.published())
    assert len(play.items(RoundClosed)) == len(play.items(SumOpened)) == 4


REFUSED = {
    "sample": "leaves most out",
    "robust": "compares local models, which nobody can under secure_sum",
    "late": "mixes what comes late with the next round, which secure_sum does not",
    "compression": "compression leaves some out or scales each learner's apart",
    "secure_sum": "secure_sum is given twice",
    "ckks": "is given together with",
}


@pytest.mark.parametrize("layer", EXAMPLES, ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("policy", [sync_fedavg(1), semisync_fedavg(2)], ids=lambda policy: policy.name)
def test_every_layer_works_on_sums_or_is_refused_by_name(policy: Policy, layer: Layer) -> None:
    """The same rounds, the same tasks, and numbers that differ from the plain ones by the ring's rounding."""
    solver = Scaffold(0.1, 0.5) if isinstance(layer, ControlVariates) else MomentumSGD(0.1, 0.5)
    if layer.key in REFUSED and not (layer.key == "late" and not policy.protocol.has_period):
        with pytest.raises(ArgumentError, match=REFUSED[layer.key]):
            policy.with_layers(layer, SecureSum())
        return
    try:
        plain = policy.with_layers(layer)
    except ArgumentError:  # it does not go with this policy, whatever is masked
        return
    runs = [
        Play(each.for_solver(solver)[0], *_cast(), stop=StopRule(rounds=4)).run()
        for each in (plain, plain.with_layers(SecureSum()))
    ]
    _alike(*runs)


def test_a_policy_of_differences_works_on_sums() -> None:
    """Differences and lengths are sums; without what comes late, a round is the same."""
    without_late = tuple(layer for layer in semisync().layers if not isinstance(layer, AcceptLate))
    plain = replace(semisync(), layers=without_late)
    _alike(
        *(Play(each, *_cast(), stop=StopRule(rounds=5)).run() for each in (plain, semisync().with_layers(SecureSum())))
    )


def _alike(plain: Play, masked: Play) -> None:
    expected = plain.controller.community.model.vector
    assert masked.version == plain.version >= 4 and not np.array_equal(expected, np.zeros_like(expected))
    np.testing.assert_allclose(masked.controller.community.model.vector, expected, rtol=1e-6, atol=2e-6)
    tasks = [[(item.learner, item.task.budget.steps) for item in play.items(SendTask)] for play in (plain, masked)]
    assert tasks[0] == tasks[1]


def test_a_share_is_limited_before_a_round_and_again_when_members_are_missing() -> None:
    """What each counts is public, so nobody needs to see a model for it."""
    play = _play(sync_fedavg(1).with_layers(SecureSum(), LargestShare(0.25)))
    while not play.tasks():
        play.step()
    everybody = {"ann": 50.0, "bob": 60.0, "eve": 70.0, "ida": 80.0, "max": 90.0}
    assert _secure(play).values == capped(everybody, 0.25) == {**everybody, "max": 80.0 + 20 / 3}
    play.handle(CohortFixed(0, ("ann", "bob", "eve", "ida")))
    assert _secure(play).values == dict.fromkeys(("ann", "bob", "eve", "ida"), 50.0)


def test_control_variates_have_a_section_of_their_own_and_cost_a_learner_of_the_sum() -> None:
    """One more vector of the same cohort: least - c >= m + 2."""
    policy, _ = sync_fedavg(1).with_layers(SecureSum(colluders=1)).for_solver(Scaffold(0.1))
    community = Play(policy, *_cast()).controller.secure
    assert community is not None
    assert community.extra_vectors == 1 and community.least == min_learners(1, 1) == 4
    assert len(Ring(32, 5, 4.0, 4.0).sections(community.model.layout)) == 3
    assert policy.update_bytes(community.model.layout) == Ring(32, 1, 4.0, 4.0).nbytes(community.model.layout)


def test_what_comes_late_gives_way_in_semisync() -> None:
    """It is one of its defaults; a masked round mixes what is there when it is closed."""
    masked = semisync().with_layers(SecureSum())
    assert not any(isinstance(layer, AcceptLate) for layer in masked.layers)
    assert any(isinstance(layer, AcceptLate) for layer in semisync().layers)


def test_equal_weights_do_not_ask_for_examples() -> None:
    """With weights = "equal" everybody counts the same, whatever its data."""
    play = _play(sync_fedavg(1).with_layers(SecureSum(weights="equal"))).run()
    assert {action.contribution_value for action in play.committed()} == {1.0}
    weighted = _play().run()
    assert {action.contribution_value for action in weighted.committed()} == {50.0, 60.0, 70.0, 80.0, 90.0}


def test_a_round_is_closed_before_it_is_published_and_nobody_is_added() -> None:
    """From the close to the sum: no tasks, late models are refused, who leaves or withdraws stays in the sum."""
    play = _play()
    play.opens = False
    play.actors["eve"].mood = "silent"
    play.run()
    assert play.items(RoundClosed) == []
    actions = play.handle(LearnerLeft("eve"))  # the last that was awaited
    closed = RoundClosed(0, ("ann", "bob", "ida", "max"), 5)
    assert actions == [closed] and play.controller.closed == closed
    task = play.items(SendTask)[0].task
    play.handle(LearnerWithdrawn("bob"))
    play.handle(LearnerJoined("eve", 70, 10))
    assert play.controller.closed == closed and _secure(play).learners == closed.learners
    total = _secure(play).total()
    with pytest.raises(UnexpectedEvent, match="model 3 is open"):
        play.handle(SumOpened(3, closed.learners, total))
    actions = play.handle(SumOpened(0, closed.learners, total))
    assert isinstance(actions[0], CommunityPublished) and actions[0].contributors == 4
    assert {action.learner for action in actions if isinstance(action, SendTask)} == {"ann", "ida", "max", "eve"}
    assert task.based_on == CommunityStamp(0, 0)
    with pytest.raises(UnexpectedEvent):
        play.handle(SumOpened(0, closed.learners, total))


def test_a_model_that_comes_after_the_close_is_late() -> None:
    """Its own mask is never opened, so it cannot count; its learner takes part in the next round."""
    play = Play(
        semisync_fedavg(1, cold_start_limit=1.0).with_layers(SecureSum()), *_cast(), Actor("old", 50.0, 50, 10),
        stop=StopRule(rounds=3),
    )  # fmt: skip
    play.opens = False
    play.run_until(time=3.0)
    assert play.controller.closed is not None and "old" not in play.controller.closed.learners
    play.run()
    late = [item for item in play.items(UpdateRefused) if item.learner == "old"]
    assert [item.kind for item in late] == ["late"] and "rebase onto 1" in late[0].reason
    play.opens = True
    play.handle(SumOpened(0, _secure(play).learners, _secure(play).total()))
    assert "old" in _secure(play).values


def test_a_round_with_too_few_models_begins_again_under_a_new_number() -> None:
    """What members have signed is bound to the version, so the same model gets another one; it does not count."""
    play = _play(sync_fedavg(1).with_layers(SecureSum(colluders=1)))
    for name in ("ann", "bob"):
        play.actors[name].mood = "failing"
    play.run_until(community_version=1)
    abandoned = RoundAbandoned(0, "3 of 5 members handed in a model, and a sum needs 4")
    assert play.items(RoundAbandoned) == [abandoned]
    published = play.published()[0]
    assert (published.stamp.version, published.contributors) == (1, 0)
    assert published.community_model.sha256() == model().sha256()
    assert play.controller.rounds == 0 and set(play.tasks()) == set(FIVE)
    for name in ("ann", "bob"):
        play.actors[name].mood = "well"
    play.run()
    assert play.controller.rounds == 3 and play.version > 3


def test_with_too_few_members_nothing_begins_until_more_are_there() -> None:
    """No round of fewer than four members is ever begun; a closed one is still opened."""
    play = _play()
    play.run_until(community_version=1)
    play.handle(LearnerLeft("ann"))
    play.handle(LearnerLeft("bob"))
    play.run_until(community_version=2)
    assert play.version == 2 and play.tasks() == {}  # three uploads are enough for a sum, three members are not
    reason = "a masked round begins with 4 learners or more, and 3 are there"
    play.run()
    assert play.version == 2 and play.items(MembersAwaited) == [MembersAwaited(("ann", "bob"), reason)]
    actions = play.handle(LearnerJoined("bob", 60, 10))
    assert len([action for action in actions if isinstance(action, SendTask)]) == 4
    assert not any(isinstance(action, RoundAbandoned) for action in actions)
    assert play.items(MembersAwaited)[1:] == [MembersAwaited((), "")]


def test_a_sum_that_is_lost_begins_again_and_one_that_does_not_fit_is_refused() -> None:
    """A sum over other weights than the public ones never becomes a model."""
    play = _play()
    play.opens = False
    play.run()
    total = _secure(play).total()
    wrong = total.copy()
    wrong[0] += 1
    with pytest.raises(Refused, match="contribution values"):
        _secure(play).mean(wrong)
    assert _secure(play).fits(total, _secure(play).learners) and not _secure(play).fits(wrong, _secure(play).learners)
    actions = play.handle(RoundFailed(0, "two members lost their keys"))
    assert actions[0] == RoundAbandoned(0, "two members lost their keys")
    assert play.controller.closed is None and play.version == 1 and len(play.tasks()) == 5


def test_stopping_or_rolling_back_leaves_a_closed_round_unopened() -> None:
    """What is not opened is not mixed."""
    play = _play()
    play.opens = False
    play.run()
    before = play.controller.community.model
    actions = play.handle(RolledBack(0, before))
    assert play.controller.closed is None and len([a for a in actions if isinstance(a, SendTask)]) == 5
    play.run()
    assert play.controller.closed is not None
    play.handle(StopRequested(publish=True))
    assert play.controller.finished and play.version == 1
    with pytest.raises(UnexpectedEvent):
        play.handle(SumOpened(1, _secure(play).learners, _secure(play).total()))


def test_a_federation_that_goes_on_after_its_end_begins_its_round_again() -> None:
    """At the end the members erased their secrets: what they masked can never be opened."""
    play = _play()
    play.opens = False
    play.run()
    play.handle(StopRequested(publish=False))
    actions = play.handle(StopRuleChanged(StopRule(rounds=9)))
    assert [type(action) for action in actions[:2]] == [RoundAbandoned, CommunityPublished]
    assert play.controller.closed is None and play.version == 1
    assert len([action for action in actions if isinstance(action, SendTask)]) == 5


def test_a_replay_without_weights_takes_the_same_course() -> None:
    """The sequence of events and actions does not depend on the numbers."""
    play = _play(semisync_fedavg(2).with_layers(SecureSum(), AdaptivePeriod())).run()
    again = Controller(
        semisync_fedavg(2).with_layers(SecureSum(), AdaptivePeriod()), Model.empty(), stop=StopRule(rounds=3),
        learners_expected=5, models_checked=True,
    )  # fmt: skip
    again.measures = {item.stamp.version: item.measure for item in play.published() if item.measure is not None}
    from metis.runs.trace import from_record, to_record

    log = [from_record(to_record(at, item)) for at, item in play.log]
    while log:
        at, event = log.pop(0)
        for action in again.handle(event, at):  # type: ignore[arg-type]
            assert to_record(at, action) == to_record(*log.pop(0))


def test_the_same_events_end_in_the_same_bits() -> None:
    """Whatever the order in which models arrived, the sum is the same."""
    assert snapshot(_play().run().controller) == snapshot(_play().run().controller)
    forward, backward = (_by_hand(order) for order in (list(FIVE), list(reversed(FIVE))))
    assert forward == backward


def _by_hand(order: list[str]) -> bytes:
    community = SecureAverage(model(1, 2, 3), Play(sync_fedavg(1), **FIVE).controller.store, SecureSum())
    community.begin({name: 10.0 + index for index, name in enumerate(FIVE)}, dict.fromkeys(FIVE, 5))
    for name in order:
        community.commit(name, model(len(name), FIVE[name], -FIVE[name]), 1.0, 5)
    community.close()
    community.open(community.learners, community.total())
    assert community.publish()
    return community.model.vector.tobytes()


def test_buffers_have_a_ring_of_their_own_and_losses_are_summed() -> None:
    """A running variance may go far beyond the clip; the mean loss of a round is known, single ones need not be."""
    layout = Layout((TensorSpec("weight", (2,)), TensorSpec("variance", (1,), role="buffer")))
    base = Model(layout, np.zeros(3, np.float32))
    community = SecureAverage(base, Play(sync_fedavg(1), **FIVE).controller.store, SecureSum(clip=1.0))
    community.begin({"a": 1.0, "b": 3.0, "c": 4.0}, dict.fromkeys("abc", 5))
    for name, loss in (("a", 1.0), ("b", 2.0), ("c", math.nan)):
        vector = np.array([0.5, 2.0, 1000.0 * len(name)], np.float32)
        community.commit(name, base.with_vector(vector), 1.0, 5)
        community.note_loss(name, loss)
    community.open(community.learners, community.total())
    community.publish()
    np.testing.assert_allclose(community.model.vector, [0.5, 1.0, 1000.0], rtol=1e-6)  # 2.0 is clamped
    assert community.measure is not None
    assert community.measure.loss == pytest.approx(7 / 8) and community.measure.clamped == pytest.approx(1 / 3)


def test_cohorts_and_costs() -> None:
    """The table of the thresholds, and bytes that are counted once a round."""
    assert [fewest_members(colluders) for colluders in range(4)] == [4, 5, 6, 8]
    sizes = MessageBytes.of(5, 4)
    ledger = CostLedger({}, 100, False)
    ledger.record(1.0, RoundClosed(0, ("a", "b", "c", "d"), 5))
    assert ledger.totals(1.0).bytes_exchanged == sizes.of_round(5, 4)
    assert sizes.of_round(5, 4) == 5 * (sum(sizes) - sizes.tail) + 4 * sizes.tail


def test_who_gave_no_key_has_no_part_in_the_round() -> None:
    """Its task is void, the ring is that of the others, and it takes part in the next round."""
    play = _play()
    while not play.tasks():
        play.step()
    with pytest.raises(UnexpectedEvent, match="model 1 is open"):
        play.handle(CohortFixed(1, ("ann", "bob", "eve", "ida")))
    play.handle(CohortFixed(0, ("ann", "bob", "eve", "ida")))
    assert set(play.tasks()) == {"ann", "bob", "eve", "ida"} and play.waiting() == ["max"]
    assert _secure(play).fixed and _secure(play).ring.learners == 4
    with pytest.raises(UnexpectedEvent, match="fixed already"):
        play.handle(CohortFixed(0, ("ann", "bob", "eve")))
    play.run_until(community_version=1)
    assert play.items(RoundClosed)[0] == RoundClosed(0, ("ann", "bob", "eve", "ida"), 4)
    assert not _secure(play).fixed and "max" in _secure(play).values


def test_who_left_before_the_keys_were_there_is_not_a_member() -> None:
    """It has no task any more; that it is left out changes nothing else."""
    play = _play()
    while not play.tasks():
        play.step()
    play.handle(LearnerLeft("max"))
    play.handle(CohortFixed(0, ("ann", "bob", "eve", "ida")))
    assert len(play.tasks()) == 4


def test_a_learner_that_was_caught_lying_is_not_in_the_sum() -> None:
    """The sum says whose models are in it; nobody may be in it who was not in the closed round."""
    play = _play()
    play.opens = False
    play.run()
    honest = ("ann", "bob", "eve", "ida")
    secure = _secure(play)
    most, base = max(secure.values.values()), model()
    local = {name: model(*secure._store.get(name)[:]) for name in honest}
    bodies = (secure.ring.quantize(local[k], base, secure.values[k], most, (0.0,) * 3).body for k in honest)
    whole = secure.ring.sum(bodies, base.layout)
    with pytest.raises(UnexpectedEvent, match="without these"):
        play.handle(SumOpened(0, (*honest, "mallory"), whole))
    actions = play.handle(SumOpened(0, honest, whole))
    assert isinstance(actions[0], CommunityPublished) and actions[0].contributors == 4


def test_a_learner_finds_its_own_factor_in_what_is_public() -> None:
    """As the controller does: from what all members count and how many steps each was asked for."""
    values, steps = {"a": 1.0, "b": 3.0}, {"a": 4, "b": 8}
    assert sync_fedavg().with_layers(SecureSum()).masked_factors(values, steps) == {"a": 1.0, "b": 1.0}
    assert sync_fedavg().with_layers(SecureSum(), FedNova(2.0)).masked_factors(values, steps) == {"a": 1.75, "b": 0.875}
