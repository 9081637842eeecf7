"""What a run was set up with: the policy, the learners, the sizes of models; `setting.json` in its folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from metis.core.costs import Power
from metis.core.events import LearnerId
from metis.core.model import Model
from metis.core.policy import Policy
from metis.core.stop import Target
from metis.runs.trace import write_json

SETTING = "setting.json"


@dataclass(frozen=True)
class LearnerInfo:
    """A learner as the federation was set up."""

    name: LearnerId
    examples: int
    batch_size: int
    time_per_batch: float  # nominal; NaN if unknown
    power: Power = field(default_factory=Power)
    class_counts: tuple[int, ...] = ()  # examples of each class, to draw the partition


def exchanged(model_bytes: int, update_bytes: int | None) -> int:
    """Bytes of an update request, both ways; an update is as large as a model unless it is encoded."""
    return model_bytes + (model_bytes if update_bytes is None else update_bytes)


@dataclass(frozen=True)
class Setting:
    """What must be known besides the events to turn them into a result."""

    policy: str  # as written in a configuration
    label: str  # as shown
    seed: int
    learners: tuple[LearnerInfo, ...]
    model_bytes: int
    fills_the_period: bool
    metric: str
    higher_is_better: bool = True
    target: Target | None = None
    class_names: tuple[str, ...] = ()
    real_time: bool = False  # learners are real sites and time is the wall clock's
    update_bytes: int | None = None  # size of an update, if updates are compressed
    facts: dict[str, Any] = field(default_factory=dict)  # dataset, network, versions: shown in reports

    @property
    def exchange_bytes(self) -> int:
        """Bytes that an update request moves: the community model down, and the update up."""
        return exchanged(self.model_bytes, self.update_bytes)

    @classmethod
    def of(
        cls,
        policy: Policy,
        model: Model,
        learners: Iterable[LearnerInfo],
        *,
        seed: int,
        metric: str,
        higher_is_better: bool = True,
        target: Target | None = None,
        class_names: Sequence[str] = (),
        real_time: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> Setting:
        """The setting of a run with this policy; `model` is one as it is sent, or empty where nothing is trained."""
        return cls(
            policy=policy.name,
            label=policy.label,
            seed=seed,
            learners=tuple(learners),
            model_bytes=(policy.model_bytes(model.layout) or model.nbytes) if model.nbytes else 0,
            update_bytes=policy.update_bytes(model.layout) if model.nbytes else None,
            fills_the_period=policy.fills_the_period,
            metric=metric,
            higher_is_better=higher_is_better,
            target=target,
            class_names=tuple(class_names),
            real_time=real_time,
            facts=dict(facts or {}),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "model_bytes": self.model_bytes,
            **({} if self.update_bytes is None else {"update_bytes": self.update_bytes}),
            "fills_the_period": self.fills_the_period,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "target": None if self.target is None else self.target.value,
            "class_names": list(self.class_names),
            "real_time": self.real_time,
            "facts": self.facts,
            "learners": [
                {
                    "name": learner.name,
                    "examples": learner.examples,
                    "batch_size": learner.batch_size,
                    "time_per_batch": learner.time_per_batch if math.isfinite(learner.time_per_batch) else None,
                    "power": [learner.power.active, learner.power.idle, learner.power.unit],
                    "class_counts": list(learner.class_counts),
                }
                for learner in self.learners
            ],
        }

    @staticmethod
    def from_summary(summary: dict[str, Any]) -> Setting:
        """What `to_json` wrote; raises ValueError, KeyError or TypeError if it did not."""
        setting = summary["setting"]
        metric, higher = _checked(setting["metric"], str), setting["higher_is_better"]
        target = _checked(setting["target"], int, float, NoneType)
        return Setting(
            policy=_checked(summary["policy"], str),
            label=_checked(summary["label"], str),
            seed=summary["seed"],
            learners=tuple(
                LearnerInfo(
                    _checked(row["name"], str),
                    _checked(row["examples"], int),
                    _checked(row["batch_size"], int),
                    math.nan if row["time_per_batch"] is None else _checked(row["time_per_batch"], int, float),
                    Power(*row["power"]),
                    tuple(_checked(count, int) for count in row["class_counts"]),
                )
                for row in setting["learners"]
            ),
            model_bytes=_checked(setting["model_bytes"], int),
            update_bytes=_checked(setting.get("update_bytes"), int, NoneType),
            fills_the_period=setting["fills_the_period"],
            metric=metric,
            higher_is_better=higher,
            target=None if target is None else Target(metric, target, higher),
            class_names=tuple(setting["class_names"]),
            real_time=setting.get("real_time", False),
            facts=_checked(setting["facts"], dict),
        )

    def save(self, folder: Path) -> None:
        """Write it before the first event, so that another process can follow the run."""
        write_json(
            folder / SETTING,
            {"policy": self.policy, "label": self.label, "seed": self.seed, "setting": self.to_json()},
        )


def _checked(value: Any, *kinds: type) -> Any:
    """The value, if it has one of these types and, as a number, a magnitude that a run can have."""
    if not isinstance(value, kinds) or (isinstance(value, (int, float)) and not abs(value) < 1e18):
        raise TypeError(f"{value!r} should be {' or '.join(kind.__name__ for kind in kinds)}")
    return value
