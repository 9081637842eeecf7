"""A learner: its batches, its budget, its randomness, and what it does when training fails."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from metis.core.events import Budget
from metis.core.solvers import MomentumSGD, VanillaSGD
from metis.errors import ConfigError, DataError, Diverged
from metis.learning import (
    ArrayExamples,
    Batch,
    DatasetExamples,
    Learner,
    TorchEngine,
    Trained,
    as_examples,
    horizontal_flip,
    logistic,
    mlp,
)

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(50, 4)).astype(np.float32)
TARGETS = RNG.integers(0, 3, 50)
NETWORK = partial(logistic, (4,), 3)


def numbered(count: int) -> ArrayExamples:
    """Examples whose target is their own index."""
    return ArrayExamples(np.zeros((count, 1), np.float32), np.arange(count))


def learner(**changes: Any) -> Learner:
    given: dict[str, Any] = {
        "name": "gpu",
        "index": 2,
        "examples": ArrayExamples(INPUTS, TARGETS),
        "indices": np.arange(10, 40),
        "batch_size": 8,
        "solver": MomentumSGD(0.1, 0.75),
        "seed": 5,
    }
    return Learner(**(given | changes))


class TestBatches:
    @given(
        examples=st.integers(1, 40),
        batch_size=st.integers(1, 45),
        seed=st.integers(0, 2**32),
        task=st.integers(0, 9),
    )
    def test_each_epoch_covers_each_example_once(self, examples: int, batch_size: int, seed: int, task: int) -> None:
        """ceil(|D_k| / beta_k) batches, all full but the last (R2)."""
        own = np.arange(examples) * 2
        site = learner(examples=numbered(2 * examples), indices=own, batch_size=batch_size, seed=seed)
        assert site.epoch_steps == math.ceil(examples / batch_size)
        source = site.batches(task)
        for _ in range(2):
            epoch = [targets.tolist() for _, targets in islice(source, site.epoch_steps)]
            assert sorted(number for batch in epoch for number in batch) == own.tolist()
            assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (site.epoch_steps - 1)
            assert len(epoch[-1]) == examples - batch_size * (site.epoch_steps - 1)

    def test_epochs_tasks_and_learners_are_shuffled_differently(self) -> None:
        """The order depends on the seed, the learner, the task and the epoch, and on nothing else."""

        def order(task: int = 0, epoch: int = 0, **changes: Any) -> list[int]:
            site = learner(examples=numbered(50), batch_size=30, **changes)
            targets: list[int] = next(islice(site.batches(task), epoch, None))[1].tolist()
            return targets

        orders = [order(), order(task=1), order(epoch=1), order(index=3), order(seed=6)]
        assert len({tuple(o) for o in orders}) == len(orders)
        assert order() == order(name="renamed", solver=VanillaSGD(1.0))

    def test_augmentation_draws_from_the_task(self) -> None:
        """The same task augments alike, whatever torch's global generator says."""
        pictures = ArrayExamples(RNG.integers(0, 256, (20, 6, 6, 3), np.uint8), np.zeros(20, np.int64))
        site = learner(examples=pictures, indices=np.arange(20), batch_size=20, augment=horizontal_flip(), seed=1)
        torch.manual_seed(1)
        first = [inputs for inputs, _ in islice(site.batches(4), 3)]
        torch.manual_seed(2)
        again = [inputs for inputs, _ in islice(site.batches(4), 3)]
        plain = [i for i, _ in islice(learner(**{**vars(site), "augment": None}).batches(4), 3)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first, plain, strict=True))


