"""What a table's types cannot say: parameters of what a name names, keys that must fit each other, defaults."""

from __future__ import annotations

import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, ValidationError, create_model

from metis.core.community import MemoryStore
from metis.core.model import Model
from metis.errors import ConfigError
from metis.experiments.compose import SERVER_OPTIMIZERS, completed_server, compose, server_settings
from metis.experiments.config.errors import ConfigErrors, did_you_mean
from metis.experiments.config.schema import (
    METRICS,
    POLICIES,
    REPLACED_BY_SITE,
    SOLVER_SETTINGS,
    TRACKERS,
    AvailabilityConfig,
    Count,
    ExperimentConfig,
    PolicyConfig,
    SolverConfig,
    Table,
    TrainingConfig,
    task_of,
)
from metis.simulation.pools.settings import PoolSettings


def signature_model(function: Callable[..., Any], skip: int = 0, *, sizes: bool = False) -> type[BaseModel]:
    """A strict table whose keys are the parameters of a function, after the first `skip`; sizes are 1 or more."""
    hints = typing.get_type_hints(function)
    fields: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[skip:]:
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        annotation = hints.get(name, Any)
        if typing.get_origin(annotation) in (Sequence, tuple):  # TOML has lists
            annotation = list[typing.get_args(annotation)[0]]  # type: ignore[misc]
            default = list(default) if isinstance(default, tuple) else default
        if sizes and annotation in (int, list[int]):  # layers, filters, kernels: none can be 0
            annotation = Count if annotation is int else list[Count]
        fields[name] = (annotation, default)
    return create_model(function.__name__, __base__=Table, **fields)


def check_parameters(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    errors: ConfigErrors,
    path: Sequence[str | int],
    skip: int = 0,
    *,
    sizes: bool = False,
) -> dict[str, Any]:
    """All parameters of a function with the defaults filled in; what is wrong goes to the errors."""
    model = signature_model(function, skip, sizes=sizes)
    try:
        return model.model_validate(dict(given)).model_dump()
    except ValidationError as problem:
        errors.add_validation(problem, dict(given), model, path)
        return {}


def network_parameters(
    config: ExperimentConfig,
    networks: Mapping[str, Callable[..., Any]],
    source: str,
    overridden: Sequence[str] = (),
) -> dict[str, Any]:
    """The options of the network, checked against the function that makes it; `overridden` came by --set."""
    errors = ConfigErrors(source)
    errors.overridden.extend(overridden)
    name = config.network.name
    if name not in networks:
        errors.add(["network", "name"], f"there is no network '{name}'; {did_you_mean(name, networks)}")
        raise errors.error()
    options = check_parameters(networks[name], config.network.parameters, errors, ["network"], 2, sizes=True)
    errors.raise_if_any()
    return options


OPERATIONS: dict[str, dict[str, Any]] = {
    "random_crop": {
        "size": (Count, Field(description="pixels a side that are cut out")),
        "padding": (Annotated[int, Field(ge=0)], Field(default=0, description="black pixels around, before cutting")),
    },
    "horizontal_flip": {
        "probability": (
            Annotated[float, Field(ge=0, le=1)],
            Field(default=0.5, description="that an image is mirrored"),
        )
    },
    "standardize": {},
}


def operation_model(name: str) -> type[BaseModel]:
    """A strict table whose keys are the options of one step of an augmentation."""
    return create_model(name, __base__=Table, **OPERATIONS[name])


def check_open_tables(raw: dict[str, Any], errors: ConfigErrors) -> None:
    """The parameters of policies and operations, in the file's own terms so that every error has its path."""
    listed = raw.get("policy")
    for place, entry in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        name = entry["name"]
        if name not in POLICIES:
            errors.add(["policy", place, "name"], f"there is no policy '{name}'; {did_you_mean(name, POLICIES)}")
            continue
        given = {key: value for key, value in entry.items() if key not in PolicyConfig.model_fields}
        check_parameters(POLICIES[name], given, errors, ["policy", place])
    data = raw.get("data")
    augment = data.get("augment") if isinstance(data, dict) else None
    for place, entry in enumerate(augment if isinstance(augment, list) else []):
        if isinstance(entry, dict) and entry.get("name") in OPERATIONS:
            model = operation_model(entry["name"])
            given = {key: value for key, value in entry.items() if key != "name"}
            try:
                model.model_validate(given)
            except ValidationError as problem:
                errors.add_validation(problem, given, model, ["data", "augment", place])


