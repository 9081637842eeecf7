"""What a metric is computed from, as sums that add up over sites.

The recall of several sites is not a mean of theirs, but that of their counts together. Each kind of sums has one
function for its value, which measures a site's examples and those of all sites alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST = 768  # counts of 256 classes
_LARGEST = 1e18
_SAME = 1e-6  # relative, of a value and what its sums give

Vector = NDArray[np.float64]


class Sums(NamedTuple):
    """The sums behind one value."""

    kind: str
    values: tuple[float, ...]


class _Kind(NamedTuple):
    value: Callable[[Vector], float]
    items: Callable[[Vector], float]  # how many the sums are over
    sound: Callable[[Vector], bool]  # whether something can have these sums


# --- of counts per class: found where it is, found, there -----------------------------------------------


def _ratio(above: Vector, below: Vector) -> Vector:
    return np.divide(above, below, out=np.zeros(len(above)), where=below > 0)


def _f1(both: Vector, found: Vector, there: Vector) -> Vector:
    return _ratio(2 * both, found + there)


def _precision(both: Vector, found: Vector, there: Vector) -> Vector:
    return _ratio(both, found)


def _recall(both: Vector, found: Vector, there: Vector) -> Vector:
    return _ratio(both, there)


def _counted(of: Callable[[Vector, Vector, Vector], Vector], first: int = 0, binary: bool = True) -> _Kind:
    """Of two classes it is that of class 1, of more the mean over classes; `first` leaves out the background."""

    def value(sums: Vector) -> float:
        both, found, there = sums.reshape(3, -1)
        values = of(both, found, there)[first:]
        if binary and len(both) == 2:
            return float(values[-1])
        present = (found + there)[first:] > 0
        return float(values[present].mean()) if present.any() else math.nan

    def sound(sums: Vector) -> bool:
        if len(sums) < 6 or len(sums) % 3 or (sums < 0).any() or (sums != np.floor(sums)).any():
            return False
        both, found, there = sums.reshape(3, -1)
        return bool((both <= np.minimum(found, there)).all() and found.sum() == there.sum())

    return _Kind(value, lambda sums: float(sums[len(sums) // 3 * 2 :].sum()), sound)


# --- of numbers -----------------------------------------------------------------------------------------


def _r2(sums: Vector) -> float:
    errors, total, squares, items = sums.tolist()  # as Python's numbers, which overflow silently
    spread = squares - total * total / items
    return 1 - errors / spread if spread > 0 else math.nan


KINDS: dict[str, _Kind] = {
    "mean": _Kind(lambda sums: float(sums[0] / sums[1]), lambda sums: float(sums[1]), lambda sums: len(sums) == 2),
    "rmse": _Kind(
        lambda sums: math.sqrt(sums[0] / sums[1]),
        lambda sums: float(sums[1]),
        lambda sums: len(sums) == 2 and bool(sums[0] >= 0),
    ),
    "r2": _Kind(_r2, lambda sums: float(sums[3]), lambda sums: len(sums) == 4 and bool(min(sums[0], sums[2]) >= 0)),
    "f1": _counted(_f1),
    "precision": _counted(_precision),
    "recall": _counted(_recall),
    "balanced_accuracy": _counted(_recall, binary=False),
    "dice": _counted(_f1, first=1),
}


def value_of(sums: Sums) -> float:
    """The metric that has these sums; not a number where they do not define it."""
    return KINDS[sums.kind].value(np.asarray(sums.values, np.float64))


def sums_problem(sums: Sums, value: float, examples: int) -> str | None:
    """Why these cannot be the sums behind a value measured on this many examples; None if they can."""
    if sums.kind not in KINDS:
        return f"are of an unknown kind; {', '.join(KINDS)} are known"
    if len(sums.values) > LONGEST:
        return f"are {len(sums.values)} numbers; at most {LONGEST} are allowed"
    if not all(math.isfinite(number) and abs(number) <= _LARGEST for number in sums.values):
        return "have a number that is not finite or too large"
    kind, vector = KINDS[sums.kind], np.asarray(sums.values, np.float64)
    if not kind.sound(vector):
        return f"are impossible for {sums.kind}"
    items = kind.items(vector)
    if items < 1 or (items != examples if sums.kind == "mean" else items % examples):
        return f"are over {items:g} items, which does not fit the declared {examples} examples"
    if not math.isclose(found := kind.value(vector), value, rel_tol=_SAME, abs_tol=_SAME):
        return f"give {found:g}, but the report says {value:g}"
    return None


def merged_value(sites: Collection[tuple[Sums, float]]) -> float | None:
    """The metric over the examples of all sites, from the sums and the number of examples of each.

    None where it is not defined, or if sites have different kinds or classes, or count more for each example.
    """
    vectors = [np.asarray(sums.values, np.float64) for sums, _ in sites]
    alike: set[Any] = {
        (sums.kind, len(vector), KINDS[sums.kind].items(vector) / examples)
        for vector, (sums, examples) in zip(vectors, sites, strict=True)
    }
    if len(alike) != 1:
        return None
    ((kind, _, _),) = alike
    value = KINDS[kind].value(np.array([math.fsum(column) for column in zip(*vectors, strict=True)]))
    return value if math.isfinite(value) else None
