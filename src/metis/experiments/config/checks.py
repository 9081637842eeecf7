"""What must fit together: keys that need or exclude each other, numbers against the data, files that must exist."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from metis.core.mixing import MemoryStore
from metis.core.mixing.secure import fewest_members
from metis.core.model import Model
from metis.errors import ArgumentError, ConfigError
from metis.experiments.compose import build_solver, named
from metis.experiments.config.complete import solver_of
from metis.experiments.config.errors import ConfigErrors, did_you_mean, not_a_choice
from metis.experiments.config.schema import (
    METRICS,
    REPLACED_BY_SITE,
    TRACKERS,
    AvailabilityConfig,
    ExperimentConfig,
    NotifyConfig,
    task_of,
)
from metis.experiments.config.tables import build_layer, check_table, table_model
from metis.learning.engine import SHARES
from metis.net import is_loopback
from metis.simulation.pools.settings import PoolSettings


def network_parameters(
    config: ExperimentConfig,
    networks: Mapping[str, Callable[..., Any]],
    source: str,
    overridden: Sequence[str] = (),
) -> dict[str, Any]:
    """The options of the network, checked against the function that makes it; `overridden` came by --set."""
    errors = ConfigErrors(source)
    errors.overridden |= dict.fromkeys(overridden, "--set")
    name = config.network.name
    if name not in networks:
        errors.add(["network", "name"], f"there is no network '{name}'; {did_you_mean(name, networks)}")
        raise errors.error()
    model = table_model(networks[name], skip=2, sizes=True)
    options = check_table(model, config.network.parameters, errors, ["network"])
    errors.raise_if_any()
    return options or {}


def check_site(raw: dict[str, Any], errors: ConfigErrors) -> None:
    """A site file brings its own network and data; tables for these would be ignored."""
    for table in REPLACED_BY_SITE:
        if "site" in raw and table in raw:
            errors.add([table], "is given together with [site], whose file says it all; keep one of them")
    site, learners = raw.get("site"), raw.get("learners")
    if not isinstance(site, dict):
        return
    given = [key for key in ("file", "flower", "nvflare") if key in site]
    if not given:
        errors.add(["site", "file"], "missing; it must be given, or flower or nvflare in its place")
    if len(given) > 1:
        errors.add(["site"], f"has {' and '.join(given)}; keep one of them")
    of_clients = {
        "flower": ("a Flower app", ("run_config", "node_config", "unit")),
        "nvflare": ("an NVFlare script", ("args", "network", "unit")),
    }
    allowed = {key for kind in given for key in of_clients.get(kind, ("", ()))[1]}
    for owner, keys in of_clients.values():
        for key in keys:
            if key in site and key not in allowed:
                errors.add(["site", key], f"is given, but only {owner} has it")
                allowed.add(key)  # one sentence is enough
    if "file" not in given and isinstance(learners, list):
        for group in learners:  # such a client has batches of its own
            if isinstance(group, dict):
                group.setdefault("batch_size", 1)


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
    if config.site is None and config.training.engine not in ENGINES:  # a site file may bring it
        name = config.training.engine
        errors.add(["training", "engine"], f"there is no engine '{name}'; {did_you_mean(name, ENGINES)}")
    _check_partition(config, errors)
    _check_learners(config, errors)
    _check_faults(config, errors)
    processors = os.cpu_count() or 1
    if config.training.threads > processors and not elsewhere:
        errors.add(
            ["training", "threads"], f"is {config.training.threads}, but this machine has {processors} processors"
        )
    _check_stop(config, errors)
    _check_notify(config.deployment.notify, errors)
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


def kept_for_training(config: ExperimentConfig, examples: int) -> int:
    """How many of these training examples learners get; the others are for validation."""
    return examples - math.ceil(examples * (config.data.validation or 0.0))


def _check_examples(config: ExperimentConfig, train: int, test: int, errors: ConfigErrors) -> None:
    for key, there_are in (("train_examples", train), ("test_examples", test)):
        wanted = getattr(config.data, key)
        if wanted is not None and wanted > there_are:
            errors.add(["data", key], f"is {wanted}, but {config.data.dataset} has {there_are:,}")
    examples = kept_for_training(config, min(train, config.data.train_examples or train))
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
        "classes_per_learner": ("classes", ("non_iid", "random_classes", "shards"), True),
        "alpha": ("classes", ("dirichlet", "class_dirichlet"), True),
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
    if partition.classes == "class_dirichlet" and partition.sizes != "uniform":
        errors.add(["partition", "sizes"], "is given, but with classes = 'class_dirichlet' the sizes follow from alpha")
    if partition.classes == "shards" and isinstance(partition.classes_per_learner, list):
        errors.add(["partition", "classes_per_learner"], "is a list; the shards of each learner are one number")
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
    uses = {"random": {"mean_present", "mean_away"}, "daily": {"opens", "closes"}, "trace": {"file"}}
    wanted = uses.get(availability.kind, set())
    for key in ("mean_present", "mean_away", "opens", "closes", "day_seconds", "file"):
        given = getattr(availability, key) is not None
        if given and key not in wanted and (key != "day_seconds" or availability.kind != "daily"):
            errors.add([*at, key], f"is given, but kind = '{availability.kind}' does not use it")
        if not given and key in wanted:
            errors.add([*at, key], f"missing; kind = '{availability.kind}' needs it")
    opens, closes = availability.opens, availability.closes
    if opens is not None and closes is not None and opens % 24 == closes % 24:
        errors.add([*at, "closes"], "is the same hour as opens; for learners that are always there leave both out")


def _check_faults(config: ExperimentConfig, errors: ConfigErrors) -> None:
    tables: list[tuple[list[str | int], Any, str]] = [
        (["faults"], config.faults, "stall"),
        (["faults"], config.faults, "restart"),
    ]
    for index, group in enumerate(config.learners):
        tables.append((["learners", index, "network"], group.network, "cut"))
    for at, table, kind in tables:
        every, seconds = getattr(table, f"{kind}_every"), getattr(table, f"{kind}_seconds")
        if (every is None) != (seconds is None):
            missing, there = ("seconds", "every") if seconds is None else ("every", "seconds")
            errors.add([*at, f"{kind}_{missing}"], f"missing; {kind}_{there} needs it")
    faults = config.faults
    if faults.restarts and faults.restart_every is not None:
        errors.add(["faults", "restarts"], "is given together with restart_every; keep one of them")
    ends = 0.0
    for begins, seconds in faults.restarts:
        if begins < ends or seconds <= 0:
            errors.add(["faults", "restarts"], "must be in order of time, each after the one before and longer than 0")
            break
        ends = begins + seconds


def _check_notify(notify: NotifyConfig | None, errors: ConfigErrors) -> None:
    if notify is None:
        return
    where = ["deployment", "notify"]
    if not notify.command and notify.webhook is None:
        errors.add(where, "names neither a command nor a webhook")
    if notify.webhook is not None:
        try:
            url = urlsplit(notify.webhook)
            valid = url.scheme == "https" or (url.scheme == "http" and is_loopback(url.hostname or ""))
            valid = valid and bool(url.hostname) and notify.webhook.isprintable() and (url.port or 1) > 0
        except ValueError:
            valid = False
        if not valid:
            errors.add([*where, "webhook"], "must be an address https://..., or http://... on this machine")


def _check_stop(config: ExperimentConfig, errors: ConfigErrors) -> None:
    stop, evaluation = config.stop, config.evaluation
    if (stop.rounds, stop.seconds, stop.update_requests, stop.steps) == (None,) * 4:
        key = "at_target" if stop.at_target else "patience" if stop.patience is not None else ""
        alone = f"{key} alone may never come true; " if key else ""
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
    for index, name in enumerate(evaluation.metrics):
        if name not in METRICS[task]:
            errors.add(["evaluation", "metrics", index], not_a_choice(name, METRICS[task]))
    metric, target = evaluation.metric or next(iter(METRICS[task])), evaluation.target
    if target is not None and metric in SHARES and not 0 < target <= 1:
        errors.add(["evaluation", "target"], f"is {target:g}, but {metric} lies between 0 and 1")


def check_policies(config: ExperimentConfig, errors: ConfigErrors) -> None:
    """What only the definitions know, such as layers that exclude each other or that a protocol has no use for."""
    for index, table in enumerate(config.policy):
        path: list[str | int] = ["policy", index]
        layers = []
        for key, given in table.layers.items() if not errors.about(*path) else ():
            with _reported(errors, [*path, key]):
                layers.append(build_layer(key, given))
        if errors.about(*path):
            continue
        with _reported(errors, path):
            policy = named(table).with_layers(*layers)
            policy.start_community(Model.empty(), MemoryStore())
            alone = None if policy.baseline is None else policy.baseline.learner
            everybody = [name for group in config.learners for name in group.learner_names]
            if alone is not None and config.partition.sizes != "natural" and alone not in everybody:
                errors.add([*path, "learner"], f"there is no learner '{alone}'; {did_you_mean(alone, everybody)}")
            if policy.secure_sum is not None:
                _check_members(config, policy.secure_sum.colluders, [*path, "secure_sum"], errors)
            if errors.about("training"):
                continue
            solver = None
            with _reported(errors, [*path, "training"] if table.training.solver else ["training"]):
                solver = build_solver(solver_of(table, config.training))
            if solver is not None:
                policy.for_solver(solver)
            if "nova" in table.layers and (config.training.clip_norm is not None or config.training.accumulate > 1):
                errors.add([*path, "nova"], "takes a batch for a step, which it is not with clip_norm or accumulate")


def _check_members(config: ExperimentConfig, colluders: int, path: list[str | int], errors: ConfigErrors) -> None:
    """A federation with too few members would wait for ever."""
    fewest, learners = fewest_members(colluders), config.learner_count
    if config.partition.sizes != "natural" and 0 < learners < fewest:
        errors.add(path, f"with colluders = {colluders} needs {fewest} learners or more, there are {learners}")


@contextmanager
def _reported(errors: ConfigErrors, path: list[str | int]) -> Iterator[None]:
    """Add a wrong argument to the errors; a sentence that begins with its name gets the argument's path."""
    try:
        yield
    except ArgumentError as problem:
        subject, _, rest = str(problem).partition(" ")
        if subject == problem.argument and subject != path[-1]:
            path = [*path, subject]
        errors.add(path, rest if subject == path[-1] else str(problem))


def check_files(config: ExperimentConfig, errors: ConfigErrors) -> None:
    for index, group in enumerate(config.learners):
        at: list[str | int] = ["learners", index]
        for path, file in (
            ([*at, "speed_trace"], group.speed_trace),
            ([*at, "availability", "file"], group.availability.file),
        ):
            if file is not None and not Path(file).is_file():
                errors.add(path, f"there is no file {file}")
    site = config.site
    if site is not None and site.file is not None and not Path(site.file).is_file():
        errors.add(["site", "file"], f"there is no file {site.file}")
    if config.data.folder is not None and not Path(config.data.folder).is_dir():
        errors.add(["data", "folder"], f"there is no folder {config.data.folder}")
