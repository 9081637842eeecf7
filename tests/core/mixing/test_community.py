"""HOW models are mixed: fast and cached against slow and written out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, strategies as st

from core.play import LAYOUT, model
from metis.core import arithmetic
from metis.core.events import CommunityStamp
from metis.core.mixing import Buffered, CachedAverage, Community, FullPass, Interpolation, MemoryStore
from metis.core.model import Layout, Model, TensorSpec

LEARNERS = ("a", "b", "c", "d")

weights = st.floats(-10, 10, width=32)
large_weights = st.floats(-(2.0**100), 2.0**100, width=32)
vectors = st.lists(weights, min_size=3, max_size=3)
values = st.floats(1e-3, 1.0)
commit = st.tuples(st.just("commit"), st.sampled_from(LEARNERS), vectors, values)
withdraw = st.tuples(st.just("withdraw"), st.sampled_from(LEARNERS))
chores = st.sampled_from([("rebuild",), ("publish",)])
histories = st.lists(commit | withdraw | chores, max_size=60)

RULES: list[Callable[..., Community]] = [
    FullPass,
    CachedAverage,
    Interpolation,
    partial(Buffered, buffer_size=2),
]
rules = pytest.mark.parametrize("rule", RULES, ids=["full", "cached", "interpolation", "buffered"])


def weighted_average(latest: dict[str, tuple[list[float], float]]) -> list[float]:
    """The slow twin: sum of p_k w_k over sum of p_k, exactly rounded."""
    total = math.fsum(value for _, value in latest.values())
    columns = zip(*([w * value for w in vector] for vector, value in latest.values()), strict=True)
    return [math.fsum(column) / total for column in columns]


def replay(community: CachedAverage, history: list[tuple]) -> dict[str, tuple[list[float], float]]:
    """Perform a history; return every learner's latest model and value."""
    latest: dict[str, tuple[list[float], float]] = {}
    for what, *arguments in history:
        if what == "commit":
            learner, vector, value = arguments
            community.commit(learner, model(*vector), value, 1, None)
            latest[learner] = (vector, value)
        elif what == "withdraw":
            community.withdraw(arguments[0])
            latest.pop(arguments[0], None)
        elif what == "rebuild":
            community.rebuild()
        else:
            community.publish()
    return latest


# --- cached average --------------------------------------------------------------------------


@given(histories, st.integers(1, 20))
def test_cache_equals_full_pass(history: list[tuple], rebuild_every: int):
    """I1, I2: after any commits, replacements, withdrawals and rebuilds, W = sum of p_k w_k and P of p_k."""
    cached = CachedAverage(model(), MemoryStore(), rebuild_every)

    latest = replay(cached, history)

    assert cached.contributors == len(latest)
    assert cached.normalization == math.fsum(value for _, value in latest.values())
    if latest:
        average = cached.arrays()["sum"] / cached.normalization
        assert average == pytest.approx(weighted_average(latest), rel=1e-6, abs=1e-6)
        full = FullPass(model(), MemoryStore())
        for learner, (vector, value) in latest.items():
            full.commit(learner, model(*vector), value, 1, None)
        cached.commit("a", model(1, 2, 3), 1.0, 1, None)
        full.commit("a", model(1, 2, 3), 1.0, 1, None)
        assert cached.publish()
        assert full.publish()
        assert cached.model.vector == pytest.approx(full.model.vector, rel=1e-6, abs=1e-6)


@given(histories)
def test_rebuild_is_exact_to_the_bit(history: list[tuple]):
    """After a rebuild the running sum has the bits of a cache that saw only the latest models, in any order."""
    cached, fresh = CachedAverage(model(), MemoryStore()), CachedAverage(model(), MemoryStore())

    latest = replay(cached, history)
    cached.rebuild()
    for learner, (vector, value) in reversed(latest.items()):
        fresh.commit(learner, model(*vector), value, 1, None)
    fresh.rebuild()

    assert cached.arrays()["sum"].tobytes() == fresh.arrays()["sum"].tobytes()


