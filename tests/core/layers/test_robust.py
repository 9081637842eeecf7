"""Robust rules: they equal their references, and a minority of poisoned models does not carry them away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from metis.core import arithmetic
from metis.core.layers import (
    CentredClipping,
    FedNova,
    GeometricMedian,
    LargestShare,
    Median,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)
from metis.core.layers.robust.rule import History, RobustBuffer, RobustRound
from metis.core.mixing import Buffered, MemoryStore
from metis.core.model import Layout, Model, TensorSpec
from metis.core.policies import async_fedavg, fedasync, fedbuff, fedrec, semisync_fedavg, sync_fedavg
from metis.core.solvers import MomentumSGD, Scaffold
from metis.errors import ArgumentError
from metis.kernels import FastArithmetic

RULES: tuple[RobustRule, ...] = (
    Median(),
    TrimmedMean(0.3),
    GeometricMedian(),
    MultiKrum(0.3),
    CentredClipping(),
    NormBound(),
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.choice)


def layout_of(size: int) -> Layout:
    return Layout((TensorSpec("w", (size,)),))


def mixed(
    rule: RobustRule,
    rows: Sequence[NDArray[np.float32]],
    weights: Sequence[float] | None = None,
    centre: NDArray[np.float32] | None = None,
    layout: Layout | None = None,
) -> NDArray[np.float32]:
    made = layout_of(len(rows[0])) if layout is None else layout
    return rule.mix(rows, [1.0] * len(rows) if weights is None else weights, centre, made, History())


def models(draw: st.DataObject, count: int, size: int) -> list[NDArray[np.float32]]:
    numbers = st.integers(-1000, 1000).map(lambda whole: whole / 8)
    return [np.array(draw.draw(st.lists(numbers, min_size=size, max_size=size)), np.float32) for _ in range(count)]


@given(st.data(), st.integers(1, 8), st.integers(1, 5))
def test_rules_equal_numpy(data: st.DataObject, count: int, size: int) -> None:
    """With equal weights: numpy's median, the textbook trimmed mean, and Weiszfeld's steps on whole vectors."""
    rows = models(data, count, size)
    whole = np.stack(rows).astype(np.float64)
    assert mixed(Median(), rows) == pytest.approx(np.median(whole, axis=0), abs=1e-5)
    cut = data.draw(st.integers(0, (count - 1) // 2))
    trimmed = np.sort(whole, axis=0)[cut : count - cut].mean(axis=0)
    assert mixed(TrimmedMean(cut / count), rows) == pytest.approx(trimmed, abs=1e-4)

    centre = models(data, 1, size)[0]
    least = 1e-6 * np.median(np.linalg.norm(whole - centre, axis=1))
    point = centre.astype(np.float64)
    for _ in range(12):
        pull = 1 / np.maximum(np.linalg.norm(whole - point, axis=1), max(least, 1e-200))
        point = (pull[:, np.newaxis] * whole).sum(axis=0) / pull.sum()
    got = mixed(GeometricMedian(iterations=12), rows, centre=centre)
    assert got == pytest.approx(point, abs=1e-2)

    centres = centre.astype(np.float64)
    for _ in range(3):
        apart = np.linalg.norm(whole - centres, axis=1)
        centres = centres + ((whole - centres) * np.minimum(1, 20 / np.maximum(apart, 1e-9))[:, np.newaxis]).mean(
            axis=0
        )
    clipping = CentredClipping(radius=20, iterations=3)
    assert mixed(clipping, rows, centre=centre) == pytest.approx(centres, abs=1e-2)


@given(st.data(), st.integers(1, 7))
def test_a_weight_is_as_many_copies(data: st.DataObject, count: int) -> None:
    """A model of weight n is mixed like n models of weight 1, by every rule that counts weight."""
    rows = models(data, count, 3)
    weights = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    copies = [row for row, weight in zip(rows, weights, strict=True) for _ in range(weight)]
    for rule in (Median(), TrimmedMean(0.25), GeometricMedian(iterations=8), CentredClipping(), NormBound()):
        centre = np.zeros(3, np.float32)
        one, other = mixed(rule, rows, [float(w) for w in weights], centre), mixed(rule, copies, None, centre)
        assert one == pytest.approx(other, abs=1e-2), rule


@every_rule
@given(data=st.data(), count=st.integers(1, 7))
def test_the_order_of_learners_does_not_matter(rule: RobustRule, data: st.DataObject, count: int) -> None:
    """Permuted models with their weights give the same mixture, apart from rounding."""
    centre, *rows = models(data, count + 1, 4)
    # Different lengths: where models are equally close, Multi-Krum takes the first.
    rows = [row + np.float32(37 * index**2) for index, row in enumerate(rows)]
    weights = [float(w) for w in data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))]
    order = data.draw(st.permutations(range(count)))
    one = mixed(rule, rows, weights, centre)
    other = mixed(rule, [rows[k] for k in order], [weights[k] for k in order], centre)
    if not isinstance(rule, MultiKrum) or not _nearly_tied(rows):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-2)


def _nearly_tied(rows: list[NDArray[np.float32]]) -> bool:
    """Whether two models may be equally close to their neighbours."""
    whole = np.stack(rows).astype(np.float64)
    apart = np.sort(np.linalg.norm(whole[:, np.newaxis] - whole, axis=2) ** 2, axis=1)
    scores = np.sort(apart[:, 1 : 1 + max(1, len(rows) - math.ceil(0.3 * len(rows) - 1e-9) - 2)].sum(axis=1))
    return bool((np.diff(scores) < 1e-6 * scores[-1]).any()) if len(rows) > 1 else False


@every_rule
@given(
    data=st.data(),
    bad=st.integers(1, 3),
    size=st.floats(10, 1e37),
    kind=st.sampled_from(["same", "opposed", "spread"]),
)
def test_a_minority_does_not_carry_it_away(
    rule: RobustRule, data: st.DataObject, bad: int, size: float, kind: str
) -> None:
    """With 30 % poisoned, however far away, the mixture stays about as close to the honest mean as they are."""
    good = 10 - bad
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    centre = rng.normal(size=6).astype(np.float32)
    direction = rng.normal(size=6)
    honest = [(centre + direction + 0.3 * rng.normal(size=6)).astype(np.float32) for _ in range(good)]
    sign = {"same": [1.0] * bad, "opposed": [-1.0] * bad, "spread": [1.0, -1.0, 0.5][:bad]}[kind]
    poisoned = [(centre + np.float32(by * size) * direction).astype(np.float32) for by in sign]
    result = mixed(rule, [*honest, *poisoned], None, centre)
    mean = np.mean([row.astype(np.float64) for row in honest], axis=0)
    lengths = [float(np.linalg.norm(row - centre)) for row in honest]
    assert np.linalg.norm(result - mean) <= 1.5 * max(lengths)


@given(st.floats(0.5001, 0.9), st.floats(1, 1e30))
def test_half_of_the_weight_decides(share: float, value: float) -> None:
    """The breakdown point counts weight: below half a liar is nobody, above half it is the median."""
    rows = [np.array([0.0, 1.0], np.float32), np.array([value, -value], np.float32)]
    assert (mixed(Median(), rows, [share, 1 - share]) == rows[0]).all()
    assert (mixed(Median(), rows, [1 - share, share]) == rows[1]).all()
    near = mixed(GeometricMedian(iterations=2000), rows, [share, 1 - share], rows[0])
    assert near == pytest.approx(rows[0], abs=1e-4 * value)


def test_the_geometric_median_is_where_distances_are_least() -> None:
    """No model near it has a smaller sum of weighted distances."""
    rng = np.random.default_rng(3)
    rows = [rng.normal(size=5).astype(np.float32) for _ in range(7)]
    weights = [1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 1.0]

    def distance(point: NDArray[np.float64]) -> float:
        return sum(w * float(np.linalg.norm(row - point)) for row, w in zip(rows, weights, strict=True))

    best = mixed(GeometricMedian(iterations=500), rows, weights, np.zeros(5, np.float32)).astype(np.float64)
    assert all(distance(best) <= distance(best + 0.01 * rng.normal(size=5)) for _ in range(200))


def test_krum_leaves_out_as_many_as_are_presumed_poisoned() -> None:
    """Of five models with one presumed poisoned, the one apart is left out and the others are averaged by weight."""
    rows = [np.array([x], np.float32) for x in (0.0, 1.0, 2.0, 3.0, 50.0)]
    assert mixed(MultiKrum(0.2), rows, [1.0, 1.0, 1.0, 3.0, 9.0]) == pytest.approx([(0 + 1 + 2 + 9) / 6])
    assert mixed(MultiKrum(0.0), rows) == pytest.approx([56 / 5])
    assert mixed(MultiKrum(0.4), rows[:1]) == pytest.approx([0.0])


def test_a_norm_bound_remembers_usual_lengths() -> None:
    """A round in which most models went far is cut to the median of the latest rounds' medians."""
    rule, history = NormBound(multiple=2.0, rounds=3), History()
    layout, centre = layout_of(2), np.zeros(2, np.float32)

    def step(*lengths: float) -> float:
        rows = [np.array([0.0, length], np.float32) for length in lengths]
        return float(rule.mix(rows, [1.0] * len(rows), centre, layout, history)[1])

    assert step(1.0, 1.0, 10.0) == pytest.approx((1 + 1 + 2) / 3)
    assert step(1.0, 1.0, 1.0) == pytest.approx(1.0)
    assert step(10.0, 10.0, 1.0) == pytest.approx((2 + 2 + 1) / 3)
    assert history.of("parameter") == [1.0, 1.0, 10.0]
    assert step(5.0) == pytest.approx(5.0)  # the median of 1, 10 and 5 is 5
    assert history.of("parameter") == [1.0, 10.0, 5.0]


