"""Fault matrix C1 rows 3 and 32: a controller that is killed while it opens a sum, and sites that poison the model."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.faults import federation, play, tried
from deployment.federations import Served
from deployment.masked_crash_points import prepared, run
from deployment.scripted_learner import local_model
from metis.core import policies
from metis.core.layers import CentredClipping, GeometricMedian, Layer, Median, MultiKrum, NormBound, TrimmedMean
from metis.core.secure_sum import Answer
from metis.deployment.controller.state import State


@pytest.mark.parametrize(
    "written",
    ["statement", pytest.param("vote.", marks=pytest.mark.slow), pytest.param("answer.", marks=pytest.mark.slow)],
)
def test_a_controller_killed_while_it_opens_a_sum_goes_on_with_the_same_learners(
    written: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """C1 row 3: one member hands nothing in, so that shares of both kinds are given, of each learner only one."""
    monkeypatch.setenv(masked.FAILS, "dan")
    home = prepared(tmp_path, "home")
    tried()
    federation_, problem = run(home, None, "controller", killed=written)
    assert problem == "" and federation_.struck
    with State.open(home / "state", "process") as state:
        opened = [e.record["learners"] for e in state.entries() if e.record.get("event") == "sum_opened"]
    assert opened == [["ann", "bob", "cyd"]] * masked.ROUNDS
    said = federation_.said
    assert {name for _, name in said.answers} == set(masked.NAMES)  # also who is not in the sum has shares of it
    for context in {context for context, _ in said.answers}:
        statements = {statement for (of, _), made in said.votes.items() if of == context for statement in made}
        answered = {
            Answer.decode(made).statement for (of, _), all_ in said.answers.items() if of == context for made in all_
        }
        assert len(statements) == 1 and answered == statements


RULES: list[Layer] = [Median(), TrimmedMean(), GeometricMedian(), MultiKrum(), CentredClipping(), NormBound()]
ATTACKS = {"sign flip": lambda step: -step, "x 100": lambda step: 100 * step}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.title)
def test_a_fifth_of_the_sites_does_not_lead_the_model_away(rule: Layer, attack: str, tmp_path: Path) -> None:
    """C1 row 32: two of ten, in every round; plain mixing follows them."""
    plain = play(_poisoned(tmp_path / "plain", None, attack))
    robust = play(_poisoned(tmp_path / "robust", rule, attack))
    tried(2)
    assert robust < plain * (1.05 if isinstance(rule, NormBound) else 1.0)  # a flipped step is not too long
    if attack == "x 100":
        assert robust < 1.0
        assert plain > 10.0
    elif not isinstance(rule, (NormBound, CentredClipping)):  # which bound how far a model goes, not where to
        assert robust < 0.2


async def _poisoned(folder: Path, rule: Layer | None, attack: str) -> float:
    """How far the community model is from the honest sites' own after three rounds of one step each."""
    policy, rng = policies.sync_fedavg(1), np.random.default_rng(1)
    policy = policy if rule is None else policy.with_layers(rule)
    async with federation(folder, policy=policy, expected=10) as here, AsyncExitStack() as stack:
        learners = [await stack.enter_async_context(here.scripted(f"l{number}")) for number in range(10)]
        for learner in learners:
            await learner.join()
        done: list[float] = []
        while len(done) < 3:
            now = done[-1] if done else 1.0
            tasks = [await learner.task() for learner in learners]
            for index, (learner, task) in enumerate(zip(learners, tasks, strict=True)):
                step = 1.0 + float(rng.normal(0, 0.02))
                await learner.hand_in(task.number, local_model(now + (ATTACKS[attack](step) if index < 2 else step)))
            await here.until(lambda: _community(here).stamp.version > len(done))
            done.append(float(_community(here).model.vector.mean()))
        return abs(done[-1] - 4.0)


def _community(here: Served) -> Any:
    return here.process._writer.durable.controller.community