def check_site(raw: dict[str, Any], errors: ConfigErrors) -> None:
    """A site file brings its own network and data; a table beside it would be ignored."""
    for table in REPLACED_BY_SITE:
        if "site" in raw and table in raw:
            errors.add([table], "is given together with [site], whose file says it all; keep one of them")


def cross_check(config: ExperimentConfig, errors: ConfigErrors, *, elsewhere: bool = False) -> None:
    from metis.data.datasets import DATASETS

    if config.site is not None:
        pass
    elif config.data.dataset in DATASETS:
        source = DATASETS[config.data.dataset]
        _check_examples(config, source.train, source.test, errors)
        if config.data.smallest_site is not None and "smallest_site" not in source.options:
            errors.add(["data", "smallest_site"], f"is given, but {source.name} names no sites")
    else:
        name = config.data.dataset
        errors.add(["data", "dataset"], f"there is no data set '{name}'; {did_you_mean(name, DATASETS)}")
    _check_partition(config, errors)
    _check_learners(config, errors)
    _check_solvers(config, errors)
    _check_servers(config, errors)
    _check_pacing(config, errors)
    processors = os.cpu_count() or 1
    if config.training.threads > processors and not elsewhere:
        errors.add(
            ["training", "threads"], f"is {config.training.threads}, but this machine has {processors} processors"
        )
    _check_stop(config, errors)
    _check_pool(config, errors)
    for place, tracker in enumerate(config.run.trackers):
        name = tracker.partition(":")[0]
        if name not in TRACKERS:
            errors.add(["run", "trackers", place], f"there is no tracker '{name}'; {did_you_mean(name, TRACKERS)}")


def _check_pool(config: ExperimentConfig, errors: ConfigErrors) -> None:
    run = config.run
    try:
        PoolSettings(
            run.pool, run.workers, config.training.threads, run.ray_address, run.gpus_per_learner, run.together
        )
    except ConfigError as problem:
        errors.add(["run"], str(problem))


def _check_examples(config: ExperimentConfig, train: int, test: int, errors: ConfigErrors) -> None:
    for key, there_are in (("train_examples", train), ("test_examples", test)):
        wanted = getattr(config.data, key)
        if wanted is not None and wanted > there_are:
            errors.add(["data", key], f"is {wanted}, but {config.data.dataset} has {there_are:,}")
    examples = min(train, config.data.train_examples or train)
    if config.learner_count > examples:
        errors.add(
            ["learners"],
            f"are {config.learner_count:,}, but there are {examples:,} examples: each needs at least one",
        )
    if config.partition.explicit is not None and sum(config.partition.explicit) > examples:
        errors.add(
            ["partition", "explicit"],
            f"adds up to {sum(config.partition.explicit):,}, but there are {examples:,} examples",
        )


def _check_partition(config: ExperimentConfig, errors: ConfigErrors) -> None:
    partition, learners = config.partition, config.learner_count
    if partition.sizes == "natural" and partition.classes != "iid":
        errors.add(["partition", "classes"], "is given, but sizes = 'natural' keeps what each silo holds")
    needs = {
        "exponent": ("sizes", ("power_law", "zipf"), False),
        "explicit": ("sizes", ("explicit",), True),
        "classes_per_learner": ("classes", ("non_iid",), True),
        "alpha": ("classes", ("dirichlet",), True),
    }
    for key, (chooser, choices, required) in needs.items():
        choice, given = getattr(partition, chooser), getattr(partition, key) is not None
        if given and choice not in choices:
            errors.add(
                ["partition", key],
                f"is given, but {chooser} = '{choice}' does not use it; {' or '.join(choices)} would",
            )
        if required and not given and choice in choices:
            errors.add(["partition", key], f"missing; {chooser} = '{choice}' needs it")
    for key in ("explicit", "classes_per_learner"):
        listed = getattr(partition, key)
        if isinstance(listed, list) and len(listed) != learners:
            errors.add(
                ["partition", key],
                f"has {len(listed)} entries, must have one for each of the {learners} learners",
            )