@every_rule
def test_equal_models_stay_what_they_are(rule: RobustRule) -> None:
    """Also where nobody has moved at all, so that every distance is zero."""
    same = np.array([1.5, -2.0, 0.25], np.float32)
    assert mixed(rule, [same, same, same], [1.0, 5.0, 2.0], same) == pytest.approx(same)


LAYOUT = Layout(
    (
        TensorSpec("a", (2,)),
        TensorSpec("mean", (2,), role="buffer"),
        TensorSpec("n", (), "int64", "counter"),
        TensorSpec("b", (1,)),
        TensorSpec("c", (1,)),
    )
)


@every_rule
def test_buffers_are_judged_apart(rule: RobustRule) -> None:
    """Poisoned buffers neither hide behind good parameters nor make good parameters suspicious."""
    good = np.array([1, 1, 100, 100, 1, 1], np.float32)
    wild = np.array([1, 1, 1e6, -1e6, 1, 1], np.float32)
    rows = [good, good * np.float32(1.01), good * np.float32(0.99), good, wild]
    result = mixed(rule, rows, None, np.zeros(6, np.float32), LAYOUT)
    assert result[[0, 1, 4, 5]] == pytest.approx(np.ones(4), rel=0.05)
    assert result[[2, 3]] == pytest.approx([100, 100], rel=0.45)


