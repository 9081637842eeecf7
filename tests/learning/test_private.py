"""DP-SGD: what a step of protected records is made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from metis.core.events import Budget
from metis.core.solvers import FedProx, MomentumSGD, Solver, VanillaSGD
from metis.errors import ConfigError
from metis.learning import ArrayExamples, Learner, TorchEngine
from metis.learning.private import PrivateStep
from metis.learning.torch.optimizers import TorchOptimizer
from metis.privacy.chance import SeededChance, SystemChance
from metis.privacy.records import Privacy


class Words(nn.Module):
    """Every layer that has a rule, in a network of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.convolution = nn.Conv1d(8, 12, 3, padding=1, stride=2, groups=2)
        self.group = nn.GroupNorm(3, 12)
        self.hidden, self.layer, self.out = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, words: Any) -> Any:
        found = self.relu(self.group(self.convolution(self.words(words).transpose(1, 2))))
        return self.out(self.layer(self.hidden(found.transpose(1, 2))).mean(1))


class Tied(nn.Module):
    """A weight that is also used outside its layer, which no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Any) -> Any:
        return nn.functional.linear(self.second(torch.tanh(self.first(inputs))), self.first.weight)


class Twice(nn.Module):
    """A layer with two places in the network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs: Any) -> Any:
        return self.layer(torch.relu(self.layer(inputs)))


class Recurrent(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: Any) -> Any:
        return self.out(self.gru(inputs)[0][:, -1])


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5, padding="same", groups=2),
        nn.GroupNorm(4, 16), nn.Flatten(), nn.Linear(16 * 16, 4),
    )  # fmt: skip


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 4, 3, stride=2, dilation=(1, 2, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "words": (Words, (10,), True),
    "images": (images, (3, 8, 8), True),
    "volumes": (volumes, (1, 8, 8, 8), True),
    "tied": (Tied, (6,), False),
    "twice": (Twice, (6,), False),
    "recurrent": (Recurrent, (7, 4), False),
}


def batch_of(shape: tuple[int, ...], words: bool, count: int = 9) -> tuple[Any, Any]:
    torch.manual_seed(3)
    inputs = torch.randint(0, 20, (count, *shape)) if words else torch.randn(count, *shape)
    return inputs, torch.randint(0, 3, (count,))


@pytest.mark.parametrize("case", CASES)
def test_ghost_norms_are_those_of_explicit_gradients(case: str) -> None:
    """The norm of each record's gradient is that of a backward pass for it alone, also where no rule holds."""
    network, shape, ghost = CASES[case]
    engine = TorchEngine(network)
    batch = batch_of(shape, case == "words")
    private = engine._private
    norms = private.norms(batch)
    assert private._ghost is ghost
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    for record, norm in enumerate(norms):
        loss = nn.functional.cross_entropy(engine.module(batch[0][record : record + 1]), batch[1][record : record + 1])
        gradients = torch.autograd.grad(loss, parameters)
        assert float(norm) == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in gradients)), rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_that_of_clipped_gradients(case: str) -> None:
    """Without noise, a step's gradient is the sum of the records' gradients, each cut to the clip, over the mean."""
    network, shape, _ = CASES[case]
    engine = TorchEngine(network)
    batch = batch_of(shape, case == "words")
    clip = float(engine._private.norms(batch).median())
    chance = SeededChance(np.random.SeedSequence(1))
    engine._private.fill(PrivateStep(iter([batch]), clip, 0.0, clip, 20.0, chance))
    found = engine._gradient.clone()
    total = torch.zeros_like(found)
    for record in range(len(batch[1])):
        engine._gradient.zero_()
        loss = nn.functional.cross_entropy(engine.module(batch[0][record : record + 1]), batch[1][record : record + 1])
        loss.backward()
        total += engine._gradient * min(1.0, clip / float(engine._gradient.norm()))
    assert torch.allclose(found, total / 20.0, rtol=1e-3, atol=1e-6)


def test_parts_of_a_batch_add_up() -> None:
    """Memory is limited by parts, and a step in parts is the step."""
    engine = TorchEngine(images)
    inputs, targets = batch_of((3, 8, 8), False, 12)
    results = []
    for size in (12, 5):
        parts = [(inputs[start : start + size], targets[start : start + size]) for start in range(0, 12, size)]
        chance = SeededChance(np.random.SeedSequence(1))
        engine._private.fill(PrivateStep(iter(parts), 0.5, 0.3, 0.5, 12.0, chance))
        results.append(engine._gradient.clone())
    assert torch.allclose(*results, rtol=1e-4, atol=1e-6)


def test_a_record_that_is_not_finite_counts_nothing() -> None:
    """NaN in one record would be seen in the model by everybody; it is left out, and the others count as ever."""
    engine = TorchEngine(images)
    inputs, targets = batch_of((3, 8, 8), False)
    broken = inputs.clone()
    broken[2] = math.nan
    results = []
    for given in (broken, inputs):
        keep = [0, 1, 3, 4, 5, 6, 7, 8]
        part = (given, targets) if given is broken else (given[keep], targets[keep])
        chance = SeededChance(np.random.SeedSequence(1))
        engine._private.fill(PrivateStep(iter([part]), 0.5, 0.0, 0.5, 9.0, chance))
        results.append(engine._gradient.clone())
    assert bool(results[0].isfinite().all())
    assert torch.allclose(*results, rtol=1e-4, atol=1e-6)