@given(histories, st.sampled_from(LEARNERS), vectors, values)
def test_a_withdrawn_learner_leaves_no_rounding_behind(history, learner, vector, value):
    """I14: commit and withdraw again, and the sum has the bits of a sum made without that learner."""
    cached = CachedAverage(model(), MemoryStore())
    latest = replay(cached, history)
    latest.pop(learner, None)

    cached.commit(learner, model(*vector), value, 1, None)
    cached.withdraw(learner)

    total = np.zeros(3)
    for name in sorted(latest):
        total += np.array(latest[name][0], np.float32).astype(np.float64) * latest[name][1]
    assert cached.arrays()["sum"].tobytes() == total.tobytes()


@pytest.mark.parametrize("way_down", [(1.0,), (1e14, 1e9, 1e4, 1.0)])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_an_absurd_model_swamped_is_whole_when_it_is_replaced(way_down: tuple[float, ...], restarted: bool):
    """I1: p and w may reach 1e9 and 1e10; beside that the others' digits are lost, and must come back."""
    store = MemoryStore()
    cached = CachedAverage(model(), store)
    cached.commit("a", model(1, 2, 3), 64.0, 1, None)
    cached.commit("liar", model(9e9, 9e9, 9e9), 1e9, 1, None)
    if restarted:
        kept, cached = cached, CachedAverage(model(), store)
        cached._values = kept._values
        cached.load_arrays(model(), kept.arrays(), store)
    cached.commit("b", model(4, 5, 6), 64.0, 1, None)
    for value in way_down:
        cached.commit("liar", model(1, 1, 1), value, 1, None)
    assert cached.publish()
    expected = (64 * np.array([1, 2, 3]) + 64 * np.array([4, 5, 6]) + 1) / 129
    assert cached.model.vector == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.tuples(st.sampled_from(LEARNERS), large_weights, st.floats(1e-3, 1e6))))
def test_rounding_of_the_cache_is_bounded_by_what_passed_through(history):
    """Any magnitudes: the error of W is at most one rounding of the largest sum seen, for each operation."""
    cached = CachedAverage(model(), MemoryStore())
    latest: dict[str, tuple[list[float], float]] = {}
    bound = largest = 0.0
    for learner, weight, value in history:
        old_vector, old_value = latest.get(learner, ([0.0], 0.0))
        largest += abs(weight) * value + abs(old_vector[0]) * old_value
        bound += 4 * largest * np.finfo(np.float64).eps
        cached.commit(learner, model(weight, 0, 0), value, 1, None)
        latest[learner] = ([weight], value)
    exact = math.fsum(vector[0] * value for vector, value in latest.values())
    assert abs(cached.arrays()["sum"][0] - exact) <= bound


def test_products_are_made_in_double_precision():
    """R11: p_k w_k is not rounded to float32, and does not overflow there."""
    third, large = np.float32(1 / 3), np.float32(3e38)
    cached = CachedAverage(model(), MemoryStore())

    cached.commit("a", model(third, large, 0), 50_000.1, 1, None)

    assert cached.arrays()["sum"].tolist() == [float(third) * 50_000.1, float(large) * 50_000.1, 0.0]


def test_thousands_of_replacements_do_not_drift():
    """Without a single rebuild, 5,000 replacements stay within 1e-12 of the full pass."""
    rng = np.random.default_rng(1990)
    cached = CachedAverage(model(), MemoryStore(), rebuild_every=10**9)
    latest: dict[str, tuple[list[float], float]] = {}
    for _ in range(5_000):
        learner = LEARNERS[rng.integers(len(LEARNERS))]
        vector, value = rng.normal(size=3).astype(np.float32), float(rng.uniform(0.01, 1))
        cached.commit(learner, model(*vector), value, 1, None)
        latest[learner] = (vector.astype(np.float64).tolist(), value)

    average = cached.arrays()["sum"] / cached.normalization

    assert average == pytest.approx(weighted_average(latest), rel=1e-12, abs=1e-12)