@every_rule
@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_threads(rule: RobustRule, threads: int) -> None:
    """A model of several blocks is mixed to the same bits by any number of threads."""
    rng = np.random.default_rng(1)
    size = 2 * arithmetic.BLOCK + 777
    rows = [rng.normal(size=size).astype(np.float32) for _ in range(5)]
    centre = np.zeros(size, np.float32)
    weights = [3.0, 1.0, 2.0, 5.0, 4.0]
    plain = mixed(rule, rows, weights, centre)
    try:
        arithmetic.choose(FastArithmetic(threads))
        assert (mixed(rule, rows, weights, centre) == plain).all()
    finally:
        arithmetic.choose(arithmetic.Arithmetic())


def test_only_what_mixes_several_models_can_be_robust() -> None:
    """Policies that take models in one by one are refused by name, and so is what a rule cannot protect."""
    for policy in (async_fedavg(), fedrec(), fedasync(regularization=0)):
        with pytest.raises(
            ArgumentError, match=f"robust compares .* and {policy.name} adds models or differences up as they come"
        ):
            policy.with_layers(Median())
    with pytest.raises(ArgumentError, match="is given together with"):
        sync_fedavg().with_layers(Median(), FedNova())
    with pytest.raises(ArgumentError, match="robust does not protect what control_variates adds"):
        sync_fedavg().with_layers(Median()).for_solver(Scaffold(0.1, 0.5))
    policy, _ = semisync_fedavg(2).with_layers(Median(), LargestShare(0.4)).for_solver(MomentumSGD(0.1, 0.5))
    assert policy.label == "SemiSync (λ=2), median, at most 40 % each"


def of(*numbers: float) -> Model:
    return Model(layout_of(len(numbers)), np.array(numbers, np.float32))


