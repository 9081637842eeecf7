"""A learner: its own examples, its own randomness, and the loop that turns a task into a local model."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from metis.core.compression import Compression
from metis.core.events import Budget
from metis.core.model import Model, mixable_problem
from metis.errors import ConfigError, DataError, Diverged
from metis.learning.engine import Batch, Engine, Examples, Memory, Trained
from metis.learning.scaffold import CONTROL
from metis.learning.solvers import Solver, with_rate
from metis.learning.torch.augmentation import Augmentation, Transform
from metis.learning.torch.parallel import Part, Ranks

_ORDER, _AUGMENTATION, _DROPOUT = range(3)  # streams of chance in a task
_LEFT_OUT = "left_out"  # in a learner's memory: what its last compressed update left out


class ArrayExamples:
    """Two arrays of equal length; a batch is gathered in one operation and scaled afterwards.

    Unless `images` says otherwise, arrays of bytes with three or four axes are images with the channels last;
    their batches are [examples, channels, height, width], divided by 255 unless `scale` says otherwise.
    """

    def __init__(
        self,
        inputs: NDArray[Any] | Tensor,
        targets: NDArray[Any] | Tensor,
        *,
        images: bool | None = None,
        scale: float | None = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        transform: Transform | None = None,
    ) -> None:
        self._inputs, self._targets = _as_tensor(inputs), _as_tensor(targets)
        if len(self._inputs) != len(self._targets):
            raise DataError(f"there are {len(self._inputs)} inputs but {len(self._targets)} targets")
        bytes_given = self._inputs.dtype == torch.uint8
        self._images = bytes_given and self._inputs.ndim in (3, 4) if images is None else images
        if self._images and self._inputs.ndim not in (3, 4):
            raise DataError(
                "images are [examples, height, width] or [examples, height, width, channels], "
                f"not of shape {tuple(self._inputs.shape)}"
            )
        if self._images and self._inputs.ndim == 3:
            self._inputs = self._inputs.unsqueeze(-1)
        if scale is None:
            scale = 1 / 255 if self._images and bytes_given else 1.0
        # (scale x - mean) / std = factor x + shift, with one of each for all channels or for each
        deviation = torch.as_tensor(1.0 if std is None else std, dtype=torch.float64)
        self._factor = (scale / deviation).float()
        self._shift = None if mean is None else (-torch.as_tensor(mean, dtype=torch.float64) / deviation).float()
        self._scaled = scale != 1 or std is not None
        self._to_float = self._scaled or self._shift is not None or self._images or bytes_given
        if not bool(torch.isfinite(self._factor).all()):
            raise ConfigError(f"std is {std}; it must not be 0")
        self._transform = transform

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def plain(self) -> bool:
        """Whether a batch is nothing but its examples, so that several batches can be made as one."""
        return self._transform is None

    def __getstate__(self) -> dict[str, Any]:
        # As numpy's arrays, which worker processes on one machine can share; torch would copy its own for each.
        state = dict(self.__dict__)
        for name in ("_inputs", "_targets"):
            if state[name].dtype != torch.bfloat16:
                state[name] = state[name].numpy(force=True)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {name: _without_copy(state[name]) for name in ("_inputs", "_targets")}
        self.__dict__.update(state | tensors)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        where = torch.from_numpy(indices)
        inputs = self._inputs.index_select(0, where)
        if self._to_float:
            # After the gather the tensor is the batch's own, so the scaling may work in place; a float input
            # comes out of index_select as a copy already.
            inputs = inputs.float()
            if self._scaled:
                inputs.mul_(self._factor)
            if self._shift is not None:
                inputs.add_(self._shift)
        if self._images:
            # Only the strides change: what lies in memory is what torch calls channels_last.
            inputs = inputs.permute(0, 3, 1, 2)
        if self._transform is not None:
            inputs = self._transform(inputs)
        return inputs, self._targets.index_select(0, where)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example as the network sees it."""
        return tuple(self.batch(np.zeros(1, np.int64))[0].shape[1:])


