"""The child process as the learner uses it: prepared for the current run, and replaced when it dies."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from metis.deployment.learner import outgoing
from metis.deployment.learner.connection import Connection
from metis.deployment.learner.downloads import TaskFailed
from metis.deployment.learner.site_log import SiteLog
from metis.deployment.learner.site_policy import PolicyFile, SitePolicy
from metis.deployment.learner.supervisor import Supervisor
from metis.deployment.learner.work import Update, WorkFolder, update_of
from metis.deployment.trainer.child import Child
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.chunks import travels_inside
from metis.errors import ChildDied, ChildFailed, ConfigError
from metis.system import monotonic

_GRACE_SECONDS = 10.0  # for an abandoned training to end
_MAX_DEATHS = 3


class Training:
    """Prepares the child, lets it train and evaluate, and starts another one when it dies, three times at most."""

    def __init__(
        self,
        supervisor: Supervisor,
        connection: Connection,
        work: WorkFolder,
        child: Child,
        log: SiteLog,
        *,
        site: Path | None,
        device: str | None,
        pace: float | None,
        policy: PolicyFile | None = None,
        ckks_key: Path | None = None,
    ) -> None:
        self._supervisor, self._connection, self._work, self._child = supervisor, connection, work, child
        self._log = log
        self._site, self._device, self._pace = site, device, pace
        self._ckks_key = None if ckks_key is None else str(ckks_key.resolve())
        self._policy = policy or PolicyFile()
        self._lock = asyncio.Lock()
        self._prepared: tuple[Any, ...] | None = None  # for which run
        self._prepared_pid: int | None = None
        self._facts: dict[str, Any] = {}
        self._deaths = 0

    async def prepare(self, welcome: pb.Welcome) -> dict[str, Any] | None:
        """Let the child make network and data, unless it has; None if it cannot be kept alive."""
        async with self._lock:
            demands = self._privacy(welcome.run)
            wanted = (welcome.run, welcome.learner, welcome.index, welcome.settings, welcome.layout, str(demands))
            while not (self._child.alive and self._child.pid == self._prepared_pid and self._prepared == wanted):
                try:
                    self._facts = await self._make(welcome, demands)
                except ChildDied as problem:
                    if await self.died(problem):
                        continue
                    return None
                self._prepared, self._prepared_pid = wanted, self._child.pid
            return self._facts

    @property
    def private(self) -> bool:
        """Whether the records are protected: then nothing clear about them leaves."""
        return bool(self._facts.get("private"))

    def _privacy(self, run: str) -> dict[str, Any]:
        """What the site demands of the training process, and where the ledger of its data set is."""
        try:
            rules = self._policy.read().privacy
        except ConfigError as problem:
            raise ChildFailed(f"the site policy cannot be used: {problem}", kind="setup") from None
        own = dict(rules or {})
        beside = None if self._policy.path is None or rules is None else self._policy.path.parent / "privacy"
        ledger = own.pop("ledger", None) or beside or self._work.folder / "privacy"
        places = {"ledger": str(ledger), "witness": own.pop("witness", None), "data": own.pop("data", None), "run": run}
        return {"settings": own or None, **places}

    async def _make(self, welcome: pb.Welcome, privacy: dict[str, Any]) -> dict[str, Any]:
        try:
            settings, layout = json.loads(welcome.settings), json.loads(welcome.layout)
        except ValueError:
            raise ChildFailed("the controller's settings are not valid JSON", kind="setup") from None
        if self._prepared is None:
            self._supervisor.report("info", "preparing network and data")
        facts: dict[str, Any] = await self._child.call(
            "prepare",
            settings=settings,
            site=None if self._site is None else str(self._site),
            name=welcome.learner,
            index=welcome.index,
            layout=layout,
            memory=str(self._work.memory),
            device=self._device,
            pace=self._pace,
            privacy=privacy,
            ckks_key=self._ckks_key,
        )
        self._supervisor.report(
            "ready",
            f"ready: {facts['examples']} examples in batches of {facts['batch_size']}"
            + (f", {facts['evaluation_examples']} to evaluate on" if facts["evaluation_examples"] else ""),
        )
        if facts.get("private"):
            self._supervisor.report("info", _protection(facts))
        if facts.get("network") is not None:
            self._work.keep_network(facts["network"])
        return facts

    async def died(self, problem: ChildDied) -> bool:
        """Count a death of the child; whether another one is worth a try."""
        self._deaths += 1
        self._prepared_pid = None
        if self._deaths < _MAX_DEATHS:
            self._supervisor.report("warning", f"{problem}; starting another one")
            return True
        text = f"{problem}, {self._deaths} times in a row; fix the cause and start the learner again"
        await self._connection.leave(self._log.keep(pb.Cause.PROCESS_DIED, text))
        self._supervisor.end(1, "error", text)
        return False

    async def wait_until_idle(self) -> None:
        """A training that was abandoned ends at its next batch; one that does not is killed with its process."""
        if not self._child.alive:
            return
        try:
            await asyncio.wait_for(self._child.call("ping"), _GRACE_SECONDS)
        except asyncio.TimeoutError:
            self._child.kill()
            await self._child.close()
        except ChildDied:
            pass

    async def train(
        self,
        task: pb.Task,
        received: float,
        model: Path,
        policy: SitePolicy,
        progress: Callable[[int], None],
        masking: Mapping[str, Any] | None = None,
    ) -> Update | None:
        """Train for a task that was received at this time, and keep the update in the spool.

        None if the training process holds it, until it is known with whose updates it is summed.
        """
        facts = await self.prepare(self._connection.welcome)
        if facts is None:
            raise TaskFailed("the training process cannot be kept alive", pb.Cause.PROCESS_DIED)
        seconds = None
        if task.HasField("seconds"):
            seconds = max(0.0, task.seconds - (monotonic() - received))
        # What is masked or private must not be made a second time; what is large takes long to hand in.
        synced = masking is not None or bool(task.window) or self.private or not travels_inside(task.bytes)
        answer = await self._child.call(
            "train",
            task=task.number,
            model=str(model),
            steps=task.steps if task.HasField("steps") else None,
            seconds=seconds,
            rate=task.rate if task.HasField("rate") else 1.0,
            batches_per_step=task.batches_per_step if task.HasField("batches_per_step") else 1,
            out=str(self._work.update_file(task.number)),
            masking=masking,
            hold=bool(task.window),
            seal=bool(task.seal),  # a controller that makes seals checks them
            synced=synced,
            progress=progress,
        )
        progress(answer["steps"])
        return None if "bytes" not in answer else await self._kept(task, answer, facts, policy, synced)

    async def mask(self, task: pb.Task, masking: Mapping[str, Any], policy: SitePolicy) -> Update:
        """Have what was trained for a task masked for a window, and keep it in the spool."""
        out, seal = str(self._work.update_file(task.number)), bool(task.seal)
        answer = await self._child.call("mask", task=task.number, masking=masking, out=out, seal=seal)
        return await self._kept(task, answer, self._facts, policy)

    async def _kept(
        self, task: pb.Task, answer: dict[str, Any], facts: Mapping[str, Any], policy: SitePolicy, synced: bool = True
    ) -> Update:
        answer["loss"] = math.nan if answer["loss"] is None else answer["loss"]
        loss = outgoing.loss(answer["loss"], facts["examples"], policy)
        update = update_of(self._work.run, {**answer, "loss": loss})
        try:
            if synced:
                await asyncio.to_thread(self._work.keep, update)
            else:  # it takes less than a thread would
                self._work.keep(update, synced=False)
        except OSError as problem:
            self._work.drop(task.number)
            text = f"the update cannot be kept in {self._work.update_file(task.number)}: {problem.strerror}"
            raise TaskFailed(text, pb.Cause.DISK) from problem
        self._deaths = 0
        return update

    async def evaluate(self, model: Path) -> dict[str, Any]:
        """Metrics of a community model on this site's own examples, and how many they are."""
        answer: dict[str, Any] = await self._child.call("evaluate", model=str(model))
        return answer

    async def save(self, model: Path, out: Path, version: int) -> None:
        """Write a community model as safetensors."""
        await self._child.call(
            "save",
            model=str(model),
            layout=json.loads(self._work.layout),
            network=self._work.network(),
            ckks_key=self._ckks_key,
            out=str(out),
            metadata={"run": self._work.run, "version": str(version)},
        )


def _protection(facts: Mapping[str, Any]) -> str:
    """For the site's operator: what protects the records, and what is spent."""
    text = f"records are protected with noise {facts['noise']:g}; epsilon {facts['epsilon_spent']:.3g}"
    if facts["budget"] is None:
        return f"{text} is spent, without a budget (delta {facts['delta']:g})"
    return f"{text} of {facts['budget']:g} is spent (delta {facts['delta']:g}), {facts['steps_left']} steps are left"