def test_a_round_is_mixed_by_its_rule() -> None:
    """Whoever has committed counts, by its contribution value and in no order; without commits nothing is published."""
    community = sync_fedavg().with_layers(Median()).start_community(of(0, 0), MemoryStore())
    assert isinstance(community, RobustRound)
    assert not community.publish()
    for learner, value, model in (
        ("c", 1.0, of(9, 9)),
        ("a", 2.0, of(1, 2)),
        ("b", 2.0, of(2, 1)),
        ("d", 9.0, of(5, 5)),
    ):
        community.commit(learner, model, value, 1)
    community.withdraw("d")
    assert community.contributors == 3
    assert community.publish()
    assert community.model.vector == pytest.approx([2, 2])
    assert community.stamp.version == 1
    assert community.contributors == 0


def test_a_largest_share_holds_for_a_robust_round() -> None:
    """A liar that claims most of the examples is limited before the median is taken."""
    liar = (("a", 1.0, of(1)), ("b", 1.0, of(2)), ("c", 1e9, of(100)))
    for layers, expected in (((Median(),), 100.0), ((Median(), LargestShare(1 / 3)), 2.0)):
        community = sync_fedavg().with_layers(*layers).start_community(of(0), MemoryStore())
        for learner, value, model in liar:
            community.commit(learner, model, value, 1)
        community.publish()
        assert community.model.vector == pytest.approx([expected])


def test_a_buffer_makes_a_step_by_its_rule() -> None:
    """As long as the plain step where all agree; a learner that is withdrawn leaves the buffer."""
    plain = fedbuff(buffer_size=3, server_learning_rate=0.5)
    robust = plain.with_layers(Median()).start_community(of(0, 0), MemoryStore())
    average = plain.start_community(of(0, 0), MemoryStore())
    assert isinstance(robust, RobustBuffer)
    assert isinstance(average, Buffered)
    for community in (robust, average):
        for learner, value in (("a", 1.0), ("b", 0.5), ("a", 0.25)):
            community.commit(learner, of(3, 1), value, 1, of(1, 1))
    assert robust.publish()
    assert average.publish()
    assert robust.model.vector == pytest.approx(average.model.vector)
    for learner, model in (("a", of(1, 1)), ("b", of(2, 2)), ("evil", of(1e9, 1e9))):
        robust.commit(learner, model, 1.0, 1, of(0, 0))
    robust.withdraw("evil")
    assert robust.contributors == 2
    assert not robust.publish()
    robust.commit("evil", of(1e9, 1e9), 1.0, 1, of(0, 0))
    before = robust.model.vector
    robust.publish()
    assert robust.model.vector - before == pytest.approx([1, 1])  # half of the median of 1, 2 and 1e9
    whole = Buffered(of(0), MemoryStore())
    assert replace(plain, mixing=Buffered).with_layers(Median()).start_community(of(0), MemoryStore()).uses_base
    assert whole.mixes_cohorts


@pytest.mark.parametrize("policy", [sync_fedavg(1), fedbuff(buffer_size=4)], ids=lambda policy: policy.name)
@settings(max_examples=20)
@given(data=st.data())
def test_what_a_rule_remembers_survives_a_checkpoint(policy: object, data: st.DataObject) -> None:
    """Arrays taken in the middle of a round, loaded after a replay without weights: the same bits from then on."""
    made = policy.with_layers(NormBound())  # type: ignore[attr-defined]
    first = made.start_community(of(0, 0, 0), MemoryStore())
    replayed = made.start_community(Model.empty(), MemoryStore())
    commits = [(f"learner-{index}", models(data, 1, 3)[0]) for index in range(11)]
    loaded = None
    for index, (learner, vector) in enumerate(commits):
        base = of(1, 1, 1)
        for community in (first, replayed) if loaded is None else (first, loaded):
            empty = community is replayed and loaded is None
            local = Model.empty() if empty else Model(layout_of(3), vector)
            community.commit(learner, local, 1.0 + index, 2, Model.empty() if empty else base)
            if index % 4 == 3:
                community.publish()
        if index == 5:
            replayed.load_arrays(first.model, {k: v.copy() for k, v in first.arrays().items()}, MemoryStore())
            loaded = replayed
    assert (first.model.vector == replayed.model.vector).all()
    arrays = replayed.arrays()
    assert all((arrays[name] == array).all() for name, array in first.arrays().items())
    assert len(arrays["robust/parameter"]) == 2
