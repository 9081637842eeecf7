"""A configuration with every default written out, and a label for each policy."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import MISSING
from pathlib import Path
from typing import cast

from metis.core.policies import POLICIES
from metis.experiments.compose import compose
from metis.experiments.config.errors import ConfigErrors
from metis.experiments.config.schema import (
    METRICS,
    ExperimentConfig,
    PolicyConfig,
    SolverConfig,
    TrainingConfig,
    task_of,
)
from metis.experiments.config.tables import (
    GENERAL,
    inherited,
    layer_table,
    replaced_by,
    solver_model,
    table_model,
)
from metis.learning.engine import SOLVERS
from metis.registry import parameters_of


def solver_of(policy: PolicyConfig, training: TrainingConfig) -> SolverConfig:
    """All settings of a policy's solver: the policy's own, else those of [training], else the defaults."""
    own, solver = policy.training, policy.training.solver or training.solver
    definition = parameters_of(SOLVERS[solver])

    def general(name: str) -> float | None:
        if name not in definition or getattr(own, name) is not None:
            return cast("float | None", getattr(own, name))
        # The default of [training] is for solvers that have none themselves.
        default = definition[name].default
        given = name in training.model_fields_set or default is MISSING
        return cast("float", getattr(training, name) if given else default)

    taken_over = {name: value for name, value in training.extras.items() if name in inherited(solver, training.solver)}
    settings = solver_model(solver).model_validate({**taken_over, **own.parameters}).model_dump()
    return SolverConfig(solver=solver, **{name: general(name) for name in GENERAL}, **settings)


def _completed_policy(policy: PolicyConfig, training: TrainingConfig) -> PolicyConfig:
    """With every default written out, except for parameters that a layer replaces."""
    replaced = {name for key in policy.layers for name in replaced_by(key)}
    known = table_model(POLICIES[policy.name]).model_validate(policy.parameters).model_dump()
    return PolicyConfig(
        name=policy.name,
        label=policy.label,
        training=solver_of(policy, training),
        **{name: value for name, value in known.items() if name not in replaced},
        **{key: layer_table(key, table) for key, table in policy.layers.items()},
    )


def completed(config: ExperimentConfig, folder: Path | None) -> ExperimentConfig:
    """Every default written out, files by their full path: the same run wherever the file is moved."""
    training = config.training
    chosen = [_completed_policy(policy, training) for policy in config.policy]
    evaluation, site = config.evaluation, config.site
    if site is None:
        metric = evaluation.metric or next(iter(METRICS[task_of(config)]))
        evaluation = evaluation.model_copy(update={"metric": metric})
    else:
        site = site.model_copy(
            update={
                "file": _absolute(site.file, folder),
                "flower": _absolute_app(site.flower, folder),
                "nvflare": _absolute(site.nvflare, folder),
            }
        )
    learners = [
        group.model_copy(
            update={
                "speed_trace": _absolute(group.speed_trace, folder),
                "availability": group.availability.model_copy(
                    update={"file": _absolute(group.availability.file, folder)}
                ),
            }
        )
        for group in config.learners
    ]
    data = config.data.model_copy(update={"folder": _absolute(config.data.folder, folder)})
    # Each policy has its solver's settings by now; a policy taken out alone must not leave settings that none uses.
    training = TrainingConfig(**{name: getattr(training, name) for name in TrainingConfig.model_fields})
    training = training.model_copy(update={"initial_model": _absolute(training.initial_model, folder)})
    return config.model_copy(
        update={
            "policy": chosen,
            "training": training,
            "evaluation": evaluation,
            "site": site,
            "learners": learners,
            "data": data,
        }
    )


def labelled(config: ExperimentConfig, errors: ConfigErrors) -> ExperimentConfig:
    """A name of its own for each policy: the policy's, with the solver's where two would be equal."""
    labels = [policy.label or compose(policy).label for policy in config.policy]
    equal = [label for label in labels if labels.count(label) > 1]
    labels = [
        f"{label} w/ {_solver_title(policy)}" if label in equal and not policy.label else label
        for label, policy in zip(labels, config.policy, strict=True)
    ]
    seen: dict[str, int] = {}
    for index, label in enumerate(labels):
        first = seen.setdefault(slug(label), index)
        if first != index:
            same = f"would be '{label}', as that of policy.{first}"
            if label != labels[first]:
                same = (
                    f"is '{label}', so its folder would have the same name as that of policy.{first}, "
                    f"'{labels[first]}': {slug(label)}"
                )
            errors.add(["policy", index, "label"], f"{same}; give each a label of its own")
    chosen = [policy.model_copy(update={"label": label}) for label, policy in zip(labels, config.policy, strict=True)]
    return config.model_copy(update={"policy": chosen})


def _solver_title(policy: PolicyConfig) -> str:
    name = str(policy.training.solver)
    return SOLVERS[name].title or name


def slug(label: str) -> str:
    """A label as the name of a folder: SemiSync (λ=2) is semisync-lambda-2."""
    plain = unicodedata.normalize("NFC", label.replace("λ", "lambda ").lower())
    # Letters of every alphabet, the marks that belong to them, and digits.
    kept = (char if char == "." or unicodedata.category(char)[0] in "LMN" else "-" for char in plain)
    return re.sub("-+", "-", "".join(kept)).strip("-.") or "policy"


def _absolute_app(app: str | None, folder: Path | None) -> str | None:
    """A folder or file with its full path, and a module as it is."""
    place, colon, name = (app or "").partition(":")
    path = _absolute(place, folder) if place else None
    return app if path is None or not Path(path).exists() else f"{path}{colon}{name}"


def _absolute(file: str | None, folder: Path | None) -> str | None:
    if file is None:
        return None
    path = Path(file).expanduser()
    return str((folder / path if folder is not None else path).resolve())
