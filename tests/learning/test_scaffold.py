"""SCAFFOLD in a silo: the published equations, independently written out; what is kept, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from metis.core.layers import Compression, ControlVariates
from metis.core.model import Model
from metis.core.policies import sync_fedavg
from metis.core.solvers import FedProx, MomentumSGD, Scaffold, Solver, SolverFacts, VanillaSGD
from metis.errors import ConfigError, Diverged
from metis.learning import ArrayExamples, Learner, TorchEngine
from metis.learning.engine import trainable_of

CURVATURE = np.array([1.0, 0.5, 2.0, 0.1])
MINIMUM = np.array([1.0, -2.0, 0.0, 3.0])
START = np.array([0.3, 0.7, -1.0, 5.0])
SERVER, OWN = np.array([0.2, -0.1, 0.4, 0.0]), np.array([-0.3, 0.5, 0.1, 1.0])
ETA, GAMMA, MU, DECAY = 0.1, 0.75, 0.3, 0.01

Vector = NDArray[Any]


def gradient_at(weights: Vector) -> Vector:
    return CURVATURE * (weights - MINIMUM)


def run(solver: Scaffold, library: str, steps: int) -> tuple[Vector, Vector]:
    """Weights and the next c_k after a corrected task."""
    convert: Any = np.array if library == "numpy" else torch.tensor
    task, weights, community = solver.corrected(SERVER - OWN), convert(START), convert(START)
    memory = task.start(weights)
    for _ in range(steps):
        task.step(weights, convert(gradient_at(np.asarray(weights))), memory, community)
    assert np.array_equal(np.asarray(community), START)
    return np.asarray(weights), task.mean_gradient()


@pytest.mark.parametrize("library", ["numpy", "torch"])
class TestEquations:
    @pytest.mark.parametrize("decay", [0.0, DECAY])
    def test_the_next_variate_is_that_of_option_2(self, library: str, decay: float) -> None:
        """w -= eta (grad + c - c_k); then c_k = c_k - c + (w_c - w_k) / (K eta), as in the paper."""
        w = START.copy()
        for _ in range(7):
            w = w - ETA * (gradient_at(w) + decay * w + SERVER - OWN)
        weights, control = run(Scaffold(ETA, weight_decay=decay), library, 7)
        assert weights == pytest.approx(w, rel=1e-12)
        assert control == pytest.approx(OWN - SERVER + (START - w) / (7 * ETA), rel=1e-6)

    def test_momentum_and_proximal_term(self, library: str) -> None:
        """The correction is part of the gradient that enters the memory; the variate is the mean of the gradients."""
        w, u, gradients = START.copy(), np.zeros(4), []
        for _ in range(7):
            gradients.append(gradient_at(w))
            u = GAMMA * u + gradients[-1] + SERVER - OWN + MU * (w - START)
            w = w - ETA * u
        weights, control = run(Scaffold(ETA, GAMMA, proximal_term=MU), library, 7)
        assert weights == pytest.approx(w, rel=1e-12)
        assert control == pytest.approx(np.mean(gradients, axis=0), rel=1e-6)

    def test_at_the_optimum_a_learner_stays_there(self, library: str) -> None:
        """With c = 0 and c_k its gradient at the common optimum, whatever its own minimum is."""
        solver = Scaffold(ETA, GAMMA)
        convert: Any = np.array if library == "numpy" else torch.tensor
        task, weights = solver.corrected(-gradient_at(START)), convert(START)
        memory = task.start(weights)
        for _ in range(50):
            task.step(weights, convert(gradient_at(np.asarray(weights))), memory, convert(START))
        assert np.asarray(weights) == pytest.approx(START, rel=1e-12)
        assert task.mean_gradient() == pytest.approx(gradient_at(START), rel=1e-6)


def test_rate_proximal_term_and_accumulation() -> None:
    """What schedules, FedAsync and normalised averaging make of it."""
    solver = Scaffold(ETA, GAMMA, DECAY)
    assert solver.with_rate(0.5) == Scaffold(ETA / 2, GAMMA, DECAY)
    assert solver.with_pull(MU) == Scaffold(ETA, GAMMA, DECAY, MU)
    assert solver.facts == SolverFacts(GAMMA, 0.0)
    assert solver.with_pull(MU).facts == SolverFacts(GAMMA, ETA * MU)
    with pytest.raises(ConfigError, match=r"momentum of Scaffold is 1\.0; it must be at least 0 and less than 1"):
        Scaffold(ETA, 1.0)


# --- the engine ----------------------------------------------------------------------------------------


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    made[0].bias.requires_grad_(False)
    return made


def examples() -> ArrayExamples:
    rng = np.random.default_rng(2)
    inputs = rng.normal(size=(60, 3)).astype(np.float32)
    return ArrayExamples(inputs, (inputs.sum(axis=1) > 0).astype(np.int64))


def learner(solver: Solver, index: int = 0, **options: Any) -> Learner:
    """With the layers that its solver brings, unless it is given others."""
    options = {"layers": solver.layers, **options}
    return Learner(f"l{index}", index, examples(), np.arange(20 * index, 20 * index + 20), 5, solver, **options)


def initial_model(engine: TorchEngine) -> Model:
    """As it travels: the network and, behind it, the server's control variate."""
    return sync_fedavg().with_layers(ControlVariates()).extend_model(engine.initial_model(7), trainable_of(engine))


