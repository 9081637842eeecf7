"""What does not need torch: the data that every system is given, and how a script is asked and answers."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np


def examples(shape: Sequence[int], count: int = 5000) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and labels of this shape: how long a step takes does not depend on them."""
    rng = np.random.default_rng(1990)
    return rng.random((count, *shape), np.float32), rng.integers(0, 10, count)


def parts(learners: int, each: int, count: int = 5000) -> list[np.ndarray]:
    """Which examples each learner holds."""
    rng = np.random.default_rng(1991)
    return [np.sort(rng.choice(count, each, replace=False)) for _ in range(learners)]


def layers(megabytes: float, count: int = 10) -> OrderedDict[str, np.ndarray]:
    """A model of random float32 in as many equal tensors, in units of 10^6 bytes."""
    rng = np.random.default_rng(1990)
    size = round(megabytes * 250_000 / count)
    return OrderedDict((f"layer{n}", rng.standard_normal(size, np.float32)) for n in range(count))


def rounds_of(moments: list[float]) -> list[float]:
    """Seconds of each round, but for the first, which warms up."""
    return [end - begin for begin, end in pairwise(moments)][1:]


def spec() -> dict[str, Any]:
    """What the benchmark asks for."""
    return json.loads(sys.argv[1])


def answer(value: Any) -> None:
    path = Path(sys.argv[2])
    path.with_suffix(".part").write_text(json.dumps(value), "utf-8")
    path.with_suffix(".part").rename(path)
