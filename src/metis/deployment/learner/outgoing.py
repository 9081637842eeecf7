"""What a learner reports of its site, as its policy allows; `metis learner --dry-run` shows the same messages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from metis.deployment.learner.site_policy import SitePolicy
from metis.deployment.wire import wire_pb2 as pb


def ready(facts: Mapping[str, Any], policy: SitePolicy) -> pb.Ready:
    """From what the training process found when it prepared; without metrics to report there is nothing to evaluate."""
    measured = facts["evaluation_examples"]
    return pb.Ready(
        examples=facts["examples"],
        batch_size=facts["batch_size"],
        evaluation_examples=measured if policy.reports(measured) else 0,
        layout=facts["fingerprint"],
    )


def loss(value: float, examples: int, policy: SitePolicy) -> float:
    """The training loss over this many examples as it travels; NaN if it does not."""
    return policy.coarse(value) if policy.reports(examples) else math.nan


def evaluation(
    version: int, answer: Mapping[str, Any], known: Collection[str], policy: SitePolicy
) -> pb.Evaluation | None:
    """What the site measured, under names that the federation knows; None if nothing of it may be reported."""
    metrics = {name: policy.coarse(value) for name, value in answer["metrics"].items() if name in known}
    if not (metrics and policy.reports(answer["examples"])):
        return None
    return pb.Evaluation(version=version, examples=answer["examples"], metrics=metrics)