@pytest.fixture
def engine() -> TorchEngine:
    return TorchEngine(network)


def test_only_scaffold_brings_control_variates() -> None:
    assert sync_fedavg().for_solver(Scaffold(ETA))[0].layers == (ControlVariates(),)
    for solver in (VanillaSGD(ETA), MomentumSGD(ETA, GAMMA), FedProx(ETA)):
        assert sync_fedavg().for_solver(solver)[0].layers == ()


def test_layout_and_initial_model(engine: TorchEngine) -> None:
    """Zero at first, one for each tensor that a solver changes: not for statistics of BatchNorm or frozen ones."""
    initial = initial_model(engine)
    controls = [spec.name for spec in initial.layout.tensors if spec.role == "control"]
    assert controls == ["control:0.weight", "control:1.weight", "control:1.bias", "control:3.weight", "control:3.bias"]
    assert initial.network.sha256() == engine.initial_model(7).sha256()
    assert not initial.control.any()


def test_the_first_task_is_plain_sgd_and_leaves_the_mean_gradient(engine: TorchEngine) -> None:
    """Without variates there is nothing to correct: the same bits as the solver without them."""
    start = initial_model(engine)
    trained = learner(Scaffold(ETA, GAMMA)).train(engine, start, 0, 6)
    plain = learner(MomentumSGD(ETA, GAMMA)).train(engine, start.network, 0, 6)
    assert trained.model.network.sha256() == plain.model.sha256()
    assert trained.memory["control"].tobytes() == trained.model.control.tobytes()
    vanilla = learner(Scaffold(ETA)).train(engine, start, 0, 6).model
    delta = start.vector[: len(vanilla.control)] - vanilla.vector[: len(vanilla.control)]
    assert vanilla.control == pytest.approx(delta / (6 * ETA), abs=1e-5)


