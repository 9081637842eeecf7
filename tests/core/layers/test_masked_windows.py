"""Asynchronous policies under masks: sums are opened in windows of enough different learners, each of which waits."""

from __future__ import annotations

import numpy as np
import pytest

from core.play import Actor, Play, model
from metis.core.controller import Controller
from metis.core.events import (
    Action,
    CohortFixed,
    LearnerJoined,
    LearnerLeft,
    LearnerWithdrawn,
    MemberRemoved,
    MembersAwaited,
    ModelResent,
    RoundAbandoned,
    RoundClosed,
    RoundFailed,
    SendTask,
    SumOpened,
    TaskFailed,
    UpdateRequest,
)
from metis.core.layers import FedAdam, LargestShare, SecureSum
from metis.core.mixing import MemoryStore
from metis.core.mixing.windows import BufferedWindows, CachedWindows, Windows, whole_body
from metis.core.model import Model
from metis.core.policies import async_fedavg, fedbuff, fedrec, sync_fedavg
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.errors import ArgumentError, Refused, UnexpectedEvent

TIMES = {"a": 0.1, "bb": 0.13, "ccc": 0.31, "dddd": 0.07, "eeeee": 0.2, "ffffff": 0.25}
WINDOWED = {
    "async_fedavg": async_fedavg(1).with_layers(SecureSum()),
    "fedrec": fedrec(1).with_layers(SecureSum(colluders=1)),
    "equal": async_fedavg(1).with_layers(SecureSum(weights="equal")),
    "fedbuff": fedbuff(1, buffer_size=4, server_learning_rate=0.7).with_layers(SecureSum()),
    "optimized": fedrec(1).with_layers(SecureSum(), FedAdam()),
}
every = pytest.mark.parametrize("policy", WINDOWED.values(), ids=list(WINDOWED))


def _play(policy: Policy, rounds: int = 12) -> Play:
    cast = [Actor(name, time, 40 + 10 * len(name), 10) for name, time in TIMES.items()]
    return Play(policy, *cast, stop=StopRule(rounds=rounds))


@every
def test_a_window_holds_enough_different_learners_and_each_waits_for_it(policy: Policy) -> None:
    """No sum of fewer than c + 3, nobody twice in one, and no tasks for those in it until it is opened."""
    play = _play(policy)
    secure = play.controller.secure
    assert secure is not None and secure.windowed
    while play.step() and not play.controller.finished:
        assert not set(secure.fresh) & set(play.tasks())
    closed = play.items(RoundClosed)
    assert len(closed) == play.version == 12
    fresh = [len(each.learners) - each.resent for each in closed]
    assert all(len(set(each.learners)) == len(each.learners) for each in closed)
    assert min(fresh) >= secure.wanted >= secure.least
    assert any(each.resent for each in closed) == policy.sums_whole_models


@pytest.mark.parametrize("name", ["async_fedavg", "fedrec", "equal"])
def test_a_window_is_the_sum_of_everybodys_latest(name: str) -> None:
    """Of those with something new, and again of the others; to the bit, also if one of these hands in meanwhile."""
    play = _play(WINDOWED[name])
    community = play.controller.secure
    assert isinstance(community, CachedWindows)
    latest: dict[str, tuple[float, np.ndarray]] = {}
    play.opens, replaced = False, 0
    for _ in range(12):
        while play.controller.closed is None:
            assert play.step()
        closed, ring, base = play.controller.closed, community.ring, community.model
        latest = {k: (community.counted(k), np.array(community._store.get(f"{k}\n"))) for k in closed.learners}
        assert closed.resent == len(community.resent) == len(latest) - len(set(latest) - set(community.resent))
        most = max(p for p, _ in latest.values())
        bodies = (whole_body(ring, base.with_vector(w), p, most) for p, w in latest.values())
        total = ring.sum(bodies, base.layout)
        while set(play.tasks()) & set(community.resent):  # for the next window, before this one is opened
            assert play.step()
            replaced += 1
        assert np.array_equal(community.total(), total) and community.fits(total, closed.learners)
        assert ("windows/sum" in community.arrays()) == bool(community.fresh)
        play.handle(SumOpened(closed.version, closed.learners, community.total()))
        mean = sum(p * w.astype(np.float64) for p, w in latest.values()) / sum(p for p, _ in latest.values())
        np.testing.assert_allclose(community.model.vector, mean, rtol=1e-6, atol=1e-6)
    assert len(latest) == 6 and replaced > 6