def test_the_scheduled_rebuild_removes_what_rounding_left():
    """A large model costs the small one's last digits; the rebuild after `rebuild_every` commits restores them."""
    sums, small = [], 0.3 * float(np.float32(0.1))
    for rebuild_every in (3, 100):
        cached = CachedAverage(model(), MemoryStore(), rebuild_every)
        cached.commit("a", model(0.1, 0.1, 0.1), 0.3, 1, None)
        cached.commit("b", model(1e5, 1e5, 1e5), 1.0, 1, None)
        cached.commit("b", model(2, 2, 2), 1.0, 1, None)
        sums.append(cached.arrays()["sum"][0])

    assert sums == [small + 2.0, (small + 1e5) + 2.0 - 1e5] and sums[0] != sums[1]


def test_the_first_commit_becomes_the_community_model():
    """R9: W = 0 and P = 0 at the start, so nothing of the initial model remains."""
    cached = CachedAverage(model(100, 100, 100), MemoryStore())

    cached.commit("a", model(1, 2, 3), 0.3, 7, None)

    assert cached.publish()
    assert cached.model.vector == pytest.approx([1, 2, 3])
    assert cached.stamp == CommunityStamp(version=1, steps=7)


def test_a_withdrawal_alone_is_published_unless_nobody_remains():
    """Who withdraws is out of the next model; with nobody left the last model stands."""
    cached = CachedAverage(model(), MemoryStore())
    cached.commit("a", model(1, 1, 1), 1.0, 1, None)
    cached.commit("b", model(3, 3, 3), 1.0, 1, None)
    cached.publish()

    cached.withdraw("stranger")
    assert not cached.publish()
    cached.withdraw("a")
    assert cached.publish()
    assert cached.model.vector.tolist() == [3, 3, 3]
    cached.withdraw("b")
    assert not cached.publish()
    assert cached.model.vector.tolist() == [3, 3, 3]


# --- full pass --------------------------------------------------------------------------------


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(vectors, values), min_size=1), st.randoms())
def test_order_of_arrival_cannot_change_a_bit(commits, random):
    """The same models and values give the same bits, in whatever order they came."""
    shas = set()
    for _ in range(2):
        order = list(commits)
        random.shuffle(order)
        full = FullPass(model(), MemoryStore())
        for learner in order:
            vector, value = commits[learner]
            full.commit(learner, model(*vector), value, 1, None)
        assert full.publish()
        assert full.model.vector == pytest.approx(weighted_average(commits), rel=1e-6, abs=1e-6)
        shas.add(full.model.sha256())
    assert len(shas) == 1


def test_order_of_arrival_cannot_change_a_bit_even_where_addition_does():
    """1 + 1e30 - 1e30 is 0 or 1, as one adds; the full pass always adds in learner order."""
    commits = {"a": model(1, 1, 1), "b": model(1e30, 1e30, 1e30), "c": model(-1e30, -1e30, -1e30)}
    results = set()
    for order in itertools.permutations(commits):
        full = FullPass(model(), MemoryStore())
        for learner in order:
            full.commit(learner, commits[learner], 1.0, 1, None)
        full.publish()
        results.add(tuple(full.model.vector.tolist()))
    assert results == {((1 + 1e30 - 1e30) / 3,) * 3}


def test_full_pass_holds_only_what_came_since_the_last_publication():
    """I9: a learner that misses a round is not in that round's model."""
    full = FullPass(model(), MemoryStore())
    full.commit("a", model(1, 1, 1), 5.0, 1, None)
    full.commit("b", model(4, 4, 4), 10.0, 1, None)
    assert full.publish()
    assert full.model.vector.tolist() == pytest.approx([(5 * 1 + 10 * 4) / (5 + 10)] * 3)

    full.commit("a", model(7, 7, 7), 5.0, 1, None)

    assert full.contributors == 1
    assert full.publish()
    assert full.model.vector.tolist() == [7, 7, 7]


