"""The current task of a learner: its model is fetched, it is trained, and the update goes to the spool."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable

from metis.deployment.learner import outgoing
from metis.deployment.learner.absence import Absence
from metis.deployment.learner.connection import Connection, Session
from metis.deployment.learner.downloads import Downloads, TaskFailed
from metis.deployment.learner.site_log import SiteLog, kind_of
from metis.deployment.learner.site_policy import PolicyFile, Refusal, SitePolicy, at_this_hour
from metis.deployment.learner.sums import Sums
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.training import Training
from metis.deployment.learner.uploads import Uploads
from metis.deployment.learner.work import Update, WorkFolder
from metis.deployment.wire import wire_pb2 as pb
from metis.errors import Abandoned, ChildDied, ChildFailed
from metis.system import monotonic
from metis.text import number

_MAX_UNSENT = 16


class Tasks:
    """Works on one task at a time; a new one replaces it."""

    def __init__(
        self,
        supervisor: Supervisor,
        connection: Connection,
        work: WorkFolder,
        downloads: Downloads,
        training: Training,
        uploads: Uploads,
        log: SiteLog,
        policy: PolicyFile,
        step_back: Callable[[pb.Cause, float | None], None],  # leave the federation for so many seconds, or as usual
        sums: Sums,
    ) -> None:
        self._sums = sums
        self._supervisor, self._connection, self._work, self._log = supervisor, connection, work, log
        self._policy, self._step_back = policy, step_back
        self._downloads, self._training, self._uploads = downloads, training, uploads
        self.current: pb.Task | None = None  # being fetched or trained
        self.steps = 0
        self._job: asyncio.Task[None] | None = None
        self._unsent: deque[pb.Evaluation] = deque(maxlen=_MAX_UNSENT)  # measured without a session

    def take(self, task: pb.Task) -> None:
        """Begin with a task, unless it is trained already or in progress."""
        if self._uploads.has(task.number) or (self.current is not None and self.current.number == task.number):
            return
        before, abandoned = self._job, self.current is not None
        if before is not None and self.current is not None:  # an evaluation, in contrast, is finished first
            self._report("info", f"task {self.current.number}: abandoned, the controller has another one")
            before.cancel()
        self.current, self.steps = task, 0
        self._report("task", f"task {task.number}: {_budget(task)} from community model {task.version}")
        policy, refusal = self._policy.ask(at_this_hour, lambda rules: rules.refuses_task(task))
        if refusal is not None:
            self.refuse(refusal)
            return
        self._job = self._supervisor.start(self._do(task, policy, monotonic(), before, abandoned))

    def refuse(self, refusal: Refusal, seconds: float = 0.0) -> None:
        """The site policy does not allow the current task: report it, and get no other one for a while."""
        task, self.current = self.current, None
        text = refusal.text if task is None else f"task {task.number}: refused: {refusal.text}"
        cause = self._log.failed(pb.Cause.SITE_POLICY, text, rule=refusal.rule)
        if task is not None:
            self._connection.send_failed(task.number, cause, self.steps, seconds)
        self._step_back(cause, None)

    def measure(self, request: pb.Evaluate) -> None:
        """Measure the last community model; what is being trained does not count any more."""
        self._job = self._supervisor.start(self._measure(request, self._job))

    async def _measure(self, request: pb.Evaluate, before: asyncio.Task[None] | None) -> None:
        if self.current is not None and before is not None:
            self.current = None
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
            await self._training.wait_until_idle()
        elif before is not None:  # an evaluation is finished first
            await asyncio.gather(before, return_exceptions=True)
        with contextlib.suppress(TaskFailed):
            await self._downloads.fetch(request)
            await self._evaluate(request)

    def cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()

    async def abandon(self) -> None:
        """Drop the current task, and the child if it does not stop."""
        job, self._job, self.current = self._job, None, None
        if job is not None and not job.done():
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            await self._training.wait_until_idle()

    def send_unsent(self, session: Session) -> None:
        """Send what was not sent because there was no session: evaluations, and that a task waits for a window."""
        self._sums.announce()
        while self._unsent:
            session.send(evaluation=self._unsent.popleft())

    def _report(self, kind: str, text: str) -> None:
        self._supervisor.report(kind, text)

    async def _do(
        self,
        task: pb.Task,
        policy: SitePolicy,
        received: float,
        before: asyncio.Task[None] | None,
        abandoned: bool,
    ) -> None:
        """Fetch, train, keep, and evaluate while the update is handed in."""
        try:
            model = await self._downloads.fetch(task)
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
                if abandoned:
                    await self._training.wait_until_idle()
            masking = await self._sums.accept(task, model, policy)
            training = self._training.train(task, received, model, policy, self._progress, masking)
            update = await asyncio.wait_for(training, policy.max_task_seconds)
            if update is None:
                update = await self._training.mask(task, await self._sums.place(task), policy)
        except asyncio.TimeoutError:
            text = f"it took more than the {policy.max_task_seconds:g} s that this site allows (max_task_seconds)"
            self.refuse(Refusal(pb.Cause.TASK_SECONDS, text), monotonic() - received)
            await self._training.wait_until_idle()
        except ChildFailed as problem:
            self._fail(task, kind_of(problem), str(problem), problem.steps, problem.seconds, problem.details)
        except Abandoned as problem:
            self._fail(task, pb.Cause.ABANDONED, str(problem), self.steps, monotonic() - received)
        except TaskFailed as problem:
            self._fail(task, problem.kind, str(problem), self.steps, monotonic() - received, rule=problem.rule)
        except ChildDied as problem:
            self._fail(task, pb.Cause.PROCESS_DIED, str(problem), self.steps, monotonic() - received)
            if await self._training.died(problem):
                with contextlib.suppress(ChildFailed):
                    await self._training.prepare(self._connection.welcome)
        else:
            self._downloads.in_use = task.sha256 if task.evaluate else ""
            self.current = None
            self._uploads.look()
            self._report(
                "trained",
                f"task {task.number}: trained {update.steps} batches in {update.seconds:.1f} s "
                f"({update.time_per_batch:.3g} s each){_loss(update)}{_left_out(update)}",
            )
            if task.evaluate:
                await self._evaluate(task)

    def _progress(self, steps: int) -> None:
        self.steps = steps

    def _fail(
        self,
        task: pb.Task,
        kind: pb.Cause.Kind,
        reason: str,
        steps: int,
        seconds: float,
        details: str = "",
        rule: pb.Cause.Rule = pb.Cause.NO_RULE,
    ) -> None:
        self.current = None
        away = Absence.room_seconds if kind == pb.Cause.DISK else None  # the next task would fail just so, at once
        if self._training.private and kind != pb.Cause.PRIVACY_BUDGET:  # how a training failed may tell of its records
            kind, steps, seconds, rule = pb.Cause.UNKNOWN, 0, 0.0, pb.Cause.NO_RULE
        back = "" if away is None else f"; this learner leaves and comes back in {away:g} s"
        cause = self._log.failed(kind, f"task {task.number}: failed: {reason}{back}", details, rule)
        self._connection.send_failed(task.number, cause, steps, seconds)
        if away is not None:
            self._step_back(cause, away)

    async def _evaluate(self, task: pb.Task | pb.Evaluate) -> None:
        try:
            answer = await self._training.evaluate(self._work.model_file(task.sha256))
        except ChildFailed as problem:
            text = f"community model {task.version} cannot be evaluated here: {problem}"
            self._report("warning", text)
            self._log.keep(kind_of(problem), text, problem.details)
            return
        except ChildDied as problem:
            await self._training.died(problem)
            return
        finally:
            self._downloads.in_use = ""
        values = ", ".join(f"{name} {value:.4f}" for name, value in answer["metrics"].items())
        self._report("evaluated", f"community model {task.version} here: {values} ({answer['examples']} examples)")
        known = set(self._connection.welcome.metrics)
        if kept := sorted(answer["metrics"].keys() - known):
            self._report("info", f"not reported, because the federation does not have that name: {', '.join(kept)}")
        policy, refusal = self._policy.ask()
        evaluation = (
            None if refusal or self._training.private else outgoing.evaluation(task.version, answer, known, policy)
        )
        if evaluation is None:
            self._report("info", "not reported: the site policy keeps it, or the federation knows none of the names")
        elif not self._connection.send(evaluation=evaluation):
            self._unsent.append(evaluation)


def _budget(task: pb.Task) -> str:
    limits = [f"{task.steps} batches"] if task.HasField("steps") else []
    limits += [f"{task.seconds:.1f} s"] if task.HasField("seconds") else []
    return " or ".join(limits) or "no limit"


def _loss(update: Update) -> str:
    """Nothing where it is a part of a sum, or does not leave the training process."""
    return "" if math.isnan(update.loss) else f", loss {number(update.loss)}"


def _left_out(update: Update) -> str:
    error = update.compression_error
    return "" if error is None else f"; {100 * error:.2g} % of it waits for the next update"