def test_who_is_away_is_not_in_the_sum_and_comes_back_with_its_latest() -> None:
    """The cost is one upload of every member that is there."""
    play = _play(async_fedavg(1).with_layers(SecureSum()), rounds=1000)
    play.run_until(community_version=4)
    play.leave("a", play.now)
    play.run_until(community_version=8)
    assert all("a" not in each.learners for each in play.items(RoundClosed)[5:])
    play.actors["a"].time_per_batch = 1e6
    play.join("a", play.now)
    play.run_until(community_version=10)
    last = play.items(RoundClosed)[-1]
    assert "a" in last.learners and "a" in play.tasks() and last.resent == 6 - 3
    assert play.controller.secure is not None and play.controller.secure.contributors == 0


def test_a_buffer_makes_the_step_that_fedbuff_makes() -> None:
    """w += rate / K sum s_k (w_k - base_k), each from the model that it started from."""
    community = BufferedWindows(model(1, 2, 3), MemoryStore(), SecureSum(), buffer_size=3, server_learning_rate=0.5)
    bases = {"a": model(1, 2, 3), "b": model(0, 2, 1), "c": model(1, 1, 1)}
    local = {"a": model(1.5, 2, 3), "b": model(0, 1, 1), "c": model(2, 1, -1)}
    values = {"a": 1.0, "b": 0.5, "c": 0.25}
    for k, base in bases.items():
        community.commit(k, local[k], values[k], 5, base)
    community.close()
    community.commit("d", model(9, 9, 9), 1.0, 5, model(8, 8, 8))  # the next window's
    community.withdraw("a")
    assert community.contributors == 3 and not community.publish()
    community.open(community.learners, community.total())
    assert community.publish() and community.learners == ("d",) and community.committed_steps == 20
    step = sum(values[k] * (local[k].vector.astype(float) - bases[k].vector) for k in bases)
    np.testing.assert_allclose(community.model.vector, np.array([1, 2, 3]) + 0.5 / 3 * step, atol=1e-7)
    wrong = community.total()
    wrong[0] += 1
    community.close()
    with pytest.raises(Refused, match="contribution values"):
        community.mean(wrong)


def test_a_window_closes_early_when_nobody_is_left_who_could_fill_it() -> None:
    """A buffer of ten with six learners, each once: all wait, so it is opened; but never below c + 3."""
    policy = fedbuff(1, buffer_size=10).with_layers(SecureSum())
    play = _play(policy, rounds=3).run()
    assert [len(each.learners) for each in play.items(RoundClosed)] == [6, 6, 6]
    play = _play(policy)
    for name in ("bb", "ccc", "dddd", "eeeee"):
        play.actors[name].mood = "silent"
    play.run()
    for name in ("bb", "ccc", "dddd"):
        play.handle(LearnerLeft(name))
    assert not play.items(RoundClosed)
    play.handle(LearnerLeft("eeeee"))
    assert not play.items(RoundClosed) and play.version == 0  # two are fewer than three


