"""What a data set is once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from metis.errors import DataError

Task = Literal["classification", "regression"]


def _no_silos() -> NDArray[np.str_]:
    return np.empty(0, np.str_)


@dataclass(frozen=True)
class Dataset:
    """Training and test examples: labels as int64, the targets of a regression as float32.

    Images are uint8 with channels last, volumes uint8 with the channel first, tables float32 and standardized.

    - `name`: as tables and captions call it.
    - `x_train`, `y_train`, `x_test`, `y_test`: inputs and targets.
    - `task`: `"classification"` or `"regression"`.
    - `class_names`: in the order of the labels, also those that no example has.
    - `note`: what a reader must know about it.
    - `silos`: the site of each training example, if the set comes from several.
    """

    name: str
    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    task: Task = "classification"
    class_names: tuple[str, ...] = ()
    note: str = ""
    silos: NDArray[np.str_] = field(default_factory=_no_silos)

    def __post_init__(self) -> None:
        for split, x, y in (("training", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise DataError(f"data set '{self.name}' has {len(x)} {split} inputs but {len(y)} targets for them")
        if len(self.silos) not in (0, len(self.y_train)):
            raise DataError(
                f"data set '{self.name}' names the silos of {len(self.silos)} examples but has {len(self.y_train)}"
            )

    @property
    def classes(self) -> int:
        """The number of classes, also of those that no example has; 0 for a regression."""
        if self.task == "regression":
            return 0
        highest = max((int(y.max()) for y in (self.y_train, self.y_test) if len(y)), default=-1)
        return max(len(self.class_names), highest + 1)
