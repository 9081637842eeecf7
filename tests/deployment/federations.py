"""Small real federations for the tests: a controller process on loopback and learners on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np

from deployment.scripted_learner import LAYOUT, HonestLearner, ScriptedLearner, move_towards
from metis.core.events import LearnerId
from metis.core.model import Layout, Model
from metis.core.policy import Policy
from metis.core.stop import StopRule
from metis.deployment.controller.callers import Administrators, administrator_by_name
from metis.deployment.controller.process import ControllerProcess
from metis.deployment.controller.session import Context
from metis.deployment.controller.settings import DeploymentSettings, Evaluator, FederationPlan, make_core
from metis.deployment.controller.state import Durability, State
from metis.privacy.keys import Peers
from metis.runs.setting import Setting

_L = TypeVar("_L", bound=HonestLearner)


def initial_model(layout: Layout = LAYOUT) -> Model:
    return Model(layout, np.ones(layout.size, np.float32), np.full(layout.counters, 3))


def by_name(context: Context) -> str:
    return str(dict(context.invocation_metadata())["metis-learner"])


@dataclass
class Served:
    """A controller that serves until the block ends or the federation does."""

    process: ControllerProcess
    serving: asyncio.Task[bool]
    state: State
    reports: list[tuple[str, str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.process.address

    def learners(
        self,
        count: int,
        pace: Callable[[int], float] = lambda index: 0.0,
        kind: Callable[..., _L] = HonestLearner,  # type: ignore[assignment]
        **options: Any,
    ) -> list[_L]:
        """Learners that take part by themselves, each towards another constant."""
        return [
            kind(
                f"l{index}", self.address, self.process.layout, train=move_towards(index),
                seconds_per_batch=pace(index), **options,
            )
            for index in range(count)
        ]  # fmt: skip

    def scripted(self, name: str = "l0", *, instance: str = "first", address: str | None = None) -> ScriptedLearner:
        """A learner that does only what the test asks it to."""
        return ScriptedLearner(name, address or self.address, self.process.layout, self.process.run, instance)

    async def until(self, condition: Callable[[], bool], seconds: float = 300.0) -> None:
        """Wait for something to become true; the time is only there so that a test never hangs."""
        async with asyncio.timeout(seconds) if hasattr(asyncio, "timeout") else contextlib.nullcontext():
            while not condition():
                if self.serving.done():
                    self.serving.result()
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def served(
    folder: Path,
    policy: Policy,
    stop: StopRule,
    *,
    terms: DeploymentSettings | None = None,
    layout: Layout = LAYOUT,
    evaluator: Evaluator | None = None,
    listen: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
    identify: Callable[[Context], LearnerId] = by_name,
    members: Sequence[LearnerId] | None = None,
    metric: str = "accuracy",
    max_examples: Mapping[LearnerId, int] | None = None,
    administrators: Administrators | None = administrator_by_name,
    begun: StopRule | None = None,
    initial: Model | None = None,
    settings: str = "{}",
    peers: Peers | None = None,
    durability: Durability = "process",
) -> AsyncIterator[Served]:
    """A controller on loopback; leaving the block drains it as SIGTERM would."""
    from metis.core.costs import Power

    terms = terms or DeploymentSettings(expected=3, minimum=1, lease=20, heartbeat=0.5, linger=5)
    initial = initial or initial_model(layout)
    setting = Setting.of(policy, initial, (), seed=1, metric=metric, target=stop.target)
    allowed = None if members is None else dict.fromkeys(members, Power())
    plan = FederationPlan(
        make_core(policy, begun or stop, terms, 3), initial, settings, setting, allowed, terms,
        max_examples=max_examples or {},
        began_with=begun or stop, stop=stop, secure_sum=policy.secure_sum,
        settings_of_added=lambda name: json.dumps({"added": name}),
    )  # fmt: skip
    with State.open(folder, durability) as state:
        reports: list[tuple[str, str]] = []
        process = ControllerProcess(
            plan,
            state,
            folder / "run",
            evaluator=evaluator,
            identify=identify,
            report=lambda *line: reports.append(line),
            administrators=administrators,
            peers=peers,
        )
        serving = asyncio.create_task(process.serve(listen, credentials))
        while not (hasattr(process, "address") or serving.done()):
            await asyncio.sleep(0.005)
        if serving.done():
            serving.result()
        try:
            yield Served(process, serving, state, reports)
        finally:
            if not serving.done():
                process.drain("the test is over")
            with contextlib.suppress(Exception):
                await asyncio.wait_for(serving, 600)