def test_who_withdraws_is_in_no_later_window_and_newcomers_count_at_once() -> None:
    """Also one whose model is in a window that is being opened; that one is opened as it is."""
    play = _play(async_fedavg(1).with_layers(SecureSum()))
    community = play.controller.secure
    assert isinstance(community, CachedWindows)
    while not community.learners:
        play.step()
    first = community.learners[0]
    assert community.contributors == 1
    play.handle(LearnerWithdrawn(first))
    play.handle(LearnerWithdrawn("ffffff"))  # with nothing to take back
    assert community.learners == () and first not in play.waiting()
    play.run_until(community_version=3)
    play.opens = False
    while play.controller.closed is None:
        play.step()
    closed = play.controller.closed
    play.handle(LearnerWithdrawn(gone := closed.learners[-1]))
    play.opens = True
    play.handle(SumOpened(closed.version, closed.learners, community.total()))
    play.cast(Actor("g", 0.05, 30, 10), at=play.now)
    play.run_until(community_version=6)
    assert "g" in community.latest and gone not in community.latest and first not in community.latest


def test_a_window_that_fails_is_dropped_and_its_learners_train_again() -> None:
    """Nobody was fresh in it in vain: what they have handed in is their latest, and is never fresh again."""
    play = _play(async_fedavg(1).with_layers(SecureSum()))
    community = play.controller.secure
    assert isinstance(community, CachedWindows)
    play.run_until(community_version=2)
    play.opens = False
    while play.controller.closed is None:
        play.step()
    closed, latest = play.controller.closed, dict(community.latest)
    actions = play.handle(RoundFailed(play.version, "two members lost their keys"))
    assert isinstance(actions[0], RoundAbandoned) and community.latest == latest and not community.learners
    assert set(closed.learners) <= set(play.tasks())


def test_a_learner_that_was_caught_lying_is_left_out_of_a_window() -> None:
    """The sum says whose models are in it."""
    play = _play(async_fedavg(1).with_layers(SecureSum()))
    community = play.controller.secure
    assert isinstance(community, CachedWindows)
    play.run_until(community_version=2)
    play.opens = False
    while play.controller.closed is None:
        assert play.step()
    *honest, liar = community.learners
    ring, base = community.ring, community.model
    local = {k: base.with_vector(np.array(community._store.get(f"{k}\n"))) for k in honest}
    bodies = (whole_body(ring, local[k], community.counted(k), community.most) for k in honest)
    play.handle(SumOpened(play.version, tuple(honest), ring.sum(bodies, base.layout)))
    assert play.published()[-1].contributors == len(honest) and liar in community.latest


def test_nothing_begins_with_too_few_members() -> None:
    """What is being trained is handed in, and then nobody trains until more are there."""
    play = _play(async_fedavg(1).with_layers(SecureSum(colluders=2)))
    play.run_until(community_version=2)
    play.leave("a", play.now)
    play.run()
    assert play.version <= 3 and not play.tasks()  # five tolerate one colluder, not two
    play.handle(LearnerJoined("a", 50, 10))
    assert "a" in play.tasks()


@every
def test_a_window_that_cannot_begin_says_once_who_is_not_there(policy: Policy) -> None:
    """Who was removed is not waited for; once enough are there, that is said too, and nothing after the end."""
    play = _play(policy, rounds=4)
    play.run_until(community_version=1)
    assert play.controller.secure is not None
    fewest = play.controller.secure.fewest
    gone = list(TIMES)[fewest - 1 :]
    for name in gone[:-1]:
        play.handle(LearnerLeft(name))
    play.handle(MemberRemoved(gone[-1]))
    play.run()
    said = play.items(MembersAwaited)
    reason = f"a masked window begins with {fewest} learners or more, and {fewest - 1} are there"
    assert said[-1] == MembersAwaited(tuple(gone[:-1]), reason) and play.controller.awaited == said[-1]
    assert len(said) == len(set(said))
    play.handle(LearnerJoined(gone[0], 40, 10))
    assert play.items(MembersAwaited)[len(said) :] == [MembersAwaited((), "")] and play.controller.awaited is None
    play.run()
    assert play.controller.finished and len(play.items(MembersAwaited)) == len(said) + 1


