"""What figures, tables and reports say of runs alike: names, shares of time, and how much can be shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metis.core.costs import Costs
from metis.core.events import CommunityPublished
from metis.reporting.style import Kind
from metis.runs.folds import Span
from metis.runs.run import Run
from metis.runs.setting import LearnerInfo
from metis.text import printable, seconds

if TYPE_CHECKING:
    pass

# Beyond these a figure shows shares instead of single learners, or leaves something out.
MAX_ROWS = 48
MAX_SPANS = 3000
MAX_VERSIONS = 40
SMOOTH_FROM = 60
NOTHING = 0.0005  # a share too small to be seen


def labels(runs: Sequence[Run]) -> list[str]:
    """The name of each run: its policy, made unique where several runs share it."""
    plain = [short_name(run.policy) for run in runs]
    unique = []
    for index, (label, run) in enumerate(zip(plain, runs, strict=True)):
        alike = [other.setting.seed for other, name in zip(runs, plain, strict=True) if name == label]
        if len(alike) == 1:
            unique.append(label)
        elif len(set(alike)) == len(alike):
            unique.append(f"{label}, seed {run.setting.seed}")
        else:
            unique.append(f"{label} ({plain[: index + 1].count(label)})")
    return unique


def shares(costs: Costs) -> dict[Kind, float]:
    """How all learners together spent their time; adds up to 1."""
    spent = time_spent(costs)
    total = sum(float(part.sum()) for part in spent.values())
    return {kind: float(part.sum()) / total if total else 0.0 for kind, part in spent.items()}


def by_speed(learners: Sequence[LearnerInfo]) -> list[LearnerInfo]:
    """Fastest first; equally fast learners stay in their order."""
    return sorted(learners, key=lambda learner: learner.time_per_batch)


def timeline_window(runs: Sequence[Run]) -> float:
    """From the start until about four rounds of the slowest policy: enough to see its rhythm."""
    end = max((run.costs.parallel_time for run in runs), default=0.0)
    turn = 0.0
    for run in runs:
        training: dict[str, list[float]] = {}
        for span in run.spans():
            if span.kind == "training":
                training.setdefault(span.learner, []).append(span.end - span.start)
        turn = max([turn, *(statistics.median(lengths) for lengths in training.values())])
        published = publications(run, math.inf)
        if len(published) > 1:
            turn = max(turn, statistics.median(np.diff([0.0, *published]).tolist()))
    window = 4.25 * turn
    return window if 0 < 1.4 * window < end else end


def wide(run: Run) -> bool:
    """Whether the figure of the data needs the whole width of a page."""
    return len(run.setting.learners) > 16


def smoothed(runs: Sequence[Run]) -> bool:
    """Whether a curve has enough points for a running median drawn over them."""
    return any(sum(map(math.isfinite, run.metric_values)) > SMOOTH_FROM for run in runs)


def versions_drawn(run: Run, until: float) -> bool:
    """Whether the timeline has a line for each community model: not if there are too many."""
    return 0 < len(publications(run, until)) <= MAX_VERSIONS


def rows_drawn(run: Run, until: float) -> bool:
    """Whether the timeline has a row for each learner: not if there are too many."""
    return len(run.setting.learners) <= MAX_ROWS and len(spans_until(run, until)) <= MAX_SPANS


def publications(run: Run, until: float) -> list[float]:
    return [at for at, item in run.events if isinstance(item, CommunityPublished) and 0 < at <= until]


def spans_until(run: Run, until: float) -> list[Span]:
    return [span for span in run.spans() if span.start < until]


def time_spent(costs: Costs) -> dict[Kind, NDArray[np.float64]]:
    by_learner = costs.by_learner.values()
    return {
        "training": np.array([learner.active for learner in by_learner], dtype=float),
        "transfer": np.array([learner.transfer for learner in by_learner], dtype=float),
        "idle": np.array([learner.idle for learner in by_learner], dtype=float),
        "away": np.array([learner.away for learner in by_learner], dtype=float),
    }


def distribution_of(run: Run) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Counts by learner and class; one column where there are no classes."""
    learners = run.setting.learners
    names = [learner.name for learner in learners]
    widths = {len(learner.class_counts) for learner in learners}
    if len(widths) == 1 and 0 not in widths:
        counts = np.array([learner.class_counts for learner in learners], dtype=np.int64)
        return counts, names, [str(name) for name in run.setting.class_names]
    return np.array([[learner.examples] for learner in learners], dtype=np.int64), names, []


def short_name(name: str, longest: int = 40) -> str:
    """A name that fits and is valid in an XML file."""
    clean = printable(name)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def learner_label(learner: LearnerInfo) -> str:
    return f"{short_name(learner.name, 16)}  ({seconds(learner.time_per_batch)})"


def running_median(values: Sequence[float]) -> list[float]:
    """Each value's median with its neighbours; what is not a number stays so."""
    half = max(2, len(values) // 50)
    result = []
    for index, value in enumerate(values):
        near = [other for other in values[max(0, index - half) : index + half + 1] if math.isfinite(other)]
        # Few neighbours at the ends: the first and last evaluation are kept as they are.
        ends = index in (0, len(values) - 1)
        result.append(value if ends or not math.isfinite(value) else statistics.median(near))
    return result
