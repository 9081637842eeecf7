"""A learner: its own examples, its own randomness, and the loop that turns a task into a local model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metis.core.events import Budget
from metis.core.layers import Layer, Memory, Outgoing, Work
from metis.core.model import Layout, Model, mixable_problem
from metis.core.solvers import Solver
from metis.errors import ConfigError, DataError, Diverged, NotFinite
from metis.learning.engine import Allotted, Engine, Examples, Trained, batches_of
from metis.learning.private import PrivateStep, draw
from metis.privacy.chance import SeededChance, SystemChance
from metis.privacy.records import Privacy, rate_at, sampling_rate
from metis.text import listed, plural

_ORDER, _AUGMENTATION, _DROPOUT, _NOISE = range(4)  # random streams in a task


@dataclass(eq=False)
class Learner:
    """One silo: which of the examples are its own, and how it trains on them."""

    name: str
    index: int  # its number in the federation; with the seed it fixes everything that this learner draws at random
    examples: Examples
    indices: NDArray[np.int64]
    batch_size: int  # beta_k
    solver: Solver
    seed: int = 0
    augment: Callable[[Any, Any], Any] | None = None  # of the engine that trains
    ranks: Any = None  # the processes that train with this one, as one
    layers: tuple[Layer, ...] = ()  # of the policy, in ascending order
    privacy: Privacy | None = None  # how its records are protected
    units: NDArray[np.int64] | None = None  # whose record each of its examples is, numbered from 0; None: each its own
    system_noise: bool = False  # noise and samples come from the operating system, not from the seed

    def __post_init__(self) -> None:
        self.indices = _as_indices(self.name, self.indices)
        if len(self.indices) == 0:
            raise DataError(f"learner '{self.name}' has no examples; each learner needs at least one")
        lowest, highest = int(self.indices.min()), int(self.indices.max())
        if lowest < 0 or highest >= len(self.examples):
            raise DataError(
                f"learner '{self.name}' is given examples {lowest} to {highest}, "
                f"but they are numbered 0 to {len(self.examples) - 1}"
            )
        if self.batch_size < 1:
            raise ConfigError(f"learner '{self.name}' has batch_size {self.batch_size}; it must be at least 1")
        if self.index < 0 or self.seed < 0:
            raise ConfigError(f"learner '{self.name}': index and seed must be at least 0")
        if self.units is not None and len(self.units) != len(self.indices):
            raise DataError(f"learner '{self.name}' has {len(self.indices)} examples, but units of {len(self.units)}")

    @property
    def epoch_steps(self) -> int:
        """Batches in an epoch; the last one may be short (R2)."""
        return math.ceil(len(self.indices) / self.batch_size)

    def batches(self, task_number: int) -> Iterator[Any]:
        """Endless batches, shuffled again in each epoch; the same for the same seed, learner and task."""
        generator = self._augmentation_generator(task_number)
        if self.ranks is not None:
            for chosen in self.orders(task_number):
                yield self.ranks.part(self.examples, chosen, self.augment, generator)
        for batch in batches_of(self.examples, self.orders(task_number)):
            yield self._augmented(batch, generator)

    @property
    def sampling_rate(self) -> float:
        """The probability with which a private step of one batch draws a record."""
        return sampling_rate(self.batch_size, len(self.indices))

    def private_steps(self, task_number: int, batches_per_step: int = 1) -> Iterator[PrivateStep]:
        """Endless steps of records that are drawn independently of each other, each with the same probability."""
        privacy = self.privacy
        assert privacy is not None, "asked of a learner with privacy only"
        rate = rate_at(self.sampling_rate, batches_per_step)
        noise = privacy.noise_at(self.sampling_rate, batches_per_step)
        units = np.arange(len(self.indices)) if self.units is None else self.units
        count, most = int(units.max()) + 1, int(np.bincount(units).max())
        chance = SystemChance() if self.system_noise else SeededChance(self._seed_of(_NOISE, task_number))
        generator = self._augmentation_generator(task_number)
        while True:
            parts = self._parts(self.indices[draw(units, count, rate, chance)], generator)
            yield PrivateStep(parts, privacy.clip / most, noise, privacy.clip, rate * len(self.indices), chance)

    def _parts(self, chosen: NDArray[np.int64], generator: Any) -> Iterator[Any]:
        """In parts of a plain batch's size, so that a step never needs more memory than it."""
        for start in range(0, len(chosen), self.batch_size):
            yield self._augmented(self.examples.batch(chosen[start : start + self.batch_size]), generator)

    def _augmentation_generator(self, task_number: int) -> Any:
        if self.augment is None:
            return None
        from metis.learning.torch.augmentation import seeded_generator

        return seeded_generator(torch_seed(self._seed_of(_AUGMENTATION, task_number)))

    def _augmented(self, batch: Any, generator: Any) -> Any:
        if self.augment is None:
            return batch
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ConfigError(
                "augment changes the inputs of pairs (inputs, targets), and these batches are "
                f"{type(batch).__name__}s; change them in the dataset or in collate"
            )
        return self.augment(batch[0], generator), batch[1]

    def orders(self, task_number: int) -> Iterator[NDArray[np.int64]]:
        """Which examples each of these batches has."""
        rng = np.random.default_rng(self._seed_of(_ORDER, task_number))
        while True:
            epoch = rng.permutation(self.indices)
            for start in range(0, len(epoch), self.batch_size):
                yield epoch[start : start + self.batch_size]

    def train(
        self,
        engine: Engine,
        community_model: Model,
        task_number: int,
        steps: int,
        memory: Memory | None = None,
        rate: float = 1.0,
        batches_per_step: int = 1,
    ) -> Trained:
        """Exactly this many steps from the community model on; raises `Diverged` if that fails.

        `rate` is a factor of the solver's learning rate. A step has one batch, or more where records are protected.
        """
        if steps < 1:
            raise ConfigError(f"learner '{self.name}' was asked for {steps} steps; a task has at least one")
        batches = itertools.islice(self._steps(task_number, batches_per_step), steps)
        allotted = Allotted(batches, Budget(steps, batches_per_step=batches_per_step))
        trained = self._train(engine, community_model, allotted, task_number, memory, rate)
        return replace(trained, payload=b"")  # nothing really travels

    def train_while(
        self,
        engine: Engine,
        community_model: Model,
        task_number: int,
        budget: Budget,
        clock: Callable[[], float],
        memory: Memory | None = None,
        at_boundary: Callable[[int], None] | None = None,
        agree: Callable[[bool], bool] = bool,
        rate: float = 1.0,
    ) -> Trained:
        """Train until the budget ends by this clock; the current batch is finished, at least one always is (R3).

        Where records are protected, exactly the steps of the budget are made: their time must not decide about them.

        `at_boundary` is called with the steps done, before the first batch and after each; it counts as a batch's
        time, and what it raises ends the training. `agree` gets after each batch whether the budget has ended and
        returns whether the training has, where several processes train as one.
        """
        if self.privacy is not None:
            if budget.steps is None:
                raise ConfigError(
                    "a task without a number of steps would make as many as the records allow, which noise does not "
                    "cover: privacy and budget = 'deadline' exclude each other"
                )
            budget = Budget(budget.steps, math.inf, budget.batches_per_step)
        started = clock()
        batch_times: list[float] = []

        def until_the_budget_ends() -> Iterator[Any]:
            # The engine asks for the next batch when it is done with the last, so here is the batch boundary.
            if at_boundary is not None:
                at_boundary(0)
            before = clock()
            for steps, batch in enumerate(self._steps(task_number, budget.batches_per_step), start=1):
                yield batch
                if at_boundary is not None:
                    at_boundary(steps)
                now = clock()
                many = budget.batches_per_step
                batch_times.extend([(now - before) / many] * many)
                before = now
                if agree(steps == budget.steps or now - started >= budget.seconds):
                    return

        allotted = Allotted(until_the_budget_ends(), budget)
        trained = self._train(engine, community_model, allotted, task_number, memory, rate)
        if trained.evenly:
            batch_times = [math.fsum(batch_times) / trained.steps] * trained.steps
        return replace(trained, batch_times=tuple(batch_times))

    def _steps(self, task_number: int, batches_per_step: int) -> Iterator[Any]:
        if self.privacy is None:
            return self.batches(task_number)
        return self.private_steps(task_number, batches_per_step)

    def _train(
        self,
        engine: Engine,
        community_model: Model,
        batches: Allotted,
        task_number: int,
        memory: Memory | None,
        rate: float,
    ) -> Trained:
        """What local training receives goes through the layers from the wire inwards, what it returns outwards."""
        works = [Work(community_model, self.solver if rate == 1 else self.solver.with_rate(rate), memory or {})]
        for layer in reversed(self.layers):
            works.append(layer.prepare(works[-1]))
        seed = torch_seed(self._seed_of(_DROPOUT, task_number))
        work = works[-1]
        trained = engine.train(work.base, batches, work.solver, work.memory or None, seed)
        self.checked(engine.layout, trained, task_number)
        if not self.layers:
            return trained
        out = Outgoing(trained.model, trained.memory)
        for layer in self.layers:
            prepared = works.pop()
            out = layer.encode(out, works[-1], prepared)
        kept = out.memory
        for layer in self.layers:
            kept = layer.sent(out.model, kept)
        sent = replace(trained, model=out.model, memory=kept, payload=out.payload, notes=out.notes)
        return self.checked(community_model.layout, sent, task_number)

    def checked(self, layout: Layout, trained: Trained, task_number: int) -> Trained:
        """The result, if it can be mixed with models of this layout; raises `Diverged` if not."""
        problem = mixable_problem(trained.model, layout)
        if problem is None and self.privacy is None and not math.isfinite(trained.loss):
            problem = f"its loss is {trained.loss}"
        if problem is not None:
            if self.privacy is None:
                self._blame_the_data(trained.steps, task_number)
            raise Diverged(
                f"learner '{self.name}' diverged in task {task_number} within {trained.steps} steps: "
                f"{problem}; a smaller learning rate may help"
            )
        return trained

    def _blame_the_data(self, steps: int, task_number: int) -> None:
        """Raise `NotFinite` if the batch in which the training ended has NaN or infinity."""
        chosen = next(itertools.islice(self.orders(task_number), max(0, steps - 1), None))
        try:
            parts = [np.asarray(part) for part in self.examples.batch(chosen)]
            bad = np.zeros(len(chosen), dtype=bool)
            for part in parts:
                bad |= ~np.isfinite(part.reshape(len(chosen), -1)).all(axis=1)
        except (TypeError, ValueError, RuntimeError):
            return  # batches of another engine, of which nothing is known
        if bad.any():
            which = listed([str(index) for index in chosen[bad]], 5)
            raise NotFinite(
                f"learner '{self.name}' cannot train: in batch {steps} of task {task_number}, "
                f"{plural(int(bad.sum()), 'example')} of {len(chosen)} (at index {which} of its data) "
                f"{'has' if bad.sum() == 1 else 'have'} NaN or infinity; clean the data"
            )

    def _seed_of(self, stream: int, task_number: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.index, task_number, stream))


def torch_seed(sequence: np.random.SeedSequence) -> int:
    """63 bits without a sign, as torch takes them."""
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def _as_indices(learner: str, indices: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(f"the examples of learner '{learner}' must be a list of whole numbers")
    return array.astype(np.int64, copy=False)