def test_shares_of_a_window_cannot_be_limited_afterwards() -> None:
    """Each learner has weighed its difference when the window is opened."""
    with pytest.raises(ArgumentError, match="share"):
        async_fedavg().with_layers(SecureSum(), LargestShare())


# --- where members agree on keys, so that it is known who hands in what ----------------------------


class _Window:
    """A controller whose updates are masked: what it is handed has no numbers."""

    def __init__(self, learners: str = "abcde", policy: Policy | None = None) -> None:
        policy = (policy or fedbuff(1, buffer_size=4)).with_layers(SecureSum())
        self.controller = Controller(policy, model(), learners_expected=len(learners), models_checked=True)
        self.tasks: dict[str, int] = {}
        for name in learners:
            self.handle(LearnerJoined(name, 40, 10))
        window = self.controller.secure
        assert isinstance(window, Windows)
        self.window = window

    def handle(self, event: object) -> list[Action]:
        actions = self.controller.handle(event, 1.0)  # type: ignore[arg-type]
        self.tasks |= {action.learner: action.task.number for action in actions if isinstance(action, SendTask)}
        return actions

    def fix(self, learners: str, again: str = "") -> None:
        window, tasks = self.window, self.numbers(learners)
        if isinstance(window, CachedWindows):
            tasks += tuple(window.latest[name][0] for name in again)
        self.handle(CohortFixed(self.controller.community.stamp.version, (*learners, *again), tasks))

    def numbers(self, learners: str) -> tuple[int, ...]:
        return tuple(self.tasks[name] for name in learners)

    def hand_in(self, learner: str) -> list[Action]:
        return self.handle(UpdateRequest(learner, self.tasks[learner], 4, 0.4, 0.1, Model.empty()))

    def opened(self, learners: str) -> list[Action]:
        """The sum of those in the window, each of which has moved by nothing."""
        ring, nothing, most = self.window.ring, self.window.model, self.window.most
        bodies = (ring.quantize(nothing, nothing, self.window.counted(k), most, (0.0,) * 3).body for k in learners)
        total = ring.sum(bodies, nothing.layout)
        assert self.window.fits(total, learners) and not self.window.fits(total, learners[1:])
        return self.handle(SumOpened(self.controller.community.stamp.version, tuple(learners), total))


def test_a_window_is_opened_when_those_that_it_has_a_place_for_have_handed_in() -> None:
    """Not before, although fewer would do and others train; the next has older updates, which count less."""
    play = _Window()
    assert play.controller.member_values() == dict.fromkeys("abcde", 1.0)
    play.fix("abcd")
    assert [len(play.hand_in(name)) for name in "abc"] == [1, 1, 1]  # committed, and no more
    assert RoundClosed(0, tuple("abcd"), 5) in play.hand_in("d")
    actions = play.opened("abcd")
    assert {action.learner for action in actions if isinstance(action, SendTask)} == set("abcd")
    assert not play.window.fixed and not play.window.expected
    assert play.controller.member_values() == {**dict.fromkeys("abcd", 1.0), "e": 2**-0.5}
    play.fix("abe")
    for name in "abe":
        play.hand_in(name)
    assert play.window.counted("e") == 2**-0.5 and not play.window.arrays()
    play.window.load_arrays(play.window.model, {}, play.controller.store)
    play.opened("abe")
    assert play.controller.community.stamp.version == 2


def test_a_window_goes_on_without_those_that_are_gone_and_begins_again_if_they_are_too_many() -> None:
    """Whose task has failed trains another one, which is not what the window has a place for."""
    play = _Window()
    play.fix("abcd")
    for name in "abc":
        play.hand_in(name)
    failed = play.tasks["d"]
    actions = play.handle(TaskFailed("d", failed, "out of memory"))
    assert any(isinstance(action, RoundClosed) for action in actions) and play.controller.closed is not None
    play.opened("abc")
    assert "d" in play.window.values and play.tasks["d"] != failed
    play.fix("abcd")
    play.hand_in("a")
    for name in "bc":
        play.handle(LearnerLeft(name))
    assert play.controller.community.stamp.version == 1
    actions = play.handle(LearnerLeft("d"))
    assert [action.version for action in actions if isinstance(action, RoundAbandoned)] == [1]
    assert play.controller.community.stamp.version == 2 and not play.window.learners and not play.window.fixed