def test_batch_norm_is_refused_with_an_alternative() -> None:
    """It mixes the records of a batch, so one record's gradient is not its own."""
    engine = TorchEngine(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    with pytest.raises(ConfigError, match=r"'1' is a BatchNorm1d, .*use torch\.nn\.GroupNorm"):
        engine.check_private()


def test_a_buffer_that_records_change_is_refused() -> None:
    """Noise covers gradients only, and buffers are sent as they are."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)
            self.mean: Any
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, inputs: Any) -> Any:
            self.mean.copy_(inputs.detach().mean(0))
            return self.out(inputs)

    engine = TorchEngine(Counting)
    with pytest.raises(ConfigError, match="buffer 'mean'"):
        engine._private.fill(
            PrivateStep(iter([batch_of((4,), False)]), 1.0, 1.0, 1.0, 9.0, SeededChance(np.random.SeedSequence(1)))
        )


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip_norm": 1.0}, {"precision": "bf16"}])
def test_what_cannot_be_combined_is_refused(options: dict[str, Any]) -> None:
    """What would change a step after it was accounted for."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        TorchEngine(images, **options).check_private()


# --- learners -----------------------------------------------------------------------------------


def learner(privacy: Privacy | None, solver: Solver | None = None, **options: Any) -> Learner:
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(60, 4)).astype(np.float32)
    examples = ArrayExamples(inputs, (inputs[:, 0] > 0).astype(np.int64))
    return Learner("site", 0, examples, np.arange(60), 10, solver or VanillaSGD(0.5), privacy=privacy, **options)


def engine() -> TorchEngine:
    return TorchEngine(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))


def test_records_are_drawn_independently() -> None:
    """Poisson sampling: sizes vary around the expected batch, and larger batches draw as many times more."""
    one = learner(Privacy(noise=1.0, budget=3.0))
    for many in (1, 3):
        drawn = [sum(len(part[1]) for part in step.parts) for step in itertools.islice(one.private_steps(0, many), 400)]
        assert np.mean(drawn) == pytest.approx(10 * many, rel=0.1)
        assert len(set(drawn)) > 5
    assert all(len(part[1]) <= 10 for step in itertools.islice(one.private_steps(0, 6), 5) for part in step.parts)


def test_an_empty_batch_is_all_noise() -> None:
    """A step without a record still moves the model: otherwise its absence could be seen."""
    model = engine().initial_model(1)
    one = learner(Privacy(noise=1.0), units=np.zeros(60, np.int64))  # one unit: drawn whole or not at all
    steps = list(itertools.islice(one.private_steps(0), 30))
    sizes = [sum(len(part[1]) for part in step.parts) for step in steps]
    assert set(sizes) == {0, 60}
    trainer = engine()
    trained = trainer.train(model, iter([PrivateStep(iter(()), 1.0, 1.0, 1.0, 10.0, SystemChance())]), VanillaSGD(0.5))
    moved = trained.model.vector - model.vector
    assert np.std(moved) == pytest.approx(0.5 / 10, rel=0.5)


def test_all_records_of_a_unit_share_its_clip() -> None:
    """A patient with several records adds no more to a step than the clip, however many of them there are."""
    one = learner(Privacy(noise=1.0, clip=1.0), units=np.repeat(np.arange(15), 4))
    step = next(one.private_steps(0))
    assert (step.clip, step.unit_clip) == (0.25, 1.0)
    assert sum(len(part[1]) for part in step.parts) % 4 == 0


@pytest.mark.parametrize("solver", [MomentumSGD(0.1, 0.5), FedProx(0.1), TorchOptimizer(torch.optim.Adam, lr=0.01)])
def test_every_solver_trains_privately_and_a_simulation_can_be_repeated(solver: Solver) -> None:
    """Noise is on the gradient, whatever becomes of it; in a simulation it comes from the seed."""
    model, privacy = engine().initial_model(1), Privacy(noise=0.5)
    first, again = (learner(privacy, solver).train(engine(), model, 3, 8) for _ in range(2))
    assert np.array_equal(first.model.vector, again.model.vector)
    assert math.isnan(first.loss)  # nothing clear leaves
    other = learner(privacy, solver).train(engine(), model, 4, 8)
    assert not np.array_equal(first.model.vector, other.model.vector)


def test_a_deployments_noise_is_new_each_time() -> None:
    """With equal seeds and tasks, and after a restart: the controller knows the seed."""
    model, privacy = engine().initial_model(1), Privacy(noise=0.5)
    first, again = (learner(privacy, system_noise=True).train(engine(), model, 3, 4) for _ in range(2))
    assert not np.array_equal(first.model.vector, again.model.vector)


def test_exactly_the_steps_of_the_task_are_made() -> None:
    """Whatever the clock says: how long steps take depends on the records."""
    clock = itertools.count(0.0, 100.0)
    one = learner(Privacy(noise=1.0, budget=3.0))
    trained = one.train_while(engine(), engine().initial_model(1), 0, Budget(5, 1.0, 3), lambda: next(clock))
    assert trained.steps == 5
    assert len(trained.batch_times) == 15  # a step has three batches
    with pytest.raises(ConfigError, match="deadline"):
        one.train_while(engine(), engine().initial_model(1), 0, Budget(None, 1.0), lambda: next(clock))


def test_enough_steps_learn_something_despite_noise() -> None:
    """The noisy mean points where the clean one does."""
    model, one = engine().initial_model(1), learner(Privacy(noise=0.5, clip=1.0))
    trained = one.train(engine(), model, 0, 60)
    assert engine().evaluate(trained.model, one.examples)["accuracy"] > 0.85


def test_system_noise_is_normal_and_uniform() -> None:
    """Mean, deviation and tails of what is made of the operating system's bits, for odd and even numbers of them."""
    chance = SystemChance()
    normal, uniform = chance.normal(200_001), chance.uniform(200_000)
    assert len(normal) == 200_001
    assert abs(normal.mean()) < 0.015 and abs(normal.std() - 1) < 0.01
    assert 0.0022 < float((np.abs(normal) > 3).mean()) < 0.0033
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.005
    assert len(chance.normal(3)) == 3
