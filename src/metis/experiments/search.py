"""Search instead of a grid: Optuna proposes the settings of a file (the extra `search`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metis.errors import ArgumentError, ConfigError, needs_package
from metis.experiments.build import build_federation, build_policies, build_stop
from metis.experiments.config.load import load_config
from metis.experiments.sweep import seeds_from
from metis.runs.folds import RunFold
from metis.runs.run import Run


def search(
    file: str | Path,
    space: Mapping[str, tuple[float, float] | Sequence[Any]],
    *,
    trials: int = 20,
    seeds: int | Sequence[int] = 1,
    objective: Callable[[Run], float] | None = None,
    direction: str | None = None,
    study: Any = None,
) -> Any:
    """Look for the settings of an experiment's file that are best for its first policy; returns an Optuna study.

    - `file`: the experiment, as for `metis simulate`.
    - `space`: by key of the file: `(low, high)` for a number between them (whole if both are; by its logarithm if
      `high` is ten times `low` or more), or a list of choices, as in `{"training.learning_rate": (0.001, 0.1)}`.
    - `trials`: how many settings are tried.
    - `seeds`: how many, from the file's on, or which; a trial's value is the mean over them.
    - `objective`: from a run to a number; without it the best metric, by the validation examples if there are any.
      A trial whose first seed goes badly is then given up early.
    - `direction`: `"maximize"` or `"minimize"`; without it that of the metric. An own objective needs it.
    - `study`: an Optuna study to go on with, such as one in a database; without it a new one, drawn from the seed.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigError(needs_package("a search", "optuna", "search")) from None
    if not space:
        raise ArgumentError("space is empty; give the keys to search, as in {'training.learning_rate': (0.001, 0.1)}")
    if objective is not None and direction is None and study is None:
        raise ArgumentError("objective needs a direction: 'maximize' or 'minimize'")
    if direction not in (None, "maximize", "minimize"):
        raise ArgumentError(f"direction is '{direction}'; allowed: maximize, minimize")
    config = load_config(file)
    for key, values in space.items():
        load_config(file, [f"{key}={json.dumps(values[0])}"])  # a wrong key is found before anything runs
    higher = build_federation(config).higher_is_better
    if study is None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction=direction or ("maximize" if higher else "minimize"),
            sampler=optuna.samplers.TPESampler(seed=config.seed % 2**32),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3),
        )
    numbers = seeds_from(seeds, config.seed)

    def value_of(trial: Any) -> float:
        changes = [f"{key}={json.dumps(_proposed(trial, key, values))}" for key, values in space.items()]
        found = []
        for position, seed in enumerate(numbers):
            varied = load_config(file, [*changes, f"seed={seed}"])
            federation, (policy, solver) = build_federation(varied), build_policies(varied)[0]
            watch = _pruning(trial, optuna.TrialPruned) if objective is None and position == 0 else None
            run = federation.simulate(
                policy, build_stop(varied), solver=solver, evaluate_every=varied.evaluation.every_seconds, watch=watch
            )
            value = run.best_metric if objective is None else objective(run)
            if value is None or not math.isfinite(value):
                raise optuna.TrialPruned  # it diverged
            found.append(value)
        return math.fsum(found) / len(found)

    study.optimize(value_of, n_trials=trials)
    return study


def _proposed(trial: Any, key: str, values: tuple[float, float] | Sequence[Any]) -> Any:
    """What Optuna proposes for one key."""
    if not isinstance(values, tuple):
        return trial.suggest_categorical(key, list(values))
    if len(values) != 2 or not values[0] < values[1]:
        raise ArgumentError(f"space: {key} is {values}; give (low, high), or a list of choices")
    low, high = values
    log = 0 < 10 * low <= high
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=log)
    return trial.suggest_float(key, low, high, log=log)


def _pruning(trial: Any, pruned: type[BaseException]) -> Callable[[RunFold], None]:
    """Reports each evaluation of a run, and gives it up where Optuna says so."""
    reported = 0

    def watch(fold: RunFold) -> None:
        nonlocal reported
        for point in fold.history[reported:]:
            trial.report(point.metrics.get(fold.setting.metric, math.nan), reported)
            reported += 1
            if trial.should_prune():
                raise pruned

    return watch
