"""Examples that give batches of torch tensors: arrays, map-style datasets, several sources joined."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from metis.errors import ConfigError, DataError
from metis.learning.engine import Batch, Examples, makes_batches
from metis.learning.torch.augmentation import Transform
from metis.learning.torch.batches import collated


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
    """Any map-style dataset, also a list; items are collated into batches, by torch's rule or the user's."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        if collate is not None and not callable(collate):
            raise ConfigError(f"collate is {collate!r}; it must be a function that makes a batch of a list of items")
        if isinstance(dataset, DataLoader):
            raise DataError(
                "a DataLoader has its own batches and order, and so has each learner: give the loader's dataset, and "
                "its collate_fn, if there is one, as collate=...; metis.Loader(dataset, workers=4) reads ahead"
            )
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise DataError(
                f"{type(dataset).__name__} is not a map-style dataset: it needs __len__ and __getitem__, "
                "because a learner shuffles its examples"
            )
        self._dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self._dataset)

    def items(self, indices: NDArray[np.int64]) -> list[Any]:
        """Items of the dataset as it returns them."""
        chosen = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            items: list[Any] = self._dataset.__getitems__(chosen)
            return items
        return [self._dataset[i] for i in chosen]

    def collate(self, items: list[Any]) -> Batch:
        """Items as one batch."""
        return collated(items, self._collate)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        return self.collate(self.items(indices))


class JoinedExamples:
    """Several examples one after the other, as if they were one; a batch may come from any of them."""

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
        if all(hasattr(part, "items") for part in self._parts):
            parts: Any = self._parts
            one_by_one = zip(home, indices - self._starts[home], strict=True)
            return parts[0].collate([parts[part].items(np.array([index]))[0] for part, index in one_by_one])
        pieces, positions = [], []
        for part in np.unique(home):
            here = np.flatnonzero(home == part)
            pieces.append(self._parts[part].batch(indices[here] - self._starts[part]))
            positions.append(here)
        order = torch.from_numpy(np.argsort(np.concatenate(positions), kind="stable"))
        try:
            inputs, targets = (torch.cat(column).index_select(0, order) for column in zip(*pieces, strict=True))
        except RuntimeError as problem:
            shapes = ", ".join(str(tuple(piece[0].shape[1:])) for piece in pieces)
            raise DataError(f"examples of different silos cannot share a batch: their shapes are {shapes}") from problem
        return inputs, targets


def as_examples(source: Any, collate: Callable[[list[Any]], Any] | None = None, **options: Any) -> Examples:
    """Examples from what a user has: a pair of arrays, a map-style dataset, or examples already."""
    if collate is None and isinstance(source, TensorDataset) and len(source.tensors) == 2:
        source = source.tensors
    if collate is None and isinstance(source, (tuple, list)) and len(source) == 2 and _is_array(source[0]):
        return ArrayExamples(source[0], source[1], **options)
    if options:
        raise ConfigError(f"{', '.join(options)} can be set for a pair of arrays only")
    if makes_batches(source):
        if collate is not None:
            raise ConfigError("collate is given together with examples that make batches themselves; leave one out")
        examples: Examples = source
        return examples
    return DatasetExamples(source, collate)


def _is_array(source: Any) -> bool:
    try:
        return len(np.shape(source)) > 0
    except ValueError:  # items of different lengths
        return False


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
        raise DataError(
            f"arrays of dtype {array.dtype} cannot be trained on; give numbers, and whole numbers from 0 for classes"
        ) from problem


def _without_copy(array: NDArray[Any] | Tensor) -> Tensor:
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        # Read-only arrays, such as memory-mapped files: nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