def test_a_round_knows_what_its_members_count_before_they_train() -> None:
    policy = sync_fedavg(1).with_layers(SecureSum())
    controller = Controller(policy, model(), learners_expected=4)
    for name, examples in zip("abcd", (10, 20, 30, 40), strict=True):
        controller.handle(LearnerJoined(name, examples, 10), 0.0)
    assert controller.member_values() == {"a": 10.0, "b": 20.0, "c": 30.0, "d": 40.0}


@pytest.mark.parametrize("policy", [fedbuff(1, buffer_size=4), async_fedavg(1)], ids=["fedbuff", "async_fedavg"])
def test_nothing_that_was_masked_stays_when_its_window_is_over(policy: Policy) -> None:
    """Neither of those in the sum, nor of one that was left out of it or has withdrawn."""
    play = _Window(policy=policy)
    store = play.controller.store
    assert isinstance(store, MemoryStore)
    play.fix("abcde")
    for name in "abcde":
        play.hand_in(name)
    assert set(store._vectors) == set("abcde")
    play.opened("abcd")
    assert not store._vectors
    if isinstance(play.window, CachedWindows):
        play.fix("abc", again="d")
        play.hand_in("a")
        play.handle(LearnerWithdrawn("a"))
        assert not store._vectors


def test_a_window_has_places_once() -> None:
    play = _Window()
    play.fix("abcd")
    with pytest.raises(UnexpectedEvent, match="fixed already"):
        play.fix("abce")


class _Cache(_Window):
    """The same of the cache, in which everybody is in every window."""

    def __init__(self) -> None:
        super().__init__(policy=async_fedavg(1))
        assert isinstance(self.window, CachedWindows)
        self.cache = self.window

    def resend(self, learner: str, *, lost: bool = False) -> list[Action]:
        return self.handle(ModelResent(learner, self.cache.resends[learner], lost))

    def first(self) -> None:
        """A window of four, all of them fresh."""
        self.fix("abcd")
        for name in "abcd":
            self.hand_in(name)
        self.opened("abcd")


def test_a_window_of_the_cache_waits_for_those_that_hand_in_again() -> None:
    """Each under a number of its own, while it trains something else."""
    play = _Cache()
    play.first()
    assert set(play.cache.latest) == set("abcd") and play.cache.latest["a"] == (0, 40.0)
    before = dict(play.tasks)
    play.fix("ace", again="bd")
    assert play.cache.resends == {"b": 9, "d": 10} and set(play.cache.missing) == set("bd")
    for name in "ace":
        assert not any(isinstance(action, RoundClosed) for action in play.hand_in(name))
    play.resend("b")
    assert play.controller.closed is None and play.controller.resend_of("b") is None
    assert play.controller.resend_of("d") == 10 and play.controller.open_updates == {10, before["b"], before["d"]}
    assert play.cache.learners == tuple("abce")
    assert RoundClosed(1, tuple("abcde"), 5, 2) in play.resend("d")
    with pytest.raises(UnexpectedEvent, match="no window waits for"):
        play.handle(ModelResent("b", 9))
    play.opened("abcde")
    assert play.cache.latest["a"] == (before["a"], 40.0) and play.cache.latest["b"] == (1, 40.0)
    assert play.tasks["b"] == before["b"] and play.tasks["a"] == 11
    with pytest.raises(UnexpectedEvent, match="no window waits for"):
        play.handle(ModelResent("b", 9))


