"""The update rules against the paper's equations, written out, on f(w) = sum a (w - b)^2 / 2; what all promise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from metis.core.layers.fednova import FedNova, accumulated_steps
from metis.core.policies import sync_fedavg
from metis.core.solvers import (
    SOLVERS,
    Adam,
    AdamW,
    FedProx,
    MomentumSGD,
    Pulled,
    Scaffold,
    Solver,
    SolverFacts,
    VanillaSGD,
)
from metis.errors import ConfigError

CURVATURE = np.array([1.0, 0.5, 2.0, 0.1])
MINIMUM = np.array([1.0, -2.0, 0.0, 3.0])
START = np.array([0.3, 0.7, -1.0, 5.0])
ETA, GAMMA, MU, DECAY = 0.1, 0.75, 0.3, 0.01


def gradient_at(weights: Any) -> Any:
    return CURVATURE * (weights - MINIMUM)


def run(solver: Solver, library: str, steps: int) -> Any:
    """The weights after some steps; the arrays handed to the solver must be changed in place."""
    convert: Any = np.array if library == "numpy" else torch.tensor
    weights, community = convert(START), convert(START)
    handed_over, memory = weights, solver.start(weights)
    for _ in range(steps):
        solver.step(weights, convert(gradient_at(np.asarray(weights))), memory, community)
    assert weights is handed_over
    assert np.array_equal(np.asarray(community), START), "the community model must not change"
    return np.asarray(weights)


@pytest.mark.parametrize("library", ["numpy", "torch"])
class TestEquations:
    def test_vanilla(self, library: str) -> None:
        """w -= eta grad."""
        w = START.copy()
        for _ in range(5):
            w = w - ETA * gradient_at(w)
        assert run(VanillaSGD(ETA), library, 5) == pytest.approx(w, rel=1e-12)

    def test_vanilla_with_weight_decay(self, library: str) -> None:
        """w -= eta (grad + decay w)."""
        w = START.copy()
        for _ in range(5):
            w = w - ETA * (gradient_at(w) + DECAY * w)
        assert run(VanillaSGD(ETA, weight_decay=DECAY), library, 5) == pytest.approx(w, rel=1e-12)

    def test_momentum_is_equation_3(self, library: str) -> None:
        """u = gamma u + grad; w -= eta u, from u = 0 (R6)."""
        w, u = START.copy(), np.zeros(4)
        for _ in range(5):
            u = GAMMA * u + gradient_at(w)
            w = w - ETA * u
        assert run(MomentumSGD(ETA, GAMMA), library, 5) == pytest.approx(w, rel=1e-12)

    def test_momentum_with_weight_decay(self, library: str) -> None:
        """The decay is part of the gradient that enters the memory, as in torch."""
        w, u = START.copy(), np.zeros(4)
        for _ in range(5):
            u = GAMMA * u + gradient_at(w) + DECAY * w
            w = w - ETA * u
        assert run(MomentumSGD(ETA, GAMMA, weight_decay=DECAY), library, 5) == pytest.approx(w, rel=1e-12)

    def test_fedprox(self, library: str) -> None:
        """w -= eta grad + eta mu (w - w_c)."""
        w = START.copy()
        for _ in range(5):
            w = w - ETA * gradient_at(w) - ETA * MU * (w - START)
        assert run(FedProx(ETA, MU), library, 5) == pytest.approx(w, rel=1e-12)

    def test_fedprox_with_momentum_and_weight_decay(self, library: str) -> None:
        """The proximal term is part of the gradient that enters the memory."""
        w, u = START.copy(), np.zeros(4)
        for _ in range(5):
            u = GAMMA * u + gradient_at(w) + MU * (w - START) + DECAY * w
            w = w - ETA * u
        solver = FedProx(ETA, MU, momentum=GAMMA, weight_decay=DECAY)
        assert run(solver, library, 5) == pytest.approx(w, rel=1e-12)

    def test_fedprox_finds_the_minimum_of_the_regularised_objective(self, library: str) -> None:
        """Its fixed point solves a (w - b) + mu (w - w_c) = 0."""
        fixed_point = (CURVATURE * MINIMUM + MU * START) / (CURVATURE + MU)
        assert run(FedProx(ETA, MU), library, 1000) == pytest.approx(fixed_point, rel=1e-9)


def test_no_momentum_and_no_proximal_term_are_vanilla() -> None:
    """The three rules agree where their extra terms vanish."""
    vanilla = run(VanillaSGD(ETA), "torch", 7)
    assert np.array_equal(run(MomentumSGD(ETA, 0.0), "torch", 7), vanilla)
    assert np.array_equal(run(FedProx(ETA, 0.0), "torch", 7), vanilla)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("ours", "theirs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
def test_adam_and_adamw_are_those_of_torch(ours: Any, theirs: Any, library: str) -> None:
    """The same weights after ten steps, with weight decay and other betas than the default."""
    parameter = torch.nn.Parameter(torch.tensor(START))
    optimizer = theirs([parameter], lr=ETA, betas=(0.8, 0.95), eps=1e-6, weight_decay=DECAY)
    for _ in range(10):
        parameter.grad = torch.tensor(gradient_at(parameter.detach().numpy()))
        optimizer.step()
    solver = ours(ETA, 0.8, 0.95, 1e-6, weight_decay=DECAY)
    assert run(solver, library, 10) == pytest.approx(parameter.detach().numpy(), rel=1e-10)


def test_adam_counts_the_steps_of_16_bit_weights_in_32_bits() -> None:
    """In bfloat16 the count would stop at 256."""
    weights = torch.zeros(2, dtype=torch.bfloat16)
    memory = Adam(ETA).start(weights)
    assert memory is not None and memory.dtype == torch.float32
    for _ in range(300):
        Adam(ETA).step(weights, torch.ones_like(weights), memory, weights)
    assert float(memory[-1]) == 300


def test_a_pull_toward_the_community_model_reaches_adam() -> None:
    """It is added to the gradient: without any other gradient the weights go back to where they came from."""
    pulled = Adam(0.01).with_pull(MU)
    assert after(pulled, 2000, 0 * GRADIENT, START + 1) == pytest.approx(START, abs=0.02)
    assert pulled.facts.adaptive == "Adam"


@pytest.mark.parametrize("solver", [Adam(ETA), AdamW(ETA), Adam(ETA).with_pull(MU)])
def test_normalised_averaging_refuses_an_adaptive_rule_by_name(solver: Solver) -> None:
    """Its steps are not sums of gradients, so that the length of a delta says nothing."""
    with pytest.raises(ConfigError, match=r"nova divides by the length .* the steps of Adam"):
        sync_fedavg(1).with_layers(FedNova()).for_solver(solver)


def test_only_kept_momentum_outlives_a_task() -> None:
    """R5: it restarts in each task by default."""
    assert not VanillaSGD(ETA).keeps_memory
    assert not MomentumSGD(ETA, GAMMA).keeps_memory
    assert MomentumSGD(ETA, GAMMA, keep_momentum=True).keeps_memory
    assert FedProx(ETA, MU, momentum=GAMMA, keep_momentum=True).keeps_memory
    assert not FedProx(ETA, MU, keep_momentum=True).keeps_memory
    assert not Adam(ETA).keeps_memory
    assert AdamW(ETA, keep_state=True).keeps_memory


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: VanillaSGD(0.0), "learning_rate of VanillaSGD is 0.0; it must be greater than 0"),
        (lambda: VanillaSGD(float("nan")), "learning_rate of VanillaSGD is nan"),
        (lambda: MomentumSGD(ETA, 1.0), "momentum of MomentumSGD is 1.0; it must be at least 0 and less than 1"),
        (lambda: FedProx(ETA, -1.0), "proximal_term of FedProx is -1.0; it must be at least 0"),
    ],
)
def test_impossible_hyperparameters_are_refused(build: Any, sentence: str) -> None:
    """The sentence names the solver, the argument, its value and what is allowed."""
    with pytest.raises(ConfigError, match=sentence):
        build()


# --- what every solver promises -----------------------------------------------------------------

# One of each, without weight decay and with momentum where there is one.
EXAMPLES: dict[str, Solver] = {
    "vanilla": VanillaSGD(ETA),
    "momentum": MomentumSGD(ETA, GAMMA),
    "fedprox": FedProx(ETA, MU, GAMMA),
    "scaffold": Scaffold(ETA, GAMMA),
    "adam": Adam(ETA),
    "adamw": AdamW(ETA, weight_decay=0.0),
}
every_solver = pytest.mark.parametrize("solver", EXAMPLES.values(), ids=EXAMPLES)
every_sum = pytest.mark.parametrize("solver", [one for one in EXAMPLES.values() if not one.facts.adaptive])
GRADIENT = np.array([1.0, -0.5, 0.25, 2.0])


def after(solver: Solver, steps: int, gradient: Any = GRADIENT, start: Any = START) -> Any:
    """The weights after some steps along the same gradient, toward the community model at START."""
    weights = start.copy()
    memory = solver.start(weights)
    for _ in range(steps):
        solver.step(weights, gradient.copy(), memory, START.copy())
    return weights


def test_every_solver_has_an_example() -> None:
    own = {name for name, solver in SOLVERS.items() if solver.__module__.startswith("metis.")}
    assert own == set(EXAMPLES), "add one to EXAMPLES in tests/core/test_solvers.py"


@every_solver
@pytest.mark.parametrize("decay", [0.0, DECAY])
def test_numpy_and_torch_take_the_same_steps(solver: Any, decay: float) -> None:
    for each in (dataclasses.replace(solver, weight_decay=decay), solver.with_pull(MU)):
        assert run(each, "numpy", 6) == pytest.approx(run(each, "torch", 6), rel=1e-12)


@every_solver
def test_a_factor_of_the_rate_scales_a_step(solver: Solver) -> None:
    for each in (solver, solver.with_pull(MU)):
        assert after(each.with_rate(0.25), 1) - START == pytest.approx(0.25 * (after(each, 1) - START), rel=1e-12)


@every_sum
def test_a_pull_holds_local_training_near_the_community_model(solver: Solver) -> None:
    """Where it ends, gradient and pull cancel; pulls add up."""
    pulled = solver.with_pull(MU)
    own = solver.facts.pull / ETA
    assert after(pulled, 2000) == pytest.approx(START - GRADIENT / (MU + own), rel=1e-9)
    aside = after(pulled, 1, 0 * GRADIENT, START + 1)
    assert aside == pytest.approx(START + 1 - ETA * (MU + own), rel=1e-12)
    assert after(solver.with_pull(MU / 2).with_pull(MU / 2), 9) == pytest.approx(after(pulled, 9), rel=1e-12)
    assert (pulled.keeps_memory, pulled.layers) == (solver.keeps_memory, solver.layers)


@every_sum
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_facts_say_how_far_steps_along_one_gradient_lead(solver: Solver, steps: int) -> None:
    """Normalised averaging and adaptive periods rely on it."""
    for each in (solver, solver.with_pull(MU), Pulled(solver, MU)):
        length = accumulated_steps(steps, each.facts.momentum, each.facts.pull)
        assert START - after(each, steps) == pytest.approx(ETA * length * GRADIENT, rel=1e-9)


def test_any_solver_can_be_pulled() -> None:
    """`Pulled` around a rule does what the rules that know a proximal term do, and passes everything else on."""
    for solver in (VanillaSGD(ETA), MomentumSGD(ETA, GAMMA, keep_momentum=True)):
        around = Pulled(solver, MU)
        assert around.keeps_memory == solver.keeps_memory
        for pulled, twin in (
            (around, solver.with_pull(MU)),
            (around.with_rate(0.5), solver.with_rate(0.5).with_pull(MU)),
            (around.with_pull(MU), solver.with_pull(2 * MU)),
        ):
            assert after(pulled, 7) == pytest.approx(after(twin, 7), rel=1e-12)
            assert after(pulled, 7) != pytest.approx(after(solver, 7), rel=1e-3)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("scaffold", [Scaffold(ETA), Scaffold(ETA, GAMMA, DECAY)], ids=["plain", "momentum and decay"])
def test_scaffold_adds_its_correction_and_remembers_the_mean_gradient(scaffold: Scaffold, library: str) -> None:
    """w -= eta u, u = gamma u + grad + decay w + c - c_k; the mean is of the gradients before the correction."""
    correction = np.array([0.5, -1.0, 0.0, 2.0])
    w, u, gradients = START.copy(), np.zeros(4), []
    for _ in range(5):
        gradients.append(gradient_at(w) + scaffold.weight_decay * w)
        u = scaffold.momentum * u + gradients[-1] + correction
        w = w - ETA * u

    task = scaffold.corrected(correction)

    assert run(task, library, 5) == pytest.approx(w, rel=1e-12)
    assert task.mean_gradient() == pytest.approx(np.mean(gradients, axis=0), rel=1e-6)


def test_the_mean_of_16_bit_gradients_is_made_in_32_bits() -> None:
    """In 16 bits the sum of ones would stop at 256, where the next number is 258."""
    task = Scaffold(ETA).corrected(np.zeros(4, np.float32))
    weights = torch.zeros(4, dtype=torch.bfloat16)
    memory = task.start(weights)
    for _ in range(1000):
        task.step(weights, torch.ones_like(weights), memory, torch.zeros_like(weights))
    assert task.mean_gradient().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kept", [MomentumSGD(ETA, GAMMA, keep_momentum=True), FedProx(ETA, MU, GAMMA, True)])
def test_momentum_that_is_kept_does_not_build_up_in_a_task(kept: Solver) -> None:
    assert kept.facts.momentum == 0
    assert kept.with_pull(MU).facts.momentum == 0


def test_a_solver_without_a_learning_rate_has_no_schedule() -> None:
    @dataclasses.dataclass(frozen=True)
    class Sign(Solver):
        """A rule of a user's own."""

        size: float = 0.5

        def step(self, weights: Any, gradient: Any, memory: Any, community: Any) -> None:
            weights -= self.size * np.sign(gradient)

    with pytest.raises(ConfigError, match="Sign has no learning_rate, so no schedule can change it"):
        Sign().with_rate(0.5)
    assert Sign().facts == SolverFacts()
    assert after(Sign().with_pull(8.0), 1, GRADIENT, START - 1) == pytest.approx(START - 1 + 0.5)