def test_full_pass_forgets_a_withdrawn_learner_and_its_model():
    """Before the publication its share goes; after it the stored model goes as well."""
    store = MemoryStore()
    full = FullPass(model(), store)
    full.commit("a", model(1, 1, 1), 1.0, 1, None)
    full.commit("b", model(3, 3, 3), 1.0, 1, None)

    full.withdraw("a")

    assert full.publish()
    assert full.model.vector.tolist() == [3, 3, 3]
    full.withdraw("b")
    full.withdraw("stranger")
    for learner in ("a", "b"):
        with pytest.raises(KeyError):
            store.get(learner)


class Elsewhere:
    """A store that is not in memory, as far as anybody can see."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.put, self.get, self.remove = self._store.put, self._store.get, self._store.remove


@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from([MemoryStore, Elsewhere]))
def test_blocks_and_batches_of_rows_change_nothing(size: int, learners: int, store: type):
    """A model longer than a block, and more learners than are mapped at once, give the plain sum's bits."""
    rng = np.random.default_rng([size, learners])
    layout = Layout((TensorSpec("w", (size,)),))
    vectors = rng.normal(size=(learners, size)).astype(np.float32)
    expected = np.zeros(size)
    for vector in vectors:
        expected += vector.astype(np.float64) * 0.1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "BLOCK", 7)
        full = FullPass(Model(layout, np.zeros(size, np.float32)), store())
        for k, vector in enumerate(vectors):
            full.commit(f"{k:02}", Model(layout, vector), 0.1, 1, None)
        assert full.publish()
    assert full.model.vector.tolist() == (expected / math.fsum([0.1] * learners)).astype(np.float32).tolist()


# --- FedAsync and FedBuff -------------------------------------------------------------------


@given(vectors, st.lists(st.tuples(vectors, values), min_size=1), st.floats(0.01, 1.0))
def test_interpolation_against_the_formula(start, commits, mixing):
    """R14: w_c = (1 - alpha) w_c + alpha w_k with alpha = a S_k, one after the other."""
    community = Interpolation(model(*start), MemoryStore(), mixing)
    expected = np.array(start)
    for vector, value in commits:
        community.commit("a", model(*vector), value, 2, None)
        expected = (1 - mixing * value) * expected + mixing * value * np.array(vector)

    assert community.contributors == len(commits)
    assert community.publish()
    assert community.model.vector == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert community.stamp == CommunityStamp(1, 2 * len(commits))


def test_interpolation_keeps_double_precision_between_publications():
    """Thousands of small blends are not rounded to float32 one by one."""
    community = Interpolation(model(), MemoryStore(), mixing=1e-3)
    for _ in range(3_000):
        community.commit("a", model(1, 1, 1), 1.0, 1, None)
        community.publish()

    assert community.arrays()["vector"] == pytest.approx([1 - (1 - 1e-3) ** 3000] * 3, rel=1e-12)


@given(vectors, st.lists(st.tuples(vectors, vectors, values), min_size=1, max_size=6), st.floats(0.1, 2.0))
def test_fedbuff_against_the_formula(start, commits, rate):
    """w_c += eta / K * sum of S_k (w_k - base_k), once K differences have come."""
    community = Buffered(model(*start), MemoryStore(), len(commits), rate)
    total = np.zeros(3)
    for vector, base, value in commits:
        assert not community.publish()
        community.commit("a", model(*vector), value, 3, model(*base))
        total += value * (np.array(vector) - np.array(base))

    assert community.publish()
    expected = np.array(start) + rate / len(commits) * total
    assert community.model.vector == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert community.stamp == CommunityStamp(1, 3 * len(commits))
    assert community.contributors == 0
    assert not community.publish()


