"""Whole numbers in a table with given sums of rows and columns, as near as possible to given fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metis.errors import DataError

Counts = NDArray[np.int64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass
class _Rounded:
    """A whole-number allotment; if `missing` is not 0, the rows and columns that prevent a complete one."""

    amounts: Counts
    missing: int
    short_rows: Mask
    full_columns: Mask


def rows_with_rest(sizes: Counts, counts: Counts) -> tuple[Counts, int]:
    """The sizes, and one more row for the examples that nobody asked for."""
    rest = int(counts.sum() - sizes.sum())
    return (np.append(sizes, rest) if rest else sizes), rest


def fit_to_sums(start: NDArray[np.float64], rows: Counts, columns: Counts, passes: int = 60) -> NDArray[np.float64]:
    """Scale rows and columns in turn (iterative proportional fitting) until the sums are nearly as wanted.

    The result never exceeds a wanted sum; what is missing is left to `round_to_sums`.
    """
    amounts = start.astype(np.float64)
    for _ in range(passes):
        amounts *= _ratio(rows, amounts.sum(axis=1))[:, None]
        amounts *= _ratio(columns, amounts.sum(axis=0))[None, :]
        if np.all(np.abs(amounts.sum(axis=1) - rows) < 0.25):
            break
    amounts *= np.minimum(1.0, _ratio(rows, amounts.sum(axis=1)))[:, None]
    return amounts


def _ratio(wanted: Counts, present: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(wanted, present, out=np.zeros(len(wanted)), where=present > 0)


def round_to_sums(fitted: NDArray[np.float64], allowed: Mask, rows: Counts, columns: Counts) -> _Rounded:
    """Whole numbers near the fitted ones with exactly the wanted sums, as far as the allowed cells permit.

    A maximum flow from rows to columns, started at the fitted amounts, so it settles feasibility exactly.
    """
    amounts = np.where(allowed, np.floor(fitted), 0).astype(np.int64)
    rows_missing, columns_missing = rows - amounts.sum(axis=1), columns - amounts.sum(axis=0)
    fractions = np.where(allowed, fitted - amounts, -1.0)
    for row in np.flatnonzero(rows_missing):
        order = np.argsort(-fractions[row], kind="stable")
        takers = order[allowed[row, order] & (columns_missing[order] > 0)][: rows_missing[row]]
        amounts[row, takers] += 1
        columns_missing[takers] -= 1
        rows_missing[row] -= len(takers)
    while True:
        path, short_rows, full_columns = _augmenting_path(amounts, allowed, rows_missing, columns_missing)
        if not path:
            return _Rounded(amounts, int(rows_missing.sum()), short_rows, full_columns)
        # Along a path the amounts alternately rise (row to column) and fall (column back to another row).
        falls = [(row, path[k][1]) for k, (row, _) in enumerate(path[1:])]
        first, last = path[0][0], path[-1][1]
        limits = [rows_missing[first], columns_missing[last], *(amounts[cell] for cell in falls)]
        step = int(min(limits))
        for cell in path:
            amounts[cell] += step
        for cell in falls:
            amounts[cell] -= step
        rows_missing[first] -= step
        columns_missing[last] -= step


def _augmenting_path(
    amounts: Counts, allowed: Mask, rows_missing: Counts, columns_missing: Counts
) -> tuple[list[tuple[int, int]], Mask, Mask]:
    """The (row, column) cells of a shortest path from a short row to an open column, and what was seen."""
    seen_rows, seen_columns = rows_missing > 0, np.zeros(len(columns_missing), np.bool_)
    row_before = np.full(len(columns_missing), -1)
    column_before = np.full(len(rows_missing), -1)
    frontier = np.flatnonzero(seen_rows)
    while len(frontier):
        new_columns = np.flatnonzero(allowed[frontier].any(axis=0) & ~seen_columns)
        if len(new_columns) == 0:
            break
        row_before[new_columns] = frontier[np.argmax(allowed[np.ix_(frontier, new_columns)], axis=0)]
        seen_columns[new_columns] = True
        ends = new_columns[columns_missing[new_columns] > 0]
        if len(ends):
            path: list[tuple[int, int]] = []
            column = int(ends[0])
            while column >= 0:
                row = int(row_before[column])
                path.append((row, column))
                column = int(column_before[row])
            return path[::-1], seen_rows, seen_columns
        lenders = amounts[:, new_columns] > 0
        new_rows = np.flatnonzero(lenders.any(axis=1) & ~seen_rows)
        column_before[new_rows] = new_columns[np.argmax(lenders[new_rows], axis=1)]
        seen_rows[new_rows] = True
        frontier = new_rows
    return [], seen_rows, seen_columns


class Search:
    """Find which classes each learner holds, and how many of each.

    To decide this exactly is as hard as bin packing, so: deal the classes out (greedily, unless `at_random`), settle
    the amounts by a maximum flow, and as long as some examples cannot be placed, exchange a class of a learner that
    blocks them.
    """

    def __init__(
        self, sizes: Counts, counts: Counts, numbers: Counts, rng: np.random.Generator, at_random: bool = False
    ) -> None:
        self.sizes, self.counts, self.numbers, self.rng = sizes, counts, numbers, rng
        self.at_random = at_random
        self.rows, self.rest = rows_with_rest(sizes, counts)
        # Bounded by work and not by time, so that the same seed gives the same partition on any machine.
        self.flows = min(1000, max(50, 400_000 // (len(sizes) * len(counts))))

    def run(self) -> Counts:
        """The allotment, or a DataError if none was found."""
        attempts = 0
        while self.flows > 0:
            # The first deal is nearly always right. Every other one strays further from it, for tight cases.
            straying = attempts / 4 if attempts % 2 else 0.0
            attempts += 1
            held = self._deal_classes(straying)
            best = self._amounts(held, passes=2)
            tries_left = 2 * sum(held.shape)
            while best.missing and tries_left > 0 and self.flows > 0:
                exchanged = self._exchange(held, best, 0.5 if straying else 0.1)
                if exchanged is None:
                    break
                trial = self._amounts(exchanged, passes=2)
                tries_left = tries_left - 1 if trial.missing >= best.missing else 2 * sum(held.shape)
                if trial.missing <= best.missing:
                    held, best = exchanged, trial
            if not best.missing:
                # Two passes show what is possible; more make a learner's classes about equally large.
                return self._amounts(held, passes=60).amounts[: len(self.sizes)]
        learners, classes, slots = len(self.sizes), len(self.counts), int(self.numbers.sum())
        # Fewer slots than this leave learners and classes in groups, each of which must add up by itself.
        usual = learners + classes - 1
        hint = f": {slots} slots, where {usual} are needed unless sizes happen to match"
        raise DataError(
            f"could not divide {int(self.sizes.sum())} of {int(self.counts.sum())} examples in "
            f"{classes} classes among {learners} learners x {number_range(self.numbers.tolist())} classes"
            f"{hint if slots < usual else ''}; give the learners more classes or other sizes"
        )

    def _deal_classes(self, straying: float) -> Mask:
        """The larger learners choose first, each the classes with most examples left (near-ties at random), or any."""
        held = np.zeros((len(self.sizes), len(self.counts)), np.bool_)
        left = self.counts.astype(np.float64)
        holders = np.zeros(len(self.counts), np.int64)
        for learner in np.argsort(-self.sizes, kind="stable"):
            number = self.numbers[learner]
            # A class with as many holders as examples is closed, even if nobody took its last example yet.
            appeal = left * (1 + (1e-3 + straying) * self.rng.random(len(left))) + 1e-6 * self.rng.random(len(left))
            if self.at_random:
                appeal = self.rng.random(len(left))
            appeal[holders >= self.counts] = -1.0
            chosen = np.argsort(-appeal, kind="stable")[:number]
            held[learner, chosen] = True
            holders[chosen] += 1
            left[chosen] -= _level(left[chosen], self.sizes[learner])
        return held

    def _amounts(self, held: Mask, passes: int) -> _Rounded:
        self.flows -= 1
        # Everyone gets one example of each class it holds in advance; the flow settles the rest.
        columns = self.counts - held.sum(axis=0)
        rows = self.rows.copy()
        rows[: len(held)] -= self.numbers
        allowed = np.vstack([held, np.ones((1, held.shape[1]), np.bool_)]) if self.rest else held
        if columns.min() < 0:
            # More holders than examples: not even one for each; the holders must move elsewhere first.
            everyone = np.ones(len(rows), np.bool_)
            return _Rounded(np.zeros_like(allowed, np.int64), int(self.rows.sum()), everyone, columns < 0)
        fitted = fit_to_sums(allowed.astype(np.float64), rows, columns, passes)
        rounded = round_to_sums(fitted, allowed, rows, columns)
        rounded.amounts[: len(held)] += held
        return rounded

    def _exchange(self, held: Mask, rounded: _Rounded, straying: float) -> Mask | None:
        """One blocking learner gives up a class that is full and takes one that is not."""
        take = ~held & ~rounded.full_columns & (held.sum(axis=0) < self.counts)
        give = held & rounded.full_columns
        able = give.any(axis=1) & take.any(axis=1)
        # Mostly those who lack examples block, but sometimes those who hold a class that others need.
        short = able & rounded.short_rows[: len(held)]
        if short.any() and self.rng.random() >= straying:
            able = short
        if not able.any():
            return None
        learner = int(self.rng.choice(np.flatnonzero(able)))
        exchanged: Mask = held.copy()
        exchanged[learner, self.rng.choice(np.flatnonzero(give[learner]))] = False
        exchanged[learner, self.rng.choice(np.flatnonzero(take[learner]))] = True
        return exchanged


def _level(left: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """How much to take from each class so that the takes are equal where the classes allow it."""
    taken = np.zeros_like(left)
    missing = float(size)
    for index, k in enumerate(np.argsort(left, kind="stable")):
        taken[k] = min(left[k], missing / (len(left) - index))
        missing -= taken[k]
    return taken


def number_range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
