"""The times of the paper's own rows: what a batch took there, and what an update request took besides training.

`nominal` is what the paper states: 30 ms a batch on a GPU, 300 ms on a CPU. Its tables say otherwise. Cumulative time
over iterations is the time per batch that was measured, which differs from row to row; and an asynchronous learner
handed in far more seldom than its training explains. The rest grows with the slowness of the learner, so it is not a
queue at the controller; an evaluation at the learner after each request would fit. It is simulated as latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from metis.experiments.data import dry_assignments
from metis.reproduction.environments import Cell, Timings, varied
from metis.reproduction.tables import ASYNC, SEMISYNC, protocol_of


@dataclass(frozen=True)
class RowTimes:
    """What the learners of one group needed in a row of the paper."""

    time_per_batch: float  # of training
    beside_batch: float = 0.0  # seconds that were not training, for each batch
    beside_request: float = 0.0  # and for each update request


@dataclass(frozen=True)
class _Part:
    """A group of learners in a published row."""

    name: str
    iterations: int
    seconds: float  # cumulative
    tasks: Sequence[float]  # steps in a task of each learner

    @property
    def time_per_batch(self) -> float:
        return self.seconds / self.iterations


def row_times(cell: Cell) -> dict[str, RowTimes] | None:
    """By the group of learners; None if the paper has no numbers for this row."""
    published = cell.published
    if published is None or published.parallel_time is None or published.communication_cost is None:
        return None
    parts = _parts(cell)
    if parts is None:
        return None
    time = published.parallel_time
    if protocol_of(cell) == ASYNC:
        return _asynchronous(parts, time, published.communication_cost)
    rounds = published.communication_cost / cell.config.learner_count
    if protocol_of(cell) == SEMISYNC:
        return _with_rest_of_a_round(cell, {part.name: RowTimes(part.time_per_batch) for part in parts}, rounds, time)
    found = {}
    for part in parts:
        # Where the cumulative time is the parallel time of all learners, waiting was counted as well.
        waiting = part.seconds > 0.99 * time * len(part.tasks)
        found[part.name] = RowTimes(time / rounds / max(part.tasks) if waiting else part.time_per_batch)
    return found


def _parts(cell: Cell) -> list[_Part] | None:
    published, groups = cell.published, cell.config.learners
    assert published is not None, "asked of published rows only"
    if len(groups) == 1:
        given = [(published.iterations, published.cumulative_time)]
    else:
        given = [(published.fast, published.fast_time), (published.slow, published.slow_time)]
    epochs = float(cell.policy.parameters.get("local_epochs", 1.0))
    tasks: dict[str, list[float]] = {group.name: [] for group in groups}
    for one in dry_assignments(cell.config):
        tasks[one.group.name].append(epochs * -(-len(one.indices) // one.group.batch_size))
    parts = []
    for group, (iterations, seconds) in zip(groups, given, strict=True):
        if not iterations or not seconds:
            return None
        parts.append(_Part(group.name, iterations, seconds, tasks[group.name]))
    return parts


def _asynchronous(parts: Sequence[_Part], time: float, requests: int) -> dict[str, RowTimes]:
    """A learner with s steps a task hands in T / (s t (1 + d) + c) times in T seconds.

    The iterations of each group give its c, and the update requests of all give d: the more of the time beside
    training comes with the batches, the more often learners with little data hand in.
    """

    def constants(share: float) -> list[float]:
        return [_per_request(part, share, time) for part in parts]

    def made(share: float) -> float:
        return sum(
            time / (steps * part.time_per_batch * (1 + share) + constant)
            for part, constant in zip(parts, constants(share), strict=True)
            for steps in part.tasks
        )

    # At most so much that nothing is left for each request.
    share = _where(lambda value: made(value) < requests and min(constants(value)) > 0, 0.0, 3.0)
    return {
        part.name: RowTimes(part.time_per_batch, share * part.time_per_batch, constant)
        for part, constant in zip(parts, constants(share), strict=True)
    }


def _per_request(part: _Part, share: float, time: float) -> float:
    each = part.time_per_batch * (1 + share)

    def done(constant: float) -> float:
        return sum(steps * time / (steps * each + constant) for steps in part.tasks)

    return _where(lambda constant: done(constant) > part.iterations, 0.0, time)


def _where(before: Callable[[float], bool], low: float, high: float) -> float:
    """The place between these where the answer changes from true to false; the lower end if it is false there."""
    if not before(low):
        return low
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if before(middle) else (low, middle)
    return low


def _with_rest_of_a_round(cell: Cell, times: dict[str, RowTimes], rounds: float, time: float) -> dict[str, RowTimes]:
    """What a round took beyond the training of its slowest learner, the same for everybody."""
    from metis.reproduction.schedule import schedule_cell

    training = schedule_cell(_changed(cell, times)).run.costs.parallel_time
    rest = max(0.0, (time - training) / rounds)
    return {name: replace(found, beside_request=rest) for name, found in times.items()}


def timed(cell: Cell, timings: Timings) -> Cell:
    """The cell with the times of its row in the paper; as it is where they are nominal, or where the paper has none."""
    found = row_times(cell) if timings == "published" else None
    return cell if found is None else _changed(cell, found)


def training_share(cell: Cell) -> float:
    """Of the time that a batch takes with the times of its row: the part that is training, in all groups alike."""
    times = row_times(cell)
    if times is None:
        return 1.0
    one = next(iter(times.values()))
    return one.time_per_batch / (one.time_per_batch + one.beside_batch)


def _changed(cell: Cell, times: Mapping[str, RowTimes]) -> Cell:
    """With these times of its learners.

    SemiSync's steps were computed from the nominal times, so they are what its cold start measures; after it, learners
    are as slow as they were, and do all their steps (R13).
    """
    content = cell.config.to_dict()
    semisync = protocol_of(cell) == SEMISYNC
    longest = max(
        -(-len(one.indices) // one.group.batch_size) * (one.group.time_per_batch or 0.0)
        for one in dry_assignments(cell.config)
    )
    for group, table in zip(cell.config.learners, content["learners"], strict=True):
        own, nominal = times[group.name], group.time_per_batch or 0.0
        each = own.time_per_batch + own.beside_batch
        after_cold_start = longest + 0.75 * own.beside_request  # it begins and ends with half of that
        table.update({"drift": [[after_cold_start, each / nominal]]} if semisync else {"time_per_batch": each})
        table["network"] = {"latency": own.beside_request / 2}  # half of it each way
    if semisync:
        content["policy"][0]["budget"] = "all_steps"
    return replace(cell, config=varied(cell.config, learners=content["learners"], policy=content["policy"]))
