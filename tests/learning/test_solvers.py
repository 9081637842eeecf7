"""The update rules against the paper's equations, written out, on f(w) = sum a (w - b)^2 / 2."""

from typing import Any

import numpy as np
import pytest
import torch

from metis.core.solvers import FedProx, MomentumSGD, Solver, VanillaSGD
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


def test_only_kept_momentum_outlives_a_task() -> None:
    """R5: it restarts in each task by default."""
    assert not VanillaSGD(ETA).keeps_memory
    assert not MomentumSGD(ETA, GAMMA).keeps_memory
    assert MomentumSGD(ETA, GAMMA, keep_momentum=True).keeps_memory
    assert FedProx(ETA, MU, momentum=GAMMA, keep_momentum=True).keeps_memory
    assert not FedProx(ETA, MU, keep_momentum=True).keeps_memory


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