def test_a_window_of_the_cache_goes_on_without_who_has_left_or_lost_its_model() -> None:
    play = _Cache()
    play.first()
    play.fix("ace", again="bd")
    for name in "ace":
        play.hand_in(name)
    play.resend("b", lost=True)
    assert "b" not in play.cache.latest and play.controller.closed is None
    assert RoundClosed(1, tuple("ace"), 4, 0) in play.handle(LearnerLeft("d"))
    play.opened("ace")
    play.handle(LearnerJoined("d", 40, 10))
    play.fix("abc", again="de")
    assert play.cache.resends.keys() == set("de")


def test_a_window_of_the_cache_needs_enough_that_is_fresh() -> None:
    """However many have handed in again; what was handed in to it is the latest of its learner."""
    play = _Cache()
    play.first()
    play.fix("abc", again="d")
    mine = play.tasks["a"]
    play.hand_in("a")
    play.resend("d")
    play.handle(LearnerLeft("b"))
    actions = play.handle(LearnerLeft("c"))
    assert [action.reason for action in actions if isinstance(action, RoundAbandoned)] == [
        "1 of 5 members handed in something new, and a window needs 3"
    ]
    assert play.cache.latest["a"] == (mine, 40.0) and not play.cache.resends and not play.cache.learners
    play.handle(LearnerWithdrawn("a"))
    assert "a" not in play.cache.latest
    assert play.cache.arrays(local_models=False) == {}


def test_what_is_handed_in_again_is_not_an_update_of_fedbuff() -> None:
    play = _Window()
    play.fix("abcd")
    with pytest.raises(UnexpectedEvent, match="no window waits for"):
        play.handle(ModelResent("e", 5))


def test_an_update_of_fedrec_counts_by_what_was_committed_before_its_window() -> None:
    """So that it is public what it counts before it is masked, whatever is handed in first."""
    play = _Window(policy=fedrec(1))
    for name in "abcd":
        play.handle(TaskFailed(name, play.tasks[name], "as the test wants"))
    values = play.controller.member_values()
    play.fix("abcde")
    for name in "abcde":
        play.hand_in(name)
    assert values == {name: play.window.counted(name) for name in "abcde"} == dict.fromkeys("abcde", 1.0)
    assert play.window.value("a", 1e-9) == 1e-3  # or no site would take part in the window


def test_a_replay_without_weights_opens_the_sum_of_nothing() -> None:
    """The public weights are right, so that it goes on as it did."""
    policy = async_fedavg(1).with_layers(SecureSum())
    controller = Controller(policy, Model.empty(), learners_expected=4, models_checked=True)
    tasks = [action for name in "abcd" for action in controller.handle(LearnerJoined(name, 40, 10), 0.0)]
    for task in tasks:
        assert isinstance(task, SendTask)
        controller.handle(UpdateRequest(task.learner, task.task.number, 4, 0.4, 0.1, Model.empty()), 1.0)
    assert controller.closed is not None and controller.secure is not None
    learners = controller.closed.learners
    controller.handle(SumOpened(0, learners, controller.secure.total()), 2.0)
    assert controller.community.stamp.version == 1


def test_a_checkpoint_has_the_latest_models_and_the_sum_of_a_closed_window() -> None:
    """Also if one of its models was replaced since."""
    play = _play(async_fedavg(1).with_layers(SecureSum()))
    community = play.controller.secure
    assert isinstance(community, CachedWindows)
    play.run_until(community_version=4)
    play.opens = False
    while play.controller.closed is None or not community.fresh:
        assert play.step()
    twin = CachedWindows(community.model, MemoryStore(), SecureSum())
    twin.latest = dict(community.latest)
    arrays = community.arrays()
    twin.load_arrays(community.model, arrays, MemoryStore())
    assert np.array_equal(twin.total(), community.total())
    assert {name: array.tobytes() for name, array in twin.arrays().items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }
    twin.load_arrays(community.model, {}, MemoryStore())
    assert not twin.arrays()