def _check_learners(config: ExperimentConfig, errors: ConfigErrors) -> None:
    names = [group.name for group in config.learners]
    everybody: set[str] = set()
    for place, group in enumerate(config.learners):
        at: list[str | int] = ["learners", place]
        if names.index(group.name) != place:
            errors.add([*at, "name"], f"is '{group.name}', which another group is called already")
        if group.names is not None and config.partition.sizes == "natural":
            errors.add([*at, "names"], "is given, but sizes = 'natural' calls each learner as its silo")
        if group.names is not None and len(group.names) != group.count:
            errors.add([*at, "count"], f"is {group.count}, but names has {len(group.names)}; leave it out")
        elif names.index(group.name) == place:
            for learner in group.learner_names:
                if learner in everybody:
                    errors.add([*at, "names"], f"has '{learner}', which another learner is called already")
                everybody.add(learner)
        if group.time_per_batch is None and group.speed_trace is None:
            errors.add([*at, "time_per_batch"], "missing; give it in seconds, or a speed_trace")
        if group.speed_trace is not None and (group.time_per_batch is not None or group.drift):
            both = "drift" if group.drift else "time_per_batch"
            errors.add([*at, "speed_trace"], f"is given together with {both}; the trace says it all")
        if any(factor <= 0 for _, factor in group.drift):
            errors.add([*at, "drift"], "has a factor that is not greater than 0")
        if [at_second for at_second, _ in group.drift] != sorted(at_second for at_second, _ in group.drift):
            errors.add([*at, "drift"], "must be in order of time")
        _check_availability(group.availability, [*at, "availability"], errors)
        for key, needed in (("idle_watts", "watts"), ("idle_epsilon", "epsilon")):
            if getattr(group, key) is not None and getattr(group, needed) is None:
                errors.add([*at, key], f"is given without {needed}")
    relative = [group.name for group in config.learners if group.watts is None]
    if len(relative) != len(config.learners):
        for place, group in enumerate(config.learners):
            if group.watts is None:
                errors.add(
                    ["learners", place, "watts"],
                    "missing; other learners have watts, and watts and epsilon cannot be added up",
                )
            elif group.epsilon is not None:
                errors.add(["learners", place, "epsilon"], "is given together with watts; keep one of them")


def _check_availability(availability: AvailabilityConfig, at: list[str | int], errors: ConfigErrors) -> None:
    wanted = {"always": set[str](), "random": {"mean_present", "mean_away"}, "trace": {"file"}}[availability.kind]
    for key in ("mean_present", "mean_away", "file"):
        given = getattr(availability, key) is not None
        if given and key not in wanted:
            errors.add([*at, key], f"is given, but kind = '{availability.kind}' does not use it")
        if not given and key in wanted:
            errors.add([*at, key], f"missing; kind = '{availability.kind}' needs it")


def _check_solvers(config: ExperimentConfig, errors: ConfigErrors) -> None:
    settings = ("momentum", "keep_momentum", "proximal_term")
    used = set(SOLVER_SETTINGS[config.training.solver])
    for place, policy in enumerate(config.policy):
        solver = _solver_of(policy, config.training)
        used |= _inherited(policy, config.training)
        for key in settings:
            if getattr(policy.training, key) is not None and key not in SOLVER_SETTINGS[solver]:
                errors.add(["policy", place, "training", key], _unused(key, solver))
    for key in settings:
        if getattr(config.training, key) is not None and key not in used:
            errors.add(["training", key], _unused(key, config.training.solver))


def _check_pacing(config: ExperimentConfig, errors: ConfigErrors) -> None:
    for place, policy in enumerate(config.policy):
        paced = [key for key in ("schedule", "adaptive") if getattr(policy, key) is not None]
        if len(paced) == 2:
            errors.add(["policy", place, "adaptive"], "is given together with schedule; keep one of them")
        elif paced and "slowest_learner_epochs" in policy.parameters:
            errors.add(
                ["policy", place, "slowest_learner_epochs"], f"is given together with {paced[0]}; keep one of them"
            )