class TestTraining:
    def test_trains_exactly_so_many_steps_on_its_own_batches(self) -> None:
        """The same as the engine on the learner's first batches."""
        engine, site = TorchEngine(NETWORK), learner()
        model = engine.initial_model(0)
        trained = site.train(engine, model, task_number=3, steps=7)
        expected = engine.train(model, islice(site.batches(3), 7), site.solver)
        assert trained.steps == 7
        assert trained.model.sha256() == expected.model.sha256()

    def test_dropout_is_part_of_the_task(self) -> None:
        """The same task in another process would drop the same units; the next task drops others."""
        engine, site = TorchEngine(partial(mlp, (4,), 3, dropout=0.5)), learner(indices=[7], batch_size=1)
        model = engine.initial_model(0)
        one, same, other = (site.train(engine, model, task, steps=4).model.sha256() for task in (1, 1, 2))
        assert one == same
        assert one != other

    def test_divergence_names_the_learner(self) -> None:
        """A learning rate that explodes ends in one sentence: who, when, and what may help."""
        inputs = (INPUTS * 1e6).astype(np.float32)
        targets = INPUTS[:, 0]
        site = learner(examples=ArrayExamples(inputs, targets), solver=VanillaSGD(1e6))
        engine = TorchEngine(partial(logistic, (4,), 1), "regression")
        with pytest.raises(Diverged, match=r"learner 'gpu' diverged in task 9 .*smaller learning rate"):
            site.train(engine, engine.initial_model(0), task_number=9, steps=30)

    def test_a_loss_that_is_no_number_is_divergence(self) -> None:
        """Bad data in one silo is found there."""
        inputs = INPUTS.copy()
        inputs[20] = math.nan
        engine = TorchEngine(NETWORK)
        with pytest.raises(Diverged, match="'gpu'"):
            learner(examples=ArrayExamples(inputs, TARGETS)).train(engine, engine.initial_model(0), 0, steps=4)

    def test_needs_a_step(self) -> None:
        """A task without a batch is a mistake of the caller."""
        engine = TorchEngine(NETWORK)
        with pytest.raises(ConfigError, match="asked for 0 steps"):
            learner().train(engine, engine.initial_model(0), 0, steps=0)


class Clock:
    """Time passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowExamples(ArrayExamples):
    """Each batch takes as long as the list says, the last for ever after."""

    def __init__(self, clock: Clock, durations: list[float]) -> None:
        super().__init__(INPUTS, TARGETS)
        self.clock, self.durations = clock, durations

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        self.clock.now += self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]
        return super().batch(indices)


class TestBudget:
    def run(self, budget: Budget, durations: list[float]) -> Trained:
        clock, engine = Clock(), TorchEngine(NETWORK)
        site = learner(examples=SlowExamples(clock, durations))
        return site.train_while(engine, engine.initial_model(0), 0, budget, clock)

    def test_steps_end_it(self) -> None:
        """B_k batches, however long they take."""
        trained = self.run(Budget(steps=5), [2.0])
        assert trained.steps == 5
        assert trained.seconds == 5 * 2.0

    def test_seconds_end_it_at_the_next_batch_boundary(self) -> None:
        """A batch that has begun is finished: 4 batches of 2 seconds for a limit of 7, and for one of 8."""
        assert self.run(Budget(seconds=7.0), [2.0]).steps == 4
        assert self.run(Budget(seconds=8.0), [2.0]).steps == 4
        assert self.run(Budget(seconds=8.5), [2.0]).steps == 5

    def test_whichever_ends_first(self) -> None:
        """A cold-start limit together with a number of steps."""
        assert self.run(Budget(steps=3, seconds=100.0), [2.0]).steps == 3
        assert self.run(Budget(steps=30, seconds=10.0), [2.0]).steps == 5

    def test_at_least_one_batch(self) -> None:
        """Nobody is excluded for being slow (R3)."""
        trained = self.run(Budget(steps=10, seconds=0.0), [50.0])
        assert trained.steps == 1
        assert trained.time_per_batch == 50.0

    def test_time_per_batch_ignores_the_warm_up_and_outliers(self) -> None:
        """The median without the first batch."""
        trained = self.run(Budget(steps=6), [30.0, 2.0, 2.0, 90.0, 2.0, 2.0])
        assert trained.batch_times == (30.0, 2.0, 2.0, 90.0, 2.0, 2.0)
        assert trained.time_per_batch == 2.0

    def test_the_clock_does_not_change_the_model(self) -> None:
        """The same steps give the same bits in a deployment and in a simulation."""
        engine, site, clock = TorchEngine(NETWORK), learner(), Clock()
        model = engine.initial_model(0)
        timed = site.train_while(engine, model, 4, Budget(steps=6), clock)
        assert timed.model.sha256() == site.train(engine, model, 4, steps=6).model.sha256()
        assert math.isnan(site.train(engine, model, 4, steps=6).time_per_batch)


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """A map-style dataset as a user writes it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index), float(index) ** 2]), index % 3


