"""Examples that are read ahead, for data sets that do not fit memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.errors import ArgumentError
from metis.learning.engine import Batch, Examples
from metis.learning.torch.examples import as_examples


class Loader:
    """A dataset whose next batches are read by threads while a batch is trained on; the batches stay the same.

    - `source`: what `train=` takes: a map-style dataset whose items are read when they are asked for, say from files.
      Several threads ask at the same time, and the item of an index must always be the same.
    - `workers`: threads that read and collate; reading and most decoding let other threads go on.
    - `prefetch`: batches that are read ahead for each worker.
    - `collate`: makes a batch of a list of items.
    """

    def __init__(
        self,
        source: Any,
        *,
        workers: int = 2,
        prefetch: int = 2,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        for name, value in (("workers", workers), ("prefetch", prefetch)):
            if type(value) is not int or value < 1:
                raise ArgumentError(f"{name} is {value!r}; it must be a whole number, 1 or more", name)
        self._examples: Examples = as_examples(source, collate)
        self._workers, self._ahead = workers, workers * prefetch

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, indices: NDArray[np.int64]) -> Batch:
        return self._examples.batch(indices)

    def stream(self, orders: Iterable[NDArray[np.int64]]) -> Iterator[Batch]:
        """The batches of these indices in this order, the next ones being read while one is in use."""
        executor = ThreadPoolExecutor(self._workers, thread_name_prefix="metis-loader")
        waiting: deque[Future[Batch]] = deque()
        left = iter(orders)
        try:
            while True:
                while len(waiting) < self._ahead and (chosen := next(left, None)) is not None:
                    waiting.append(executor.submit(self._examples.batch, chosen))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def __getattr__(self, name: str) -> Any:
        if name in ("items", "collate") and "_examples" in self.__dict__:  # where the examples are items of a dataset
            return getattr(self._examples, name)
        raise AttributeError(name)
