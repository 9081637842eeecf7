"""A run: what happened, what it cost and what came out, all folded from its events."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from metis.core.costs import Costs
from metis.core.events import Action, Event, LearnerSetAside, UpdateRefused
from metis.core.model import Model
from metis.errors import ConfigError, DataError, needs_package
from metis.runs import display
from metis.runs.at_learners import AtLearners
from metis.runs.folds import HistoryPoint, RunFold, Span, timeline
from metis.runs.setting import Setting
from metis.runs.spending import SpendingFold
from metis.runs.storage import load_model, save_model
from metis.runs.trace import EVENTS, read_trace, what_is_wrong, write_json
from metis.text import plural

SUMMARY, COMMUNITY, CONFIG = "summary.json", "community.safetensors", "config.toml"
BEST = "best.safetensors"


def is_finished(folder: Path) -> bool:
    """Whether a directory contains a run that was not interrupted."""
    try:
        summary = json.loads((folder / SUMMARY).read_text("utf-8"))
        return bool(summary["finish_reason"] != "interrupted")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def data_frame(rows: list[dict[str, Any]]) -> Any:
    """Plain rows as a pandas table; one sentence says what is missing without pandas."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise ConfigError(needs_package("a pandas table", "pandas", "tables")) from None
    return pandas.DataFrame(rows)


