"""Learners of an experiment that protect their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metis.core.policy import Policy
from metis.errors import ConfigError
from metis.experiments.config.schema import LearnerGroup
from metis.learning.engine import Engine
from metis.privacy.records import Privacy, coarse, sampling_rate

if TYPE_CHECKING:
    from metis.experiments.federation import SimulatedLearner


def build_privacy(group: LearnerGroup) -> Privacy | None:
    """How the learners of this group protect their records, if they do."""
    return None if group.privacy is None else Privacy(**group.privacy.model_dump())


def limits(learner: SimulatedLearner) -> tuple[bool, int | None, bool]:
    """Whether it is private, the steps that its budget allows, and whether it fills periods with larger batches."""
    if learner.privacy is None:
        return False, None, False
    steps = learner.privacy.max_steps(sampling_rate(learner.batch_size, len(learner.indices)))
    return True, None if steps is None else coarse(steps), learner.privacy.larger_batches


def check_privacy(engine: Engine, learners: Sequence[SimulatedLearner], policy: Policy) -> None:
    """Refuse a policy or a network with which records cannot be protected, before anything is trained."""
    if all(learner.privacy is None for learner in learners):
        return
    if policy.protocol.by_deadline:
        raise ConfigError(
            "budget = 'deadline' cannot be combined with privacy: how many steps fit into a period depends on the "
            "records, which noise does not cover; use budget = 'steps'"
        )
    check = getattr(engine, "check_private", None)
    if check is None:
        raise ConfigError(f"{type(engine).__name__} cannot protect records; privacy needs the engine 'torch'")
    check()