class TestExamples:
    def test_bytes_become_images(self) -> None:
        """Channels last in, channels first out without a copy to reorder, (x / 255 - mean) / std."""
        pixels = RNG.integers(0, 256, (7, 5, 6, 3), np.uint8)
        mean, std = [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]
        examples = ArrayExamples(pixels, np.arange(7), mean=mean, std=std)
        chosen = np.array([6, 0, 3])
        inputs, targets = examples.batch(chosen)
        expected = ((pixels[chosen] / 255 - mean) / std).transpose(0, 3, 1, 2)
        assert inputs.numpy() == pytest.approx(expected, abs=1e-5)
        assert inputs.dtype == torch.float32
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert targets.tolist() == chosen.tolist()
        assert examples.input_shape == (3, 5, 6)

    def test_images_without_a_channel_axis_get_one(self) -> None:
        """And a scale of their own, as the digits with values 0 to 16."""
        pixels = RNG.integers(0, 17, (4, 8, 8), np.uint8)
        inputs, _ = ArrayExamples(pixels, np.arange(4), scale=1 / 16).batch(np.arange(4))
        assert inputs.numpy() == pytest.approx(pixels[:, None] / 16)

    def test_the_arrays_are_neither_copied_nor_changed(self) -> None:
        """Scaling works on the batch, not on the data; read-only arrays are fine."""
        values = np.full((3, 4), 2.0, np.float32)
        values.flags.writeable = False
        examples = ArrayExamples(values, np.zeros(3), mean=1.0, std=0.5)
        for _ in range(2):
            assert torch.all(examples.batch(np.arange(2))[0] == (2.0 - 1.0) / 0.5)
        assert examples._inputs.data_ptr() == values.ctypes.data

    def test_a_transform_is_applied_to_every_batch(self) -> None:
        """What evaluation does instead of augmentation."""
        examples = ArrayExamples(INPUTS, TARGETS, transform=lambda inputs: inputs[:, :2])
        assert examples.batch(np.arange(3))[0].shape == (3, 2)

    @pytest.mark.parametrize("dataset", [Squares(), [Squares()[i] for i in range(10)]])
    def test_any_map_style_dataset(self, dataset: Any) -> None:
        """Items are collated in the order asked for; it trains."""
        examples = as_examples(dataset)
        inputs, targets = examples.batch(np.array([3, 1]))
        assert inputs.tolist() == [[3.0, 9.0], [1.0, 1.0]]
        assert targets.tolist() == [0, 1]
        site = learner(examples=examples, indices=np.arange(10), solver=VanillaSGD(0.001))
        engine = TorchEngine(partial(logistic, (2,), 3))
        assert site.train(engine, engine.initial_model(0), 0, steps=5).steps == 5

    def test_as_examples_recognises_what_a_user_brings(self) -> None:
        """Pairs of arrays or tensors are gathered whole; examples stay themselves."""
        assert isinstance(as_examples((INPUTS, TARGETS)), ArrayExamples)
        assert isinstance(as_examples(TensorDataset(torch.tensor(INPUTS), torch.tensor(TARGETS))), ArrayExamples)
        assert isinstance(as_examples(Squares()), DatasetExamples)
        examples = numbered(3)
        assert as_examples(examples) is examples
        with pytest.raises(ConfigError, match="mean can be set for a pair of arrays only"):
            as_examples(Squares(), mean=0.5)

    def test_a_stream_is_refused(self) -> None:
        """A learner shuffles, so it needs to reach every example."""

        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        with pytest.raises(DataError, match="Stream is not a map-style dataset"):
            as_examples(Stream())

    def test_a_loader_is_refused_with_what_to_give_instead(self) -> None:
        with pytest.raises(DataError, match="give the loader's dataset, and its collate_fn"):
            as_examples(DataLoader([1, 2, 3], batch_size=2))

    def test_a_data_set_with_a_method_called_batch_gives_items(self) -> None:
        """As that of Hugging Face, whose `batch(batch_size)` is another thing."""

        class Rows:
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> dict[str, float]:
                return {"x": float(index), "label": 1}

            def batch(self, batch_size: int) -> Any:
                raise AssertionError

        assert as_examples(Rows()).batch(np.array([2, 0]))["x"].tolist() == [2, 0]

    def test_mistakes_are_named(self) -> None:
        """Lengths that differ, no examples, indices beyond the data, batches of nothing."""
        with pytest.raises(DataError, match="50 inputs but 49 targets"):
            ArrayExamples(INPUTS, TARGETS[:-1])
        with pytest.raises(DataError, match="learner 'gpu' has no examples"):
            learner(indices=np.zeros(0, np.int64))
        with pytest.raises(DataError, match="examples 0 to 50, but they are numbered 0 to 49"):
            learner(indices=np.arange(51))
        with pytest.raises(DataError, match="list of whole numbers"):
            learner(indices=np.array([0.5]))
        with pytest.raises(ConfigError, match="batch_size 0"):
            learner(batch_size=0)
        with pytest.raises(ConfigError, match="it must not be 0"):
            ArrayExamples(INPUTS, TARGETS, std=0.0)
