"""Measuring community models: on the controller's held-out examples, and at the learners on theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from metis.core.events import Evaluated, LearnerId
from metis.core.schedules import Cadence
from metis.deployment.controller.session import Session
from metis.deployment.controller.sessions import Sessions
from metis.deployment.controller.settings import DeploymentSettings, Evaluator, Report
from metis.deployment.controller.site_reports import POOLED, SiteReports, report_problem
from metis.deployment.controller.view import View
from metis.deployment.controller.writer import Standing, Writer
from metis.deployment.wire import wire_pb2 as pb
from metis.errors import DiskFull
from metis.learning.sums import Sums
from metis.system import monotonic

FEDERATED = "federated_"  # before a metric of the sites, where the controller has examples of its own
_WAIT = 0.05  # seconds between two looks whether the last reports have come


class Evaluations:
    """Measures one community model at a time, always the latest, and journals what was measured."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        settings: DeploymentSettings,
        writer: Writer,
        view: View,
        report: Report,
        sessions: Callable[[], Sessions],
        spawn: Callable[[Coroutine[Any, Any, None]], None],  # lets something happen beside
    ) -> None:
        self.evaluator = evaluator
        self._sessions, self._spawn = sessions, spawn
        self._settings, self._writer, self._view, self._report = settings, writer, view, report
        self._wanted = asyncio.Event()
        self._version: int | None = None
        self._cadence = Cadence(settings.evaluate_every)  # on the run's clock
        self._reports = SiteReports(settings.evaluation_wait)

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
        await self.journal(Evaluated(version, metrics))

    async def journal(self, event: Evaluated) -> None:
        """Make a measurement part of the run."""
        try:
            entry = await self._writer.perform(event)
        except DiskFull:
            return  # a later one will be
        values = ", ".join(f"{name} {value:.4f}{_how(name, event)}" for name, value in event.metrics.items())
        whose = f" of {len(event.by_learner)} sites" if event.by_learner else ""
        text = values or "too few for a federated value (deployment.evaluation_sites), reports"
        self._report("evaluation", f"community model {event.version}: {text}{whose} at {entry.at:.1f} s")
        best = self._view.best_version
        await self._writer.pin(set() if best is None else {best})

    # --- at the learners ------------------------------------------------------------------------

    def asked(self, learner: LearnerId) -> None:
        """Its task asks it to measure the community model too."""
        self._reports.ask(learner)

    def excused(self, learner: LearnerId) -> None:
        """Its task has ended without a model, so that it measures nothing."""
        self._reports.excuse(learner)

    def reported(self, session: Session, evaluation: pb.Evaluation) -> None:
        """Take one site's measurement, or let both operators read why it does not count."""
        if session.ready is None or not (self._settings.evaluate_at_learners and session.evaluates):
            return  # nobody asked it
        if self._reports.has_later(session.learner, evaluation.version):
            self._reports.excuse(session.learner)  # it was counted: once is enough
            return
        examples = session.ready.evaluation_examples
        sums = {name: Sums(own.kind, tuple(own.values)) for name, own in evaluation.sums.items()}
        problem = report_problem(evaluation.metrics, sums, examples)
        if problem is None and evaluation.version > self._view.standing.version:
            problem = f"there is no community model {evaluation.version} yet"
        if problem is not None:
            self._reports.excuse(session.learner)
            self._report("warning", f"an evaluation of '{session.learner}' is refused: {problem}")
            self._sessions().notify(session.learner, pb.Notice.INFORMATION, f"its evaluation is refused: {problem}")
        else:
            weight = float(examples)
            self._reports.add(session.learner, evaluation.version, weight, evaluation.metrics, monotonic(), sums)
        self.conclude()

    def conclude(self) -> None:
        """Journal the sites' measurement, as soon as nobody is waited for any more."""
        if not self._view.standing.finished and (event := self._concluded()) is not None:
            self._spawn(self.journal(event))

    def _concluded(self) -> Evaluated | None:
        if not self._reports.fresh:
            return None
        connected = self._evaluating()
        if not self._reports.due(connected, monotonic()):
            return None
        collected = self._reports.collect(connected)
        for learner, missing in collected.left_out.items():
            names = ", ".join(missing[:5])
            self._report(
                "warning", f"the evaluation of '{learner}' is left out: it has no {names}, which most sites report"
            )
        sites, members = len(collected.by_learner), self._sessions().members
        if not sites:
            return None
        prefix = FEDERATED if self.evaluator is not None else ""
        enough = sites >= min(self._settings.evaluation_sites, members)
        metrics = {prefix + name: value for name, value in collected.metrics.items()} if enough else {}
        conclusive = enough and sites >= min(2, members) and sites >= self._settings.target_share * members
        return Evaluated(collected.version, metrics, collected.by_learner, conclusive)

    async def last(self, standing: Standing, stopping: asyncio.Event) -> None:
        """Measure the model that is delivered, also where only sites can: they are asked for it, and waited for."""
        version, sessions = standing.version, self._sessions()
        if any(point.version == version for point in self._view.fold.history):
            return
        if self.evaluator is not None:
            await self.measure(version)
            return
        if not self._settings.evaluate_at_learners:
            return
        self._reports = SiteReports(self._settings.evaluation_wait)
        self._reports.since = monotonic()
        for learner in self._evaluating():
            self._reports.ask(learner)
            sessions.open[learner].send(evaluate=sessions.last_evaluation())
        while self._reports.waiting(self._evaluating(), monotonic()) and not stopping.is_set():
            await asyncio.sleep(_WAIT)
        self._reports.latest = {name: found for name, found in self._reports.latest.items() if found.version == version}
        if (event := self._concluded()) is not None:
            await self.journal(event)

    def _evaluating(self) -> set[LearnerId]:
        """The connected learners that have examples to measure a model on."""
        return {name for name, session in self._sessions().open.items() if session.evaluates}


def _how(name: str, event: Evaluated) -> str:
    """How the reports of sites make this value, unless it is that of all their examples together."""
    sites, plain = len(event.by_learner), name.removeprefix(FEDERATED)
    if sites < 2 or plain.startswith(POOLED):
        return ""
    exact = any(prefix + POOLED + plain in event.metrics for prefix in ("", FEDERATED))
    return " (median over sites)" if sites > 2 else "" if exact else " (mean over sites)"