def test_rounds_of_two_learners_against_an_independent_scaffold(engine: TorchEngine) -> None:
    """Three rounds with torch's own autograd and SGD, option II and plain averages, all written out again."""
    solver = Scaffold(ETA)
    model = initial_model(engine)
    memories: list[dict[str, Any]] = [{}, {}]
    module = network()
    module.load_state_dict(engine.load(model.network).state_dict())
    trained_names = [name for name, p in module.named_parameters() if p.requires_grad]
    zero = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    server, own = dict(zero), [dict(zero), dict(zero)]
    for task in range(3):
        locals_, states = [], []
        for k in range(2):
            made = learner(solver, k).train(engine, model, task, 4, memories[k])
            memories[k] = dict(made.memory)
            locals_.append(made.model)
            twin = network()
            twin.load_state_dict(module.state_dict())
            parameters = dict(twin.named_parameters())
            optimizer = torch.optim.SGD([parameters[name] for name in trained_names], ETA)
            batches = learner(solver, k).batches(task)
            for _ in range(4):
                batch = next(batches)
                optimizer.zero_grad()
                nn.functional.cross_entropy(twin.train()(batch[0]), batch[1]).backward()
                for name in trained_names:
                    parameters[name].grad += server[name] - own[k][name]
                optimizer.step()
            before = dict(module.named_parameters())
            own[k] = {
                name: (own[k][name] - server[name] + (before[name] - parameters[name]) / (4 * ETA)).detach()
                for name in trained_names
            }
            states.append(twin.state_dict())
        model = Model(
            model.layout, np.mean([each.vector for each in locals_], axis=0, dtype=np.float32), model.counters
        )
        server = {name: (own[0][name] + own[1][name]) / 2 for name in trained_names}
        floats = {name for name, tensor in states[0].items() if tensor.is_floating_point()}
        module.load_state_dict(
            {name: sum(s[name] for s in states) / 2 if name in floats else states[0][name] for name in states[0]}
        )
    expected = module.state_dict()
    for name, array in model.network.tensors().items():
        if name in expected and expected[name].is_floating_point():
            assert array == pytest.approx(expected[name].numpy(), abs=2e-5), name
    for name in trained_names:
        assert model.tensors()[f"control:{name}"] == pytest.approx(server[name].numpy(), abs=1e-4), name
    assert any(np.abs(server[name].numpy()).max() > 1e-2 for name in trained_names), "or it would say little"


def test_a_learner_that_lost_its_memory_starts_at_zero(engine: TorchEngine) -> None:
    start = initial_model(engine)
    start = Model(start.layout, start.vector + np.float32(0.01), start.counters)
    lost = learner(Scaffold(ETA)).train(engine, start, 3, 4, None)
    zero = learner(Scaffold(ETA)).train(engine, start, 3, 4, {"control": np.zeros_like(start.control)})
    other = learner(Scaffold(ETA)).train(engine, start, 3, 4, {"control": start.control})
    assert lost.model.sha256() == zero.model.sha256() != other.model.sha256()


def test_all_learners_or_none(engine: TorchEngine) -> None:
    sentence = "MomentumSGD was given a model with control variates; either all learners of a federation train with"
    with pytest.raises(ConfigError, match=sentence):
        learner(MomentumSGD(ETA, GAMMA), layers=(ControlVariates(),)).train(engine, initial_model(engine), 0, 2)


@pytest.mark.parametrize("kind", ["float16", "int8", "top_k"])
def test_what_arrives_compressed_is_the_learners_own_variate(engine: TorchEngine, kind: Any) -> None:
    """So that learner and controller never mean different ones; what is left out of the network waits as ever."""
    compression = Compression(kind, 0.2 if kind == "top_k" else None)
    start = initial_model(engine)
    exact = learner(Scaffold(ETA)).train(engine, start, 0, 6)
    made = learner(Scaffold(ETA), layers=(ControlVariates(), compression)).train(engine, start, 0, 6)
    assert made.memory["control"].tobytes() == made.model.control.tobytes()
    assert made.model.control.tobytes() != exact.model.control.tobytes()
    size = start.layout.network.size
    assert made.memory["left_out"][:size].any() and not made.memory["left_out"][size:].any()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions(dtype: str) -> None:
    """The variate stays near the mean gradient in 16 bits too, where differences of weights would be all rounding."""
    engine, reference = (TorchEngine(network, dtype=each) for each in (dtype, "float32"))
    start = initial_model(reference)
    exact = learner(Scaffold(1e-3)).train(reference, start, 0, 4).model.control
    start = Model(initial_model(engine).layout, start.vector, start.counters)
    made = learner(Scaffold(1e-3)).train(engine, start, 0, 4).model.control
    assert made == pytest.approx(exact, abs=1e-6 if dtype == "float64" else 0.02)


def test_numbers_that_are_not_finite_are_a_divergence(engine: TorchEngine) -> None:
    start = initial_model(engine)
    wild = {"control": np.full(start.control.shape, 3e38, np.float32)}
    with pytest.raises(Diverged, match="diverged in task 0"):
        learner(Scaffold(10.0)).train(engine, start, 0, 3, wild)
