"""Measuring community models: on the controller's held-out examples, and at the learners on theirs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection

import grpc

from metis.core.events import Evaluated, LearnerId
from metis.core.schedules import Cadence
from metis.deployment.controller.session import Refused
from metis.deployment.controller.settings import DeploymentSettings, Evaluator, Report
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Writer
from metis.deployment.wire import wire_pb2 as pb
from metis.errors import DiskFull

_LARGEST_METRIC = 1e100
_MAX_METRICS = 50
_MAX_NAME = 60


class Evaluations:
    """Measures one community model at a time, always the latest, and journals what was measured."""

    def __init__(
        self, evaluator: Evaluator | None, settings: DeploymentSettings, writer: Writer, view: View, report: Report
    ) -> None:
        self.evaluator = evaluator
        self._settings, self._writer, self._view, self._report = settings, writer, view, report
        self._wanted = asyncio.Event()
        self._version: int | None = None
        self._cadence = Cadence(settings.evaluate_every)  # on the run's clock
        self._reports: dict[LearnerId, tuple[int, int, dict[str, float]]] = {}  # version, examples, metrics: the latest
        self._reported: set[LearnerId] = set()  # since the latest mean over the learners

    # --- at the controller ----------------------------------------------------------------------

    def published(self, version: int, now: float) -> None:
        """A community model was published; it is measured if an evaluation is due."""
        if self._cadence.due(now):
            self.request(version)

    def request(self, version: int) -> None:
        """Measure this model soon, in place of any that still waits: a slow evaluator must not fall behind."""
        self._version = version
        self._wanted.set()

    async def run(self) -> None:
        """Measure what is requested, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            version, self._version = self._version, None
            if version is not None:
                await self.measure(version)

    async def measure(self, version: int) -> None:
        if self.evaluator is None:
            return
        best = self._view.best_version
        paths = await self._writer.pin({version} if best is None else {version, best})
        if version not in paths:
            return  # its file was collected: there are newer models to measure
        try:
            metrics = await self.evaluator.evaluate(paths[version])
        except Exception as problem:
            self._report("warning", f"community model {version} could not be evaluated: {problem}")
            return
        await self.journal(version, metrics)

    async def journal(self, version: int, metrics: dict[str, float]) -> None:
        """Make a measurement part of the run."""
        try:
            entry = await self._writer.perform(Evaluated(version, metrics))
        except DiskFull:
            return  # a later one will be
        values = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self._report("evaluation", f"community model {version}: {values} at {entry.at:.1f} s")
        best = self._view.best_version
        await self._writer.pin(set() if best is None else {best})

    # --- at the learners ------------------------------------------------------------------------

    def reported(
        self, learner: LearnerId, evaluation: pb.Evaluation, asked: Collection[LearnerId]
    ) -> tuple[int, dict[str, float]] | None:
        """One learner's measurement; once all that were asked have reported, the mean weighted by their examples."""
        if not 1 <= evaluation.examples <= self._settings.max_examples or len(evaluation.metrics) > _MAX_METRICS:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"an evaluation needs examples and at most {_MAX_METRICS} metrics",
            )
        # Sums of what is kept are finite, so that one learner's number cannot spoil the mean for all.
        metrics = {
            name[:_MAX_NAME]: value for name, value in evaluation.metrics.items() if abs(value) <= _LARGEST_METRIC
        }
        self._reports[learner] = (evaluation.version, evaluation.examples, metrics)
        self._reported.add(learner)
        if not set(asked) <= self._reported:
            return None
        reports = [self._reports[name] for name in asked]
        self._reported.clear()
        version = max(version for version, _, _ in reports)
        if version > self._view.standing.version:
            return None
        shared = set.intersection(*(set(metrics) for _, _, metrics in reports))
        prefix = "federated_" if self.evaluator is not None else ""
        total = sum(examples for _, examples, _ in reports)
        means = {
            prefix + name: math.fsum(examples * metrics[name] for _, examples, metrics in reports) / total
            for name in sorted(shared)
        }
        return (version, means) if means else None
