"""The step guard: how far an update goes is measured when it has come, judged once in the writer, and journaled.

The judgement is the core's (`step_guard`). What is too long is reported, clipped or refused, as the file says; a
clipped update is another model file, and it is that file that the journal names, so that a replay has the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from metis.core.arithmetic import BLOCK, squared_distance
from metis.core.events import UpdateRequest
from metis.core.model import Layout, Role
from metis.core.roster import Roster
from metis.core.step_guard import Lengths, step_excess
from metis.deployment.controller.state import State
from metis.deployment.storage import read_file
from metis.deployment.wire.models import model_of, read_model

Guard: TypeAlias = Literal["off", "report", "clip", "refuse"]
_PARTS: tuple[Role, ...] = ("parameter", "buffer", "control")
_WORDS = ("its parameters go", "its buffers go", "its control variate is")


@dataclass(frozen=True)
class Measured:
    """The step of an update."""

    base: str  # blob of the community model
    step: Lengths
    model: Lengths  # of the community model, at least as if its numbers were about 1


@dataclass(frozen=True)
class Verdict:
    """What becomes of an update."""

    event: UpdateRequest  # as it is journaled
    blob: str
    problem: str | None = None  # why it is too far
    refused: bool = False


class StepGuard:
    """Measures and judges steps; `judge` belongs into the writer."""

    def __init__(self, guard: Guard, limit: float, state: State, layout: Layout) -> None:
        self.guard, self._limit, self._state, self._layout = guard, limit, state, layout

    def measure(self, base: str, local_model: str | bytes) -> Measured:
        """Read both once, a block at a time; the local model by its blob, or its content."""
        community, local = self._model(base), self._model(local_model)
        step, own, sizes = [0.0] * 3, [0.0] * 3, [0] * 3
        for part, where in self._runs():
            # A control variate is not a step: it is as long as it is.
            start = None if _PARTS[part] == "control" else community[where]
            size = where.stop - where.start
            step[part] += squared_distance(local[where], start, size)
            own[part] += squared_distance(community[where], None, size)
            sizes[part] += size
        return Measured(
            base,
            Lengths(*(math.sqrt(square) for square in step)),
            Lengths(*(math.sqrt(max(square, size)) for square, size in zip(own, sizes, strict=True))),
        )

    def judge(
        self, roster: Roster, event: UpdateRequest, blob: str, measured: Measured, content: bytes | None = None
    ) -> Verdict:
        """In the writer: the update as it may count; of a small one that is in no blob yet with its content."""
        excess = step_excess(roster, event.steps, measured.step, measured.model, self._limit)
        worst = max(excess)
        if worst <= 1:
            return Verdict(replace(event, lengths=measured.step), blob)
        what = _WORDS[excess.index(worst)]
        problem = f"{what} {worst:.3g} times as far as is allowed (deployment.step_limit = {self._limit:g})"
        if self.guard == "refuse":
            return Verdict(event, blob, problem, refused=True)
        noted = replace(event, notes={**event.notes, "step_excess": worst})
        if self.guard == "report":
            return Verdict(replace(noted, lengths=measured.step), blob, problem)
        factors = [min(1.0, 1 / each) if each else 1.0 for each in excess]
        lengths = Lengths(*(length * factor for length, factor in zip(measured.step, factors, strict=True)))
        return Verdict(replace(noted, lengths=lengths), self._clip(measured.base, content or blob, factors), problem)

    def _clip(self, base: str, local_model: str | bytes, factors: list[float]) -> str:
        """The blob of the same update with shorter parts."""
        community, local = self._model(base), self._model(local_model)

        def pieces() -> Iterator[memoryview]:
            for part, where in self._runs():
                for begin in range(where.start, where.stop, BLOCK):
                    piece = slice(begin, min(begin + BLOCK, where.stop))
                    numbers = local[piece].astype(np.float64)
                    if factors[part] < 1:
                        start = 0.0 if _PARTS[part] == "control" else community[piece].astype(np.float64)
                        numbers = start + factors[part] * (numbers - start)
                    yield numbers.astype("<f4").view(np.uint8).data
            if isinstance(local_model, bytes):
                yield memoryview(local_model)[4 * self._layout.size :]
            else:
                yield memoryview(read_file(self._state.blob_path(local_model), 4 * self._layout.size))

        return self._state.put_blob(pieces())

    def _model(self, blob: str | bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        content = blob if isinstance(blob, bytes) else self._state.journal.content(blob)
        if content is not None:
            return model_of(content, self._layout).vector
        assert isinstance(blob, str)
        return read_model(self._state.blob_path(blob), self._layout).vector

    def _runs(self) -> Iterator[tuple[int, slice]]:
        """The vector from its front to its end, as stretches of one part."""
        tensors = [spec for spec in self._layout.tensors if spec.role != "counter" and spec.size]
        for role, specs in itertools.groupby(tensors, lambda spec: spec.role):
            slices = [self._layout.slices[spec.name] for spec in specs]
            yield _PARTS.index(role), slice(slices[0].start, slices[-1].stop)
