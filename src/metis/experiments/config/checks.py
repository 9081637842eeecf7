"""What a table's types cannot say: parameters of what a name names, keys that must fit each other, defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, create_model

from metis.core.layers import LAYERS
from metis.core.mixing import MemoryStore
from metis.core.model import Model
from metis.core.policies import POLICIES
from metis.core.solvers import SOLVERS
from metis.errors import ArgumentError, ConfigError
from metis.experiments.compose import compose
from metis.experiments.config.errors import ConfigErrors, did_you_mean, unknown_key
from metis.experiments.config.schema import (
    METRICS,
    REPLACED_BY_SITE,
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
from metis.experiments.config.tables import check_layer, check_table, solver_model, solver_settings, table_model
from metis.simulation.pools.settings import PoolSettings


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
    model = table_model(networks[name], skip=2, sizes=True)
    options = check_table(model, config.network.parameters, errors, ["network"])
    errors.raise_if_any()
    return options or {}


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
    """Parameters of policies, layers and operations, in the file's own terms so that every error has its path."""
    listed = raw.get("policy")
    for index, entry in enumerate(listed if isinstance(listed, list) else []):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            continue
        name = entry["name"]
        if name not in POLICIES:
            errors.add(["policy", index, "name"], f"there is no policy '{name}'; {did_you_mean(name, POLICIES)}")
            continue
        _check_policy_table(entry, errors, ["policy", index])
    data = raw.get("data")
    augment = data.get("augment") if isinstance(data, dict) else None
    for index, entry in enumerate(augment if isinstance(augment, list) else []):
        if isinstance(entry, dict) and entry.get("name") in OPERATIONS:
            model = operation_model(entry["name"])
            given = {key: value for key, value in entry.items() if key != "name"}
            try:
                model.model_validate(given)
            except ValidationError as problem:
                errors.add_validation(problem, given, model, ["data", "augment", index])


def _check_policy_table(entry: dict[str, Any], errors: ConfigErrors, path: list[str | int]) -> None:
    model = table_model(POLICIES[entry["name"]])
    layers = [key for key, kind in LAYERS.items() if kind.in_files and key not in model.model_fields]
    given: dict[str, Any] = {}
    for key, value in entry.items():
        if key in layers:
            check_layer(key, value, errors, [*path, key])
        elif key in model.model_fields:
            given[key] = value
        elif key not in PolicyConfig.model_fields:
            known = [*model.model_fields, *PolicyConfig.model_fields, *layers]
            errors.add([*path, key], unknown_key(key, known))
    check_table(model, given, errors, path)


def check_site(raw: dict[str, Any], errors: ConfigErrors) -> None:
    """A site file brings its own network and data; a table beside it would be ignored."""
    for table in REPLACED_BY_SITE:
        if "site" in raw and table in raw:
            errors.add([table], "is given together with [site], whose file says it all; keep one of them")


def cross_check(config: ExperimentConfig, errors: ConfigErrors, *, elsewhere: bool = False) -> None:
    from metis.data.datasets import DATASETS
    from metis.learning.engine import ENGINES

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
    if config.training.engine not in ENGINES:
        name = config.training.engine
        errors.add(["training", "engine"], f"there is no engine '{name}'; {did_you_mean(name, ENGINES)}")
    _check_partition(config, errors)
    _check_learners(config, errors)
    _check_solvers(config, errors)
    _check_pacing(config, errors)
    processors = os.cpu_count() or 1
    if config.training.threads > processors and not elsewhere:
        errors.add(
            ["training", "threads"], f"is {config.training.threads}, but this machine has {processors} processors"
        )
    _check_stop(config, errors)
    _check_pool(config, errors)
    for index, tracker in enumerate(config.run.trackers):
        name = tracker.partition(":")[0]
        if name not in TRACKERS:
            errors.add(["run", "trackers", index], f"there is no tracker '{name}'; {did_you_mean(name, TRACKERS)}")