class DatasetExamples:
    """Any map-style dataset of torch whose items are (input, target); items are collated into batches."""

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise DataError(
                f"{type(dataset).__name__} is not a map-style dataset: it needs __len__ and __getitem__, "
                "because a learner shuffles its examples"
            )
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        chosen = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            items = self._dataset.__getitems__(chosen)
        else:
            items = [self._dataset[i] for i in chosen]
        collated = default_collate(items)
        if not (isinstance(collated, (list, tuple)) and len(collated) == 2):
            raise DataError("an item of the dataset must be a pair (input, target)")
        inputs, targets = collated
        if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
            raise DataError("inputs and targets of the dataset must be tensors, arrays or numbers")
        return inputs, targets


class JoinedExamples:
    """Several examples one behind the other, as if they were one; a batch may come from any of them."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        if not parts:
            raise DataError("there are no examples to join")
        self._parts = tuple(parts)
        sizes = np.array([len(part) for part in self._parts], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes

    def __len__(self) -> int:
        return int(self._ends[-1])

    def indices(self, part: int) -> NDArray[np.int64]:
        """Where the examples of this part are."""
        return np.arange(self._starts[part], self._ends[part], dtype=np.int64)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        home = np.searchsorted(self._ends, indices, side="right")
        if len(home) and (home == home[0]).all():  # of one silo: exactly what its own examples would give
            return self._parts[int(home[0])].batch(indices - self._starts[home[0]])
        pieces, places = [], []
        for part in np.unique(home):
            here = np.flatnonzero(home == part)
            pieces.append(self._parts[part].batch(indices[here] - self._starts[part]))
            places.append(here)
        order = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
        try:
            inputs, targets = (torch.cat(column).index_select(0, order) for column in zip(*pieces, strict=True))
        except RuntimeError as problem:
            shapes = ", ".join(str(tuple(piece[0].shape[1:])) for piece in pieces)
            raise DataError(f"examples of different silos cannot share a batch: their shapes are {shapes}") from problem
        return inputs, targets


def as_examples(source: Any, **options: Any) -> Examples:
    """Examples from whatever a user brings: a pair of arrays, a map-style dataset, or examples already."""
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        source = source.tensors
    if isinstance(source, (tuple, list)) and len(source) == 2 and len(np.shape(source[0])) > 0:
        return ArrayExamples(source[0], source[1], **options)
    if options:
        raise ConfigError(f"{', '.join(options)} can be set for a pair of arrays only")
    if hasattr(source, "batch"):
        examples: Examples = source
        return examples
    return DatasetExamples(source)


@dataclass(eq=False)
class Learner:
    """One silo: which of the examples are its own, and how it trains on them."""

    name: str
    index: int  # its place in the federation; with the seed it fixes all that this learner draws
    examples: Examples
    indices: NDArray[np.int64]
    batch_size: int  # beta_k
    solver: Solver
    seed: int = 0
    augment: Augmentation | None = None
    ranks: Ranks | None = None  # the processes that train with this one, as one
    compression: Compression | None = None  # of what travels; None: the model itself does

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

    @property
    def epoch_steps(self) -> int:
        """Batches in an epoch; the last one may be short (R2)."""
        return math.ceil(len(self.indices) / self.batch_size)

    def batches(self, task_number: int) -> Iterator[Batch | Part]:
        """Endless batches, shuffled anew in each epoch; the same for the same seed, learner and task."""
        generator = torch.Generator()
        if self.augment is not None:
            generator.manual_seed(_torch_seed(self._seed_of(_AUGMENTATION, task_number)))
        for chosen in self.orders(task_number):
            if self.ranks is not None:
                yield self._part(chosen, generator, self.ranks)
                continue
            inputs, targets = self.examples.batch(chosen)
            if self.augment is not None:
                inputs = self.augment(inputs, generator)
            yield inputs, targets

    def orders(self, task_number: int) -> Iterator[NDArray[np.int64]]:
        """Which examples each of these batches has."""
        rng = np.random.default_rng(self._seed_of(_ORDER, task_number))
        while True:
            epoch = rng.permutation(self.indices)
            for start in range(0, len(epoch), self.batch_size):
                yield epoch[start : start + self.batch_size]

    def _part(self, chosen: NDArray[np.int64], generator: torch.Generator, ranks: Ranks) -> Part:
        """What this process trains on, augmented as one process would do it: there chance is drawn batch by batch."""
        own, whole = ranks.indices(len(chosen)), len(chosen)
        if self.augment is None:
            inputs, targets = self.examples.batch(chosen[own])
        else:
            inputs, targets = self.examples.batch(chosen)
            inputs, targets = self.augment(inputs, generator)[own], targets[own]
        return Part(inputs, targets, whole, ranks.weight(whole))

    def train(
        self,
        engine: Engine,
        community_model: Model,
        task_number: int,
        steps: int,
        memory: Memory | None = None,
        rate: float = 1.0,
    ) -> Trained:
        """Exactly this many batches from the community model on; raises `Diverged` if that fails.

        `rate` is a factor of the solver's learning rate.
        """
        if steps < 1:
            raise ConfigError(f"learner '{self.name}' was asked for {steps} steps; a task has at least one")
        batches = itertools.islice(self.batches(task_number), steps)
        trained = self._train(engine, community_model, batches, task_number, memory, rate)
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
        """Train until the budget ends by this clock; the batch in hand is finished, one always is (R3).

        `at_boundary` is called with the steps done, before the first batch and after each; it counts as a batch's
        time, and what it raises ends the training. `agree` is told after each batch whether the budget has ended and
        says whether the training has, where several processes train as one.
        """
        started = clock()
        batch_times: list[float] = []

        def until_the_budget_ends() -> Iterator[Batch | Part]:
            # The engine asks for the next batch when it is done with the last, so here is the batch boundary.
            if at_boundary is not None:
                at_boundary(0)
            before = clock()
            for steps, batch in enumerate(self.batches(task_number), start=1):
                yield batch
                if at_boundary is not None:
                    at_boundary(steps)
                now = clock()
                batch_times.append(now - before)
                before = now
                if agree(steps == budget.steps or now - started >= budget.seconds):
                    return

        trained = self._train(engine, community_model, until_the_budget_ends(), task_number, memory, rate)
        return replace(trained, batch_times=tuple(batch_times))

    def _train(
        self,
        engine: Engine,
        community_model: Model,
        batches: Iterator[Batch | Part],
        task_number: int,
        memory: Memory | None,
        rate: float,
    ) -> Trained:
        solver = self.solver if rate == 1 else with_rate(self.solver, rate)
        seed = _torch_seed(self._seed_of(_DROPOUT, task_number))
        trained = self.checked(engine, engine.train(community_model, batches, solver, memory, seed), task_number)
        return trained if self.compression is None else self._compressed(trained, community_model, memory)

    def checked(self, engine: Engine, trained: Trained, task_number: int) -> Trained:
        """What came out, if it can be mixed; raises `Diverged` if not."""
        problem = mixable_problem(trained.model, engine.layout)
        if problem is None and not math.isfinite(trained.loss):
            problem = f"its loss is {trained.loss}"
        if problem is not None:
            raise Diverged(
                f"learner '{self.name}' diverged in task {task_number} within {trained.steps} steps: "
                f"{problem}; a smaller learning rate may help"
            )
        return trained

    def _compressed(self, trained: Trained, community_model: Model, memory: Memory | None) -> Trained:
        """The model as it arrives at the controller; what is left out is remembered."""
        assert self.compression is not None
        left_out = None if memory is None else memory.get(_LEFT_OUT)
        compressed = self.compression.compress(trained.model, community_model, left_out)
        memory = {**trained.memory, _LEFT_OUT: compressed.left_out}
        if CONTROL in memory:
            # A control variate is no sum of ways that could make up for it later: the learner's is what arrives.
            memory[CONTROL] = compressed.local_model.control
        return replace(
            trained,
            model=compressed.local_model,
            memory=memory,
            payload=compressed.payload,
            compression_error=compressed.error,
        )

    def _seed_of(self, stream: int, task_number: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(self.index, task_number, stream))


def _torch_seed(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # torch takes 63 bits without a sign


def _as_tensor(array: NDArray[Any] | Tensor) -> Tensor:
    """Without a copy where possible."""
    if isinstance(array, Tensor):
        return array.detach()
    array = np.asarray(array)
    if array.dtype == np.float64:
        # Models are float32; numpy's default would double the data and fit no network.
        array = array.astype(np.float32)
    try:
        return _without_copy(array)
    except TypeError as problem:
        raise DataError(f"arrays of dtype {array.dtype} cannot be trained on") from problem


def _without_copy(array: NDArray[Any] | Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        # Read-only arrays, such as memory-mapped files: nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _as_indices(learner: str, indices: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise DataError(f"the examples of learner '{learner}' must be a list of whole numbers")
    return array.astype(np.int64, copy=False)