@pytest.mark.parametrize("rule", [Interpolation, partial(Buffered, buffer_size=1)])
def test_what_is_blended_in_cannot_be_withdrawn(rule):
    """These rules keep no local model; a withdrawal leaves the numbers as they are."""
    community = rule(model(), MemoryStore())
    community.commit("a", model(1, 1, 1), 1.0, 1, model())
    before = {name: array.tobytes() for name, array in community.arrays().items()}

    community.withdraw("a")

    assert {name: array.tobytes() for name, array in community.arrays().items()} == before


# --- every rule -----------------------------------------------------------------------------


@rules
def test_nothing_committed_nothing_published(rule):
    """No commits, no new version; and none for a second call."""
    community = rule(model(1, 2, 3), MemoryStore())

    assert not community.publish()
    assert community.contributors == 0
    assert community.stamp == CommunityStamp(0, 0)
    community.commit("a", model(1, 1, 1), 0.5, 4, model())
    community.commit("b", model(2, 2, 2), 0.5, 6, model())
    assert community.contributors == 2
    assert community.stamp == CommunityStamp(0, 0)
    assert community.publish()
    assert not community.publish()
    assert community.stamp == CommunityStamp(1, 4 + 6)


@rules
def test_a_published_model_never_changes_again(rule):
    """Later commits leave an already published model alone, and committed models stay as they were handed in."""
    community = rule(model(), MemoryStore())
    handed_in = [model(1, 1, 1), model(2, 2, 2)]
    for k in range(6):
        community.commit("ab"[k % 2], handed_in[k % 2], 0.5, 1, model())
        if k == 1:
            community.publish()
            published, sha = community.model, community.model.sha256()
    community.publish()

    assert published.sha256() == sha
    assert [each.vector.tolist() for each in handed_in] == [[1, 1, 1], [2, 2, 2]]


@rules
def test_a_replay_without_weights_and_the_saved_arrays_go_on_to_the_bit(rule):
    """`arrays` after any commits, `load_arrays` after the same commits of empty models: the same future."""
    rng = np.random.default_rng(3)
    script = [(LEARNERS[rng.integers(4)], float(rng.uniform(0.1, 1))) for _ in range(40)]
    start = Model(LAYOUT, rng.normal(size=3).astype(np.float32))
    original, twin = rule(start, MemoryStore()), rule(Model.empty(), MemoryStore())
    locals_ = [Model(LAYOUT, rng.normal(size=3).astype(np.float32)) for _ in script]

    for k, ((learner, value), local_model) in enumerate(zip(script, locals_, strict=True)):
        if k == 26:  # the interruption: between a commit and its publication
            saved = {name: array.copy() for name, array in original.arrays().items()}
            twin.load_arrays(original.model, saved, MemoryStore())
        empty = k < 26
        original.commit(learner, local_model, value, 1, start)
        twin.commit(learner, Model.empty() if empty else local_model, value, 1, Model.empty() if empty else start)
        if k % 3 == 0:
            assert original.publish() == twin.publish()
        if k == 30:
            original.withdraw("b")
            twin.withdraw("b")
    assert original.publish() == twin.publish()

    assert twin.model.sha256() == original.model.sha256()
    assert twin.stamp == original.stamp
    assert {n: a.tobytes() for n, a in twin.arrays().items()} == {n: a.tobytes() for n, a in original.arrays().items()}


@pytest.mark.parametrize(
    "make",
    [
        partial(CachedAverage, rebuild_every=0),
        partial(Interpolation, mixing=0.0),
        partial(Interpolation, mixing=1.5),
        partial(Interpolation, mixing=math.nan),
        partial(Buffered, buffer_size=0),
        partial(Buffered, server_learning_rate=0.0),
        partial(Buffered, server_learning_rate=math.inf),
    ],
)
def test_impossible_settings_are_refused(make):
    """The sentence names the setting and the value."""
    (name, value), *_ = make.keywords.items()
    with pytest.raises(ValueError, match=f"^{name} is {value}; it must be "):
        make(model(), MemoryStore())