def _check_pool(config: ExperimentConfig, errors: ConfigErrors) -> None:
    run = config.run
    try:
        PoolSettings(run.pool, run.workers, config.training.threads, run.ray_address, run.gpus_per_learner, run.batched)
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
    for index, group in enumerate(config.learners):
        at: list[str | int] = ["learners", index]
        if names.index(group.name) != index:
            errors.add([*at, "name"], f"is '{group.name}', which another group is called already")
        if group.names is not None and config.partition.sizes == "natural":
            errors.add([*at, "names"], "is given, but sizes = 'natural' calls each learner as its silo")
        if group.names is not None and len(group.names) != group.count:
            errors.add([*at, "count"], f"is {group.count}, but names has {len(group.names)}; leave it out")
        elif names.index(group.name) == index:
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
        for index, group in enumerate(config.learners):
            if group.watts is None:
                errors.add(
                    ["learners", index, "watts"],
                    "missing; other learners have watts, and watts and epsilon cannot be added up",
                )
            elif group.epsilon is not None:
                errors.add(["learners", index, "epsilon"], "is given together with watts; keep one of them")


def _check_availability(availability: AvailabilityConfig, at: list[str | int], errors: ConfigErrors) -> None:
    wanted = {"always": set[str](), "random": {"mean_present", "mean_away"}, "trace": {"file"}}[availability.kind]
    for key in ("mean_present", "mean_away", "file"):
        given = getattr(availability, key) is not None
        if given and key not in wanted:
            errors.add([*at, key], f"is given, but kind = '{availability.kind}' does not use it")
        if not given and key in wanted:
            errors.add([*at, key], f"missing; kind = '{availability.kind}' needs it")


def _check_solvers(config: ExperimentConfig, errors: ConfigErrors) -> None:
    named: dict[tuple[str | int, ...], str] = {("training", "solver"): config.training.solver}
    for index, policy in enumerate(config.policy):
        if policy.training.solver is not None:
            named["policy", index, "training", "solver"] = policy.training.solver
    unknown = {path: name for path, name in named.items() if name not in SOLVERS}
    for path, name in unknown.items():
        errors.add(path, f"there is no solver '{name}'; {did_you_mean(name, SOLVERS)}")
    if unknown:
        return
    used = set(solver_settings(config.training.solver))
    for index, policy in enumerate(config.policy):
        used |= _inherited(policy, config.training)
        _check_solver(
            _solver_of(policy, config.training), policy.training.parameters, errors, ["policy", index, "training"]
        )
    own = config.training.parameters
    _check_solver(config.training.solver, {k: v for k, v in own.items() if k not in used}, errors, ["training"])
    for solver in {_solver_of(policy, config.training) for policy in config.policy} | {config.training.solver}:
        known = solver_settings(solver)
        check_table(solver_model(solver), {k: v for k, v in own.items() if k in known}, errors, ["training"])


def _check_solver(solver: str, given: Mapping[str, Any], errors: ConfigErrors, path: list[str | int]) -> None:
    """Settings that stand beside a solver's name must be its own."""
    known = solver_settings(solver)
    for key in given:
        if key in known:
            continue
        takers = [f"'{name}'" for name in SOLVERS if key in solver_settings(name)]
        if takers:
            either = f"{', '.join(takers[:-1])} and {takers[-1]}" if len(takers) > 1 else takers[0]
            errors.add([*path, key], f"is given, but solver = '{solver}' does not use it; {either} would")
        else:
            general = TrainingConfig.model_fields if path == ["training"] else SolverConfig.model_fields
            errors.add([*path, key], unknown_key(key, [*general, *known]))
    check_table(solver_model(solver), {key: value for key, value in given.items() if key in known}, errors, path)


def _check_pacing(config: ExperimentConfig, errors: ConfigErrors) -> None:
    """A parameter that a layer replaces must not be given as well."""
    for index, policy in enumerate(config.policy):
        for key in policy.layers:
            for replaced in sorted(_replaced_by(key) & policy.parameters.keys()):
                errors.add(["policy", index, replaced], f"is given together with {key}; keep one of them")


