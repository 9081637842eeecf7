"""What every layer promises, on top of every policy: it composes and survives, or is refused in a sentence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest

from core.play import LAYOUT, Actor, Play, community_snapshot, model, snapshot
from metis.core.controller import Controller
from metis.core.events import Event
from metis.core.layers import (
    LAYERS,
    AcceptLate,
    AdaptivePeriod,
    Cap,
    CentredClipping,
    Compression,
    ControlVariates,
    Differences,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedNova,
    FedYogi,
    GeometricMedian,
    HomomorphicEncryption,
    LargestShare,
    Layer,
    MeasuredPace,
    Median,
    Memory,
    MessageBudget,
    MultiKrum,
    NormBound,
    Outgoing,
    Probe,
    ProximalPull,
    Sample,
    ScheduledLambda,
    ScheduledRate,
    SecureSum,
    ShortestPeriod,
    TrimmedMean,
    Work,
)
from metis.core.layers.ckks import ADDED_BLOCK, FRESH_BLOCK, TAIL
from metis.core.layers.wrapper import innermost
from metis.core.mixing import MemoryStore
from metis.core.mixing.secure import SecureAverage
from metis.core.model import Model
from metis.core.policies import POLICIES, semisync_fedavg
from metis.core.policy import Policy
from metis.core.ring import Ring
from metis.core.schedules import Schedule
from metis.core.solvers import MomentumSGD, Scaffold, Solver
from metis.errors import ArgumentError, InternalError
from metis.registry import parameters_of
from metis.runs.trace import without_weights

EXAMPLES: tuple[Layer, ...] = (
    ProximalPull(0.1),
    ScheduledLambda(Schedule(2, 1, 3)),
    Cap(0.5),
    Sample(learners=2),
    FedNova(2.0),
    Median(),
    TrimmedMean(0.3),
    GeometricMedian(iterations=5),
    MultiKrum(0.3),
    CentredClipping(radius=2.0),
    NormBound(multiple=2.0),
    AdaptivePeriod(gain=2.0),
    ShortestPeriod(exchanges=2.0),
    Probe(batches=3),
    MeasuredPace(batches=4),
    AcceptLate(beyond=2.0),
    MessageBudget(100),
    Differences("fedexp"),
    FedAvgM(momentum=0.6),
    FedAdagrad(),
    FedAdam(),
    FedYogi(rate=Schedule(1, 0.5, 3)),
    ScheduledRate(Schedule(1, 0.1, 4)),
    ControlVariates(),
    LargestShare(0.4),
    Compression("int8"),
    SecureSum(),
    HomomorphicEncryption(),
)
every_layer = pytest.mark.parametrize("layer", EXAMPLES, ids=lambda layer: type(layer).__name__)
every_policy = pytest.mark.parametrize("policy", [make() for make in POLICIES.values()], ids=lambda each: each.name)


def test_every_layer_has_an_example() -> None:
    classes = {each for kind in LAYERS.values() for each in kind.classes.values() if each.__module__[:6] == "metis."}
    missing = sorted(each.__name__ for each in classes - {type(layer) for layer in EXAMPLES})
    assert not missing, f"add {', '.join(missing)} to EXAMPLES in tests/core/layers/test_contract.py"


@every_layer
def test_a_layer_is_what_its_table_says(layer: Layer) -> None:
    """Its kind finds it by its choice, and all its settings in a table make it again."""
    kind = LAYERS[layer.key]
    assert kind.classes[layer.choice] is type(layer)
    assert (kind.selector, kind.in_files) == (layer.selector, layer.in_files)
    assert bool(kind.selector) == (len(kind.classes) > 1)
    own = [layer, *(value for value in vars(layer).values() if isinstance(value, Schedule))]
    written = next(each for each in own if isinstance(each, layer.definition()))  # type: ignore[arg-type]
    assert type(layer).from_table({name: getattr(written, name) for name in parameters_of(type(written))}) == layer


def test_a_layer_without_hooks_leaves_everything_as_it_is() -> None:
    @dataclass(frozen=True)
    class Idle(Layer):
        key, order = "idle", 0

    plain = semisync_fedavg()
    made = plain.with_layers(Idle())
    assert replace(made, layers=()) == plain
    assert made.learner_layers == ()
    work = Work(model(), MomentumSGD(0.1), {})
    out = Outgoing(model(), {})
    assert Idle().prepare(work) is work
    assert Idle().encode(out, work, work) is out
    assert Idle().sent(model(), out.memory) is out.memory
    for hook in (lambda: Idle().wire_bytes(LAYOUT), lambda: Idle().decode(b"", model())):
        with pytest.raises(InternalError, match="idle does not own the wire"):
            hook()


def composed(policy: Policy, *layers: Layer) -> Policy | str:
    """The policy with these layers, or why it cannot be."""
    try:
        return policy.with_layers(*layers)
    except ArgumentError as refusal:
        assert refusal.argument in {layer.key for layer in (*policy.layers, *layers)}
        assert str(refusal).startswith(f"{refusal.argument} ")
        return str(refusal)


def solver_for(policy: Policy) -> Solver:
    controlled = any(isinstance(layer, ControlVariates) for layer in policy.layers)
    return Scaffold(0.1, 0.5) if controlled else MomentumSGD(0.1, 0.5)


@every_layer
@every_policy
def test_a_layer_composes_or_is_refused_by_name(policy: Policy, layer: Layer) -> None:
    """A refusal names layer and policy; what composes is labelled, counts as another policy, and fits any solver."""
    made = composed(policy, layer)
    if isinstance(made, str):
        assert made.startswith(f"{layer.key} ") and (policy.name in made or "keep one of them" in made)
        return
    assert layer in made.layers
    assert made.label == layer.relabel(policy.label)
    assert made.identity != policy.identity
    assert replace(made, label="mine").with_layers().label == "mine"
    settled, solver = made.for_solver(solver_for(made))
    assert [type(each) for each in settled.layers] == [type(each) for each in made.layers]
    assert settled.for_solver(solver_for(made)) == (settled, solver), "once more changes nothing"
    with pytest.raises(ArgumentError, match=f"^{layer.key} is given twice; keep one of them$"):
        made.with_layers(layer)


def test_what_needs_rounds_averages_or_periods_is_refused_without_them() -> None:
    """Everything else goes with every policy."""
    asynchronous = ["async_fedavg", "fedrec", "fedasync", "fedbuff"]
    baselines = sorted({"alone", "centralized"} & set(POLICIES))
    refusals = {
        "sample": ("sample is drawn for each round, and {} has none; sync_fedavg and semisync_fedavg do", asynchronous),
        "nova": (
            "nova mixes rounds by a normalised average, and {} does not average rounds; "
            "sync_fedavg and semisync_fedavg do",
            asynchronous,
        ),
        "robust": (
            "robust compares the models that are mixed at a time, and {} adds models or differences up as they come; "
            "sync_fedavg, semisync_fedavg and fedbuff mix several",
            ["async_fedavg", "fedrec", "fedasync"],
        ),
        "secure_sum": (f"secure_sum {SecureSum.needs['sums']}".replace("{policy}", "{}"), ["fedasync"]),
        "ckks": (
            f"ckks {HomomorphicEncryption.needs['linear']}".replace("{policy}", "{}"),
            ["fedasync"],
        ),
        "adaptive": (
            "adaptive chooses the periods of semi-synchronous training; {} has none",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "schedule": (
            "schedule changes lambda, which is for semi-synchronous training; {} has none",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "shortest_period": (
            "shortest_period bounds the periods of semi-synchronous training; {} has none",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "probe": (
            "probe replaces the cold start of semi-synchronous training; {} has none",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "pace": (
            "pace chooses the periods of semi-synchronous training; {} has none",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "late": (
            "late lets semi-synchronous periods end without some learners; {} has no periods",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "messages": (
            "messages bounds the periods of semi-synchronous training; {} has none",
            ["sync_fedavg", *baselines, *asynchronous],
        ),
        "differences": (
            "differences replaces the average of a round, and {} does not average rounds; "
            "sync_fedavg and semisync_fedavg do",
            asynchronous,
        ),
        "share": (
            "share limits what a learner counts for in an average, and {} adds models up as they come; sync_fedavg "
            "and semisync_fedavg average, and without secure_sum also async_fedavg and fedrec",
            ["fedasync", "fedbuff"],
        ),
    }
    made = {(layer.key, name): composed(make(), layer) for layer in EXAMPLES for name, make in POLICIES.items()}
    assert {pair: result for pair, result in made.items() if isinstance(result, str)} == {
        ("proximal", "fedasync"): "proximal is given twice; keep one of them",  # it is FedAsync's regularization
        **{
            (key, "semisync"): f"{key} does not go with {own}, which semisync has"
            for own, keys in {"pace": ("adaptive", "schedule"), "differences": ("nova", "robust", "ckks")}.items()
            for key in keys
        },
        **{(key, name): sentence.format(name) for key, (sentence, names) in refusals.items() for name in names},
    }


@every_layer
@every_policy
def test_a_run_with_a_layer_survives_leaving_and_a_restart(policy: Policy, layer: Layer) -> None:
    """Somebody withdraws; a replay without weights and the saved arrays go on to the bit."""
    made = composed(policy, layer)
    if isinstance(made, str):
        return
    made, _ = made.for_solver(solver_for(made))
    cast = (Actor("a", 0.03), Actor("bb", 0.1, transfer=0.2), Actor("ccc", 0.3, examples=900), Actor("dddd", 0.05))
    if made.secure_sum is not None:  # which begins no round of three
        cast = (*cast, Actor("eeeee", 0.07))
    play = Play(made, *cast).run_until(community_version=3)
    play.withdraw("bb", play.now)
    play.run_until(community_version=6)
    play.step()  # in the middle of a round, where there are rounds
    assert play.version >= 6
    assert play.controller.community.contributors or not made.protocol.has_rounds
    assert play.committed() and not play.refused()
    assert all(np.isfinite(item.community_model.vector).all() for item in play.published())

    twin = Controller(made, Model.empty(), learners_expected=len(cast))
    twin.measures = {item.stamp.version: item.measure for item in play.published()}
    retell(play, twin, 0, weights=False)
    community = play.controller.community
    saved = {name: array.copy() for name, array in community.arrays().items()}
    twin.community.load_arrays(community.model, saved, MemoryStore())
    for record in play.controller.roster:
        twin.roster[record.learner].base_model = record.base_model
    assert community_snapshot(twin) == community_snapshot(play.controller)
    handled = len(play.log)
    play.run_until(community_version=9)
    retell(play, twin, handled, weights=True)
    assert snapshot(twin) == snapshot(play.controller)


def retell(play: Play, twin: Controller, start: int, *, weights: bool) -> None:
    for at, item in play.log[start:]:
        if isinstance(item, get_args(Event)):
            twin.handle(item if weights else without_weights(item), at)  # type: ignore[arg-type]


@every_layer
def test_the_published_model_can_be_exchanged_for_a_copy(layer: Layer) -> None:
    """As a controller does that keeps it in a file; nothing else changes."""
    made = semisync_fedavg().with_layers(layer)
    made, _ = made.for_solver(solver_for(made))
    start = made.extend_model(model(1, 2, 3), LAYOUT.size)
    plain, exchanged = (made.start_community(start, MemoryStore()) for _ in range(2))
    for number in range(6):
        for community in (plain, exchanged):
            local = start.with_vector(start.vector * np.float32(number - 2))
            community.commit("ab"[number % 2], local, 1.0, 3, community.model, 100)
        if number % 2:
            for secure in (innermost(plain), innermost(exchanged)):
                if isinstance(secure, SecureAverage):
                    secure.begin({"a": 1.0, "b": 2.0}, {"a": 3, "b": 3})
                    secure.open(secure.learners, secure.total())
            assert plain.publish() and exchanged.publish()
            copied = exchanged.model.with_vector(exchanged.model.vector.copy())
            exchanged.model = copied
            assert exchanged.model is copied
        assert exchanged.model.sha256() == plain.model.sha256()
        assert exchanged.measure == plain.measure


@every_layer
def test_a_task_goes_through_a_layer_and_back(layer: Layer) -> None:
    """What arrives has the layout of what was sent out, a payload says it to the bit, and bytes are as announced."""
    made, solver = semisync_fedavg().with_layers(layer).for_solver(solver_for(Policy("", *_choices(), (layer,))))
    base = made.extend_model(model(1, 2, 3), LAYOUT.size)
    memory: Memory = {}
    for _ in range(3):
        works = [Work(base, solver, memory)]
        for each in reversed(made.learner_layers):
            works.append(each.prepare(works[-1]))
        work = works[-1]
        weights = work.base.vector.copy()
        state = work.solver.start(weights)
        work.solver.step(weights, np.array([0.5, -1, 2], np.float32), state, work.base.vector)
        out = Outgoing(work.base.with_vector(weights), {})
        for each in made.learner_layers:
            prepared = works.pop()
            out = each.encode(out, works[-1], prepared)
        memory = out.memory
        for each in made.learner_layers:
            memory = each.sent(out.model, memory)
        assert out.model.layout == base.layout
        assert all(isinstance(array, np.ndarray) for array in memory.values())
        if made.ckks is not None:
            assert (made.update_bytes(base.layout), made.model_bytes(base.layout)) == (FRESH_BLOCK, ADDED_BLOCK + TAIL)
        elif made.secure_sum is not None:
            assert made.update_bytes(base.layout) == Ring(32, 4, 4.0).nbytes(base.layout)
        elif made.wire is None:
            assert made.update_bytes(base.layout) is None and not out.payload
        else:
            assert made.update_bytes(base.layout) == len(out.payload)
            assert made.wire.decode(out.payload, base).sha256() == out.model.sha256()
        base = out.model


def _choices() -> tuple[Any, Any, Any]:
    policy = semisync_fedavg()
    return policy.protocol, policy.contribution, policy.mixing


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(EXAMPLES, 2)), ids=lambda pair: "-".join(type(each).__name__ for each in pair)
)
@every_policy
def test_conflicts_are_symmetric_and_the_order_does_not_matter(policy: Policy, pair: tuple[Layer, Layer]) -> None:
    """Put on at once, one after the other or the other way round: the same policy, or the same sentence."""
    one, other = pair
    made = composed(policy, one, other)
    assert composed(policy, other, one) == made
    for first, second in (pair, reversed(pair)):
        alone = composed(policy, first)
        if isinstance(alone, str):
            assert isinstance(made, str), "what is refused alone is refused with others"
            continue
        both = composed(alone, second)
        if isinstance(made, str):
            assert isinstance(both, str)
        else:
            assert not isinstance(both, str)
            assert (both.layers, both.identity) == (made.layers, made.identity)