def _check_servers(config: ExperimentConfig, errors: ConfigErrors) -> None:
    for place, policy in enumerate(config.policy):
        if policy.server is None:
            continue
        chosen = policy.server.optimizer
        given = policy.server.model_dump(exclude_none=True, exclude={"optimizer", "rate"})
        for key in given.keys() - server_settings(chosen):
            takers = [f"'{name}'" for name in SERVER_OPTIMIZERS if key in server_settings(name)]
            errors.add(
                ["policy", place, "server", key],
                f"is given, but optimizer = '{chosen}' does not use it; {' and '.join(takers)} would",
            )


def _unused(key: str, solver: str) -> str:
    *takers, last = [f"'{name}'" for name, settings in SOLVER_SETTINGS.items() if key in settings]
    either = f"{', '.join(takers)} and {last}" if takers else last
    return f"is given, but solver = '{solver}' does not use it; {either} would"


def _check_stop(config: ExperimentConfig, errors: ConfigErrors) -> None:
    stop, evaluation = config.stop, config.evaluation
    if (stop.rounds, stop.seconds, stop.update_requests, stop.steps) == (None,) * 4:
        alone = "at_target alone may never come true; " if stop.at_target else ""
        errors.add(["stop"], f"{alone}the run would not end; give rounds, seconds, update_requests or steps")
    if stop.at_target and evaluation.target is None:
        errors.add(["evaluation", "target"], "missing; stop.at_target needs it")
    task = task_of(config)
    if config.site is not None:
        return  # what is measured is known once its file is loaded
    if evaluation.higher_is_better is not None:
        errors.add(["evaluation", "higher_is_better"], "is given, but only a metric that a [site] brings needs it")
    if evaluation.metric is not None and evaluation.metric not in METRICS[task]:
        known = METRICS[task]
        errors.add(
            ["evaluation", "metric"],
            f"is '{evaluation.metric}', must be one of {', '.join(known)} for {task}",
        )
    metric, target = evaluation.metric or next(iter(METRICS[task])), evaluation.target
    if target is not None and metric == "accuracy" and not 0 < target <= 1:
        errors.add(["evaluation", "target"], f"is {target:g}, an accuracy lies between 0 and 1")


def check_policies(config: ExperimentConfig, errors: ConfigErrors) -> None:
    """The policies themselves know which values are impossible (lambda = 0)."""
    for place, policy in enumerate(config.policy):
        try:
            known = signature_model(POLICIES[policy.name]).model_validate(policy.parameters)
            made = compose(policy.model_copy(update=known.model_dump()))
            made.start_community(Model.empty(), MemoryStore())
        except (KeyError, TypeError, ValidationError):
            continue  # its name or its keys have been complained about
        except ValueError as problem:
            text = str(problem)
            key = next((name for name in (*policy.parameters, *policy.model_fields_set) if text.startswith(name)), None)
            path: list[str | int] = ["policy", place, *([key] if key else [])]
            # "slowest_learner_epochs (lambda) must be ...": the path has said the name, the symbol may stay.
            errors.add(path, re.sub(r"^\w+\s*\(?(\w+)\)?", r"\1", text) if key else text)


def check_files(config: ExperimentConfig, errors: ConfigErrors) -> None:
    for place, group in enumerate(config.learners):
        at: list[str | int] = ["learners", place]
        for path, file in (
            ([*at, "speed_trace"], group.speed_trace),
            ([*at, "availability", "file"], group.availability.file),
        ):
            if file is not None and not Path(file).is_file():
                errors.add(path, f"there is no file {file}")
    if config.site is not None and not Path(config.site.file).is_file():
        errors.add(["site", "file"], f"there is no file {config.site.file}")
    if config.data.folder is not None and not Path(config.data.folder).is_dir():
        errors.add(["data", "folder"], f"there is no folder {config.data.folder}")