def _replaced_by(key: str) -> set[str]:
    return {name for layer in LAYERS[key].classes.values() for name in layer.replaces}


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
    """The policies themselves know what is impossible, such as a layer that a protocol has no use for."""
    for index, policy in enumerate(config.policy):
        if policy.name not in POLICIES or any(line_of(line, index) for line in errors.lines):
            continue  # its name or its keys are refused already
        try:
            made = compose(policy)
            made.start_community(Model.empty(), MemoryStore())
        except ArgumentError as problem:
            text, key = str(problem), problem.argument
            path: list[str | int] = ["policy", index]
            layer = next((name for name, table in policy.layers.items() if key in table), None)
            if key in policy.layers or key in policy.parameters:
                path.append(str(key))
            elif layer is not None:
                path += [layer, str(key)]
            # The path says the name already.
            errors.add(path, text.removeprefix(f"{key} ") if path[-1] == key else text)


def line_of(line: str, index: int) -> bool:
    """Whether an error is about the policy of this number."""
    return f"policy.{index}." in line or ": policy." in line


def check_files(config: ExperimentConfig, errors: ConfigErrors) -> None:
    for index, group in enumerate(config.learners):
        at: list[str | int] = ["learners", index]
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
    inherits = SOLVERS[solver].inherits
    return solver_settings(solver) if inherits is None or solver == training.solver else inherits


def _solver_settings(policy: PolicyConfig, training: TrainingConfig) -> SolverConfig:
    """What the policy says, else what [training] says, else the default; only what the solver uses."""
    solver, own, shared = _solver_of(policy, training), policy.training, training.parameters
    inherited = {key: shared[key] for key in _inherited(policy, training) if key in shared}
    settings = solver_model(solver).model_validate({**inherited, **own.parameters}).model_dump()
    return SolverConfig(
        solver=solver,
        learning_rate=training.learning_rate if own.learning_rate is None else own.learning_rate,
        weight_decay=training.weight_decay if own.weight_decay is None else own.weight_decay,
        **settings,
    )


def _completed_policy(policy: PolicyConfig, training: TrainingConfig) -> PolicyConfig:
    """With every default written out, but for parameters that a layer replaces."""
    replaced = {name for key in policy.layers for name in _replaced_by(key)}
    known = table_model(POLICIES[policy.name]).model_validate(policy.parameters).model_dump()
    errors = ConfigErrors("policy")
    layers = {key: check_layer(key, table, errors, [key]) for key, table in policy.layers.items()}
    errors.raise_if_any()
    return PolicyConfig(
        name=policy.name,
        label=policy.label,
        training=_solver_settings(policy, training),
        **{name: value for name, value in known.items() if name not in replaced},
        **{key: layer[1] for key, layer in layers.items() if layer is not None},
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
    training = TrainingConfig(**{name: getattr(training, name) for name in TrainingConfig.model_fields})
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
            errors.add(
                ["policy", index, "label"],
                f"would be '{label}', as that of policy.{first}; give each a label of its own",
            )
    chosen = [policy.model_copy(update={"label": label}) for label, policy in zip(labels, config.policy, strict=True)]
    return config.model_copy(update={"policy": chosen})


def _solver_title(policy: PolicyConfig) -> str:
    name = str(policy.training.solver)
    return SOLVERS[name].title or name


def slug(label: str) -> str:
    """A label as the name of a folder: SemiSync (λ=2) is semisync-lambda-2."""
    plain = label.replace("λ", "lambda ").lower()
    return re.sub(r"[^a-z0-9.]+", "-", plain).strip("-.") or "policy"


def _absolute(file: str | None, folder: Path | None) -> str | None:
    if file is None:
        return None
    path = Path(file).expanduser()
    return str((folder / path if folder is not None else path).resolve())