@dataclass
class Run:
    """The result of a federation: history, costs, the community model, tables and figures.

    - `setting`: what the run was: its policy, learners and data.
    - `events`: what happened, with its time; without weights.
    - `community_model`: the last one.
    - `wall_seconds`: of real time.
    - `folder`: where it is saved, if it is.
    - `best`: the model of `best_version`; else it is read from the folder.
    - `folded`: the fold of these events, if it exists already.
    """

    setting: Setting
    events: list[tuple[float, Event | Action]]
    community_model: Model
    wall_seconds: float
    folder: Path | None = None
    best: InitVar[Model | None] = None
    folded: InitVar[RunFold | None] = None

    def __post_init__(self, best: Model | None, folded: RunFold | None) -> None:
        self._best = best
        fold = folded
        if fold is None:
            fold = RunFold(self.setting)
            for now, item in self.events:
                fold.record(now, item)
        self._fold = fold

    # --- what came out ------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        return self.setting.label

    @property
    def history(self) -> list[HistoryPoint]:
        """One point for each evaluation of the community model."""
        return self._fold.history

    @property
    def costs(self) -> Costs:
        """The costs of the whole run."""
        return self._fold.costs

    @property
    def spending(self) -> SpendingFold:
        """What sites with protected records have spent of their budgets."""
        return self._fold.spending

    @property
    def costs_at_target(self) -> Costs | None:
        """The costs when the target was first reached; None if it was not."""
        return self._fold.costs_at_target

    @property
    def compression_error(self) -> float | None:
        """The share of an update that compression leaves for the next one, on average; None without compression."""
        return self._fold.compression_error

    @property
    def rounds(self) -> int:
        """Community models published."""
        return self._fold.version

    @property
    def refused(self) -> list[tuple[float, UpdateRefused]]:
        return self._fold.refused

    @property
    def set_aside(self) -> list[tuple[float, LearnerSetAside]]:
        return self._fold.set_aside

    @property
    def faults(self) -> dict[str, int]:
        """How often learners left and transfers were cut, and how many bytes travelled again because of it."""
        return {"departures": self._fold.departures, "cuts": self._fold.cuts, "resent_bytes": self._fold.resent}

    @property
    def finish_reason(self) -> str:
        return self._fold.finish_reason or "not finished"

    @property
    def metric_values(self) -> list[float]:
        """The metric at each point of the history."""
        return [point.metrics.get(self.setting.metric, math.nan) for point in self.history]

    @property
    def final_metric(self) -> float | None:
        return self.metric_values[-1] if self.history else None

    @property
    def best_metric(self) -> float | None:
        """The metric of the best model: by the validation examples if there are any, else by the metric itself."""
        value = math.nan if self._fold.best is None else self._fold.best.metrics.get(self.setting.metric, math.nan)
        return value if math.isfinite(value) else None

    @property
    def best_version(self) -> int | None:
        """Which community model is the best."""
        return None if self._fold.best is None else self._fold.best.version

    @property
    def best_model(self) -> Model | None:
        """The community model of `best_version`; None if nothing was measured, or it was not kept."""
        if self._best is None and self.folder is not None and (self.folder / BEST).is_file():
            self._best = load_model(self.folder / BEST)
        return self._best

    @property
    def at_learners(self) -> AtLearners | None:
        """What the last measured model is worth at each learner; None where learners have no test examples."""
        found = AtLearners(
            {learner: metrics for learner, (_, metrics) in self._fold.by_learner.items()},
            self.setting.metric,
            self.setting.higher_is_better,
        )
        return found if found.ranked else None

    def spans(self) -> list[Span]:
        """What every learner did when, without gaps from joining to the end."""
        return timeline(self.events)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` holds; the names are a contract."""
        reached, target = self.costs_at_target, self.setting.target
        costs = self.costs.to_json()
        unit = self.setting.learners[0].power.unit if self.setting.learners else "epsilon"
        return {
            "policy": self.setting.policy,
            "label": self.setting.label,
            "seed": self.setting.seed,
            "learners": len(self.setting.learners),
            "rounds": self.rounds,
            **costs,
            **({} if self.compression_error is None else {"compression_error": self.compression_error}),
            **({"faults": self.faults} if any(self.faults.values()) else {}),
            "energy_unit": "joule" if unit == "watt" else "epsilon second",
            "metric": {
                "name": self.setting.metric,
                # JSON has no infinity: where predictions overflow, there is no metric.
                "final": self.final_metric if math.isfinite(self.final_metric or 0.0) else None,
                "best": self.best_metric,
                "best_version": self.best_version,
            },
            "target": {
                "metric": self.setting.metric,
                "value": None if target is None else target.value,
                "reached": reached is not None,
                "parallel_time": None,
                "update_requests": None,
                "steps": None,
                **({} if reached is None else reached.to_json()),
            },
            "finish_reason": self.finish_reason,
            "wall_seconds": self.wall_seconds,
            "community_sha256": self.community_model.sha256(),
            "setting": self.setting.to_json(),
        }

    def to_records(self) -> list[dict[str, Any]]:
        """The history as plain rows."""
        return [{"policy": self.policy, **point.to_record()} for point in self.history]

    def to_pandas(self) -> Any:
        """The history as a pandas table; needs the extra `tables`."""
        return data_frame(self.to_records())

    def learners_to_records(self) -> list[dict[str, Any]]:
        """One plain row per learner: its examples, how it spent its time, its energy."""
        known = {learner.name: learner for learner in self.setting.learners}
        measured = self._fold.by_learner
        rows = []
        for name, costs in self.costs.by_learner.items():
            learner = known.get(name)
            rows.append(
                {
                    "policy": self.policy,
                    "learner": name,
                    "examples": None if learner is None else learner.examples,
                    "batch_size": None if learner is None else learner.batch_size,
                    "time_per_batch": None if learner is None else learner.time_per_batch,
                    "steps": costs.steps,
                    "update_requests": costs.update_requests,
                    "refused_updates": costs.refused,
                    "active": costs.active,
                    "transfer": costs.transfer,
                    "idle": costs.idle,
                    "away": costs.away,
                    "energy_equation": costs.energy.equation,
                    "energy_active": costs.energy.active,
                    "energy_idle_charged": costs.energy.idle_charged,
                    **(measured[name][1] if name in measured else {}),
                }
            )
        return rows

    def learners_to_pandas(self) -> Any:
        """`learners_to_records` as a pandas table; needs the extra `tables`."""
        return data_frame(self.learners_to_records())

    def plot(self, path: str | Path | None = None) -> Any:
        """The metric over parallel time and over update requests; saved if a `path` is given."""
        return display.curves([self], path)

    def _repr_html_(self) -> str:
        """In a notebook: the costs and the curves."""
        return display.page(self)

    @property
    def diverged(self) -> bool:
        """Whether the loss of the last evaluation is not a finite number; without a loss, one of the metrics."""
        if not self.history:
            return False
        metrics = self.history[-1].metrics
        return not all(map(math.isfinite, [metrics["loss"]] if "loss" in metrics else metrics.values()))

    @property
    def undefined(self) -> bool:
        """Whether the metric is not a number although training went well, as the AUC of examples of one class."""
        return not self.diverged and self.final_metric is not None and math.isnan(self.final_metric)

    def __repr__(self) -> str:
        costs, metric = self.costs, self.setting.metric
        final = "not evaluated" if self.final_metric is None else f"{metric} {self.final_metric:.4f}"
        if self.rounds == 0:
            why = ""
            if self.refused:
                why = f", {plural(len(self.refused), 'update')} refused, the first because {self.refused[0][1].reason}"
            initial = "" if self.final_metric is None else f"; the initial model has {final}"
            return f"<Run {self.policy}: nothing was mixed ({self.finish_reason}{why}){initial}>"
        if self.diverged:
            final = f"DIVERGED, {final}"
        elif self.undefined:
            final = f"{metric} is undefined on these test examples"
        return (
            f"<Run {self.policy}: {final} after {plural(self.rounds, 'round')}, {costs.parallel_time:g} s "
            f"parallel time, {plural(costs.update_requests, 'update request')}, {plural(costs.steps, 'step')}>"
        )

    # --- directories ----------------------------------------------------------------------------

    def save(self, folder: Path, write: Callable[[Path, Model, Mapping[str, str]], None] = save_model) -> None:
        """Write the summary and the community models, final and best, to `folder`; the events are there already.

        `write` writes one model to a path, with facts about it.
        """
        write(folder / COMMUNITY, self.community_model, {"policy": self.setting.policy})
        if self._best is not None:
            write(folder / BEST, self._best, {"policy": self.setting.policy, "version": str(self.best_version)})
        write_json(folder / SUMMARY, self.summary())
        self.folder = folder

    @staticmethod
    def load(folder: str | Path) -> Run:
        """Read a finished run back from its directory, `folder`."""
        folder = Path(folder)
        try:
            summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
            setting = Setting.from_summary(summary)
        except FileNotFoundError:
            raise DataError(f"{folder} has no {SUMMARY}: it is not the directory of a finished run") from None
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(f"{folder / SUMMARY} is not the summary of a run: {what_is_wrong(problem)}") from problem
        events = list(read_trace(folder / EVENTS))
        model = load_model(folder / COMMUNITY)
        try:
            run = Run(setting, events, model, summary["wall_seconds"], folder)
            found = run.summary()
        except (KeyError, TypeError, AssertionError) as problem:
            raise DataError(f"{folder / EVENTS} is damaged: its events contradict each other") from problem
        for key in ("rounds", "steps", "update_requests", "finish_reason", "community_sha256"):
            if found[key] != summary.get(key):
                raise DataError(
                    f"the files in {folder} do not belong to one run: {SUMMARY} says {key} {summary.get(key)}, "
                    f"the other files say {found[key]}"
                )
        return run