# --- completing -------------------------------------------------------------------------------


def _solver_of(policy: PolicyConfig, training: TrainingConfig) -> str:
    return policy.training.solver or training.solver


def _inherited(policy: PolicyConfig, training: TrainingConfig) -> frozenset[str]:
    """Which settings of [training] a policy's solver takes over; the rest was meant for other solvers."""
    solver = _solver_of(policy, training)
    if solver == "fedprox" and training.solver != "fedprox":
        return frozenset({"proximal_term"})  # the paper's FedProx has no momentum
    if solver == "scaffold" and training.solver != "scaffold":
        return frozenset()  # nor has SCAFFOLD
    return SOLVER_SETTINGS[solver]


def _solver_settings(policy: PolicyConfig, training: TrainingConfig) -> SolverConfig:
    """What the policy says, else what [training] says, else the default; only what the solver uses."""
    solver = _solver_of(policy, training)
    values: dict[str, Any] = {
        "momentum": 0.9 if solver == "momentum" else 0.0,
        "keep_momentum": False,
        "proximal_term": 0.001,
    }
    for key in ("learning_rate", "weight_decay", *_inherited(policy, training)):
        if getattr(training, key) is not None:
            values[key] = getattr(training, key)
    values |= policy.training.model_dump(exclude_none=True)
    kept = {"learning_rate", "weight_decay", *SOLVER_SETTINGS[solver]}
    return SolverConfig(solver=cast("Any", solver), **{key: value for key, value in values.items() if key in kept})


def _parameters(policy: PolicyConfig) -> dict[str, Any]:
    """All parameters of the policy; not lambda, where periods are given otherwise."""
    known = signature_model(POLICIES[policy.name]).model_validate(policy.parameters).model_dump()
    if policy.schedule is not None or policy.adaptive is not None:
        known.pop("slowest_learner_epochs", None)
    return known


def completed(config: ExperimentConfig, folder: Path | None) -> ExperimentConfig:
    """Every default written out, files by their full path: the same run wherever the file is moved."""
    training = config.training
    chosen = [
        PolicyConfig(
            name=policy.name,
            label=policy.label,
            training=_solver_settings(policy, training),
            rate=policy.rate,
            compression=policy.compression,
            sample=policy.sample,
            schedule=policy.schedule,
            adaptive=policy.adaptive,
            nova=policy.nova,
            server=None if policy.server is None else completed_server(policy.server),
            **_parameters(policy),
        )
        for policy in config.policy
    ]
    evaluation, site = config.evaluation, config.site
    if site is None:
        metric = evaluation.metric or next(iter(METRICS[task_of(config)]))
        evaluation = evaluation.model_copy(update={"metric": metric})
    else:
        site = site.model_copy(update={"file": _absolute(site.file, folder)})
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
    training = training.model_copy(update={"momentum": None, "keep_momentum": None, "proximal_term": None})
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
    solvers = {"vanilla": "Vanilla", "momentum": "Momentum", "fedprox": "FedProx", "scaffold": "SCAFFOLD"}
    equal = [label for label in labels if labels.count(label) > 1]
    labels = [
        f"{label} w/ {solvers[str(policy.training.solver)]}" if label in equal and not policy.label else label
        for label, policy in zip(labels, config.policy, strict=True)
    ]
    seen: dict[str, int] = {}
    for place, label in enumerate(labels):
        first = seen.setdefault(slug(label), place)
        if first != place:
            errors.add(
                ["policy", place, "label"],
                f"would be '{label}', as that of policy.{first}; give each a label of its own",
            )
    chosen = [policy.model_copy(update={"label": label}) for label, policy in zip(labels, config.policy, strict=True)]
    return config.model_copy(update={"policy": chosen})


def slug(label: str) -> str:
    """A label as the name of a folder: SemiSync (λ=2) is semisync-lambda-2."""
    plain = label.replace("λ", "lambda ").lower()
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.") or "policy"


def _absolute(file: str | None, folder: Path | None) -> str | None:
    if file is None:
        return None
    path = Path(file).expanduser()
    return str((folder / path if folder is not None else path).resolve())
