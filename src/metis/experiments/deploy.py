"""A real federation from an experiment's file: what the controller needs before the first learner joins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from metis.core.layers import MeasuredPace, ShortestPeriod
from metis.core.model import Model
from metis.core.policies import POLICIES
from metis.core.stop import Patience, StopRule, Target
from metis.deployment.controller.settings import DeploymentSettings, FederationPlan, NotifySettings, make_core
from metis.deployment.security.identity import check_name
from metis.errors import ConfigError
from metis.experiments.build import versions
from metis.experiments.compare import differences
from metis.experiments.compose import build_policy, compose
from metis.experiments.config.errors import RENAMED
from metis.experiments.config.load import ExperimentConfig, resolve_config
from metis.experiments.config.schema import StopConfig
from metis.experiments.config.tables import layer_table
from metis.experiments.learners import build_power
from metis.privacy.encrypted import EncryptedUpdates, encrypted_policy
from metis.runs.folds import VALIDATION
from metis.runs.setting import LearnerInfo, Setting
from metis.runs.storage import initial_fact

# Tables that may change between two starts of a controller; the others decide what the run is.
_FREE = ("deployment", "stop", "run")


def deployed(config: ExperimentConfig, begun: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """What the file leaves open, as it is in a deployment: there an exchange takes time, and lines are cut.

    A run that was begun without these defaults goes on without them.
    """
    if begun is not None and not any(ShortestPeriod.key in policy for policy in begun["policy"]):
        return config
    policies = []
    for policy in config.policy:
        made = POLICIES[policy.name](**policy.parameters)
        if made.protocol.has_period:
            added: dict[str, Any] = {}
            keys = {*policy.layers, *(layer.key for layer in made.layers)}
            if not keys & {ShortestPeriod.key, MeasuredPace.key}:  # a measured pace has room for the exchange already
                added[ShortestPeriod.key] = layer_table(ShortestPeriod.key, {})
            if policy.parameters.get("returning", "") is None:
                added["returning"] = "train"
            policy = policy.model_copy(update=added)
        policies.append(policy)
    return config.model_copy(update={"policy": policies})


def settings_document(config: ExperimentConfig) -> dict[str, Any]:
    """The settings that all sites must share, as they are sent to them; the file has one policy."""
    document = config.to_dict()
    del document["deployment"]  # how the controller runs, and who follows the run, does not concern the sites
    document["run"].pop("trackers", None)
    document["training"].pop("initial_model", None)  # the controller sends the model itself
    return {"experiment": document, "policy": 0}


def _settings_of_added(config: ExperimentConfig, name: str, frozen: str = "") -> dict[str, Any]:
    """For a learner that the file does not name: it trains like those of the first group."""
    document = settings_document(config)
    experiment = document["experiment"]
    experiment["learners"] = [{**experiment["learners"][0], "name": name, "names": [name], "count": 1}]
    return document | ({"frozen": frozen} if frozen else {})


def check_same_run(config: ExperimentConfig, begun: Mapping[str, Any]) -> None:
    """Refuse to resume a run that was started with a different file."""
    now = config.to_dict()
    then = resolve_config(
        {
            **_renamed({table: begun[table] for table in begun if table not in _FREE}),
            **{table: now[table] for table in _FREE},
        },
        "the state folder",
        elsewhere=True,
    ).to_dict()
    for training in (now["training"], then["training"]):
        training.pop("initial_model", None)  # the run has its initial model, wherever the file is now
    for policy in (*now["policy"], *then["policy"]):
        policy.pop("label", None)  # is for people; a new version may word it differently
    for table in sorted({*now, *then}):
        for path, before, after in differences(then.get(table), now.get(table)):
            change = f"{path or 'it'} was {before!r}, is {after!r}"[:200]
            raise ConfigError(
                f"the run was started with another [{table}] ({change}); restore the file, or start a new run with "
                "another --state folder"
            )


def _renamed(begun: Any) -> Any:
    """Tables that an earlier version has written, with today's names of their keys."""
    if isinstance(begun, Mapping):
        return {RENAMED.get(key, key): _renamed(value) for key, value in begun.items()}
    return [_renamed(value) for value in begun] if isinstance(begun, list) else begun


def check_deployment(config: ExperimentConfig) -> None:
    """Refuse a file that no controller could run, before anything is built."""
    make_settings(config)
    if all(compose(policy).baseline is not None for policy in config.policy):
        raise ConfigError(f"policy: '{config.policy[0].name}' is a baseline, which only simulations have")
    guard = config.deployment.step_guard if "step_guard" in config.deployment.model_fields_set else "off"
    policies = [compose(policy) for policy in config.policy]
    if guard != "off" and (hiding := [policy for policy in policies if policy.hides_models]):
        how = "ckks" if hiding[0].ckks is not None else "secure_sum"
        raise ConfigError(
            f"deployment.step_guard: '{guard}' measures each local model, and {how} lets nobody see one; leave it "
            "out, or set it to 'off'"
        )
    if any(policy.ckks is not None for policy in policies):
        _check_encrypted(config)
    for group in config.learners:
        for name in group.learner_names:
            try:
                check_name(name)
            except ConfigError as problem:
                raise ConfigError(f"learners: {problem}") from None


def _check_encrypted(config: ExperimentConfig) -> None:
    if config.training.initial_model is not None:
        raise ConfigError("training.initial_model: encrypted federations (policy.ckks) begin with a new model")
    if (config.stop.at_target or config.stop.patience is not None) and not config.deployment.evaluate_at_learners:
        raise ConfigError(
            "stop: the controller cannot evaluate encrypted models (policy.ckks); let the sites do it with "
            "deployment.evaluate_at_learners = true, or end by rounds, seconds, steps or update_requests"
        )


def make_settings(config: ExperimentConfig) -> DeploymentSettings:
    """The table [deployment] as the controller uses it."""
    deployment, count = config.deployment, config.learner_count
    return DeploymentSettings(
        expected=count,
        minimum=1 if deployment.minimum is None else deployment.minimum,
        wait_seconds=math.inf if deployment.wait_seconds is None else deployment.wait_seconds,
        lease=deployment.lease,
        heartbeat=deployment.heartbeat,
        largest_number=deployment.largest_number,
        max_examples=deployment.max_examples,
        evaluate_every=config.evaluation.every_seconds,
        evaluate_at_learners=deployment.evaluate_at_learners,
        step_guard=deployment.step_guard,
        step_limit=deployment.step_limit,
        keep_models=deployment.keep_models,
        linger=deployment.linger,
        notify=make_notify_settings(config),
        evaluation_wait=deployment.evaluation_wait,
        evaluation_sites=deployment.evaluation_sites,
        target_share=deployment.target_share,
    )


def make_notify_settings(config: ExperimentConfig) -> NotifySettings:
    """The table [deployment.notify]; without it nobody is notified."""
    notify = config.deployment.notify
    if notify is None:
        return NotifySettings()
    return NotifySettings(tuple(notify.command), notify.webhook, tuple(notify.events), notify.away_after)


def make_plan(
    config: ExperimentConfig,
    initial_model: Model,
    metric: str,
    higher_is_better: bool,
    metrics: Iterable[str] = (),
    begun: Mapping[str, Any] | None = None,
    validated: bool = False,  # the controller has validation examples
    frozen: str = "",  # digest of what neither is trained nor travels
    public_key: bytes | None = None,  # for homomorphic encryption
) -> FederationPlan:
    """Everything that the controller needs to run; `config` has one policy, `begun` is the file as it was at first."""
    (chosen,) = config.policy
    policy, terms, evaluation = build_policy(chosen), make_settings(config), config.evaluation
    target = None if evaluation.target is None else Target(metric, evaluation.target, higher_is_better)

    def stop_rule(stop: StopConfig) -> StopRule:
        aim, patience = target if stop.at_target else None, None
        if stop.patience is not None:
            patience = Patience(VALIDATION + metric if validated else metric, stop.patience, higher_is_better)
        return StopRule(stop.rounds, stop.seconds, stop.update_requests, aim, stop.steps, patience)

    rule = stop_rule(config.stop)
    began_with = rule if begun is None else stop_rule(StopConfig.model_validate(_renamed(begun.get("stop", {}))))
    if rule == StopRule():
        raise ConfigError("a federation needs an end: give [stop] rounds, seconds, update_requests, steps or at_target")
    members = {name: build_power(group) for group in config.learners for name in group.learner_names}
    facts = {
        "dataset": config.data.dataset if config.site is None else config.site.title,
        "network": config.network.name if config.site is None else config.site.title,
        "learners are": "real sites; time is the wall clock's",
        **chosen.training.model_dump(exclude_none=True),
        "versions": versions(),  # the controller's
    }
    if config.training.initial_model is not None:
        facts |= initial_fact(Path(config.training.initial_model).name, initial_model)
    setting = Setting.of(
        policy,
        initial_model,
        [LearnerInfo(name, 0, 0, math.nan, power) for name, power in members.items()],
        seed=config.seed,
        metric=metric,
        higher_is_better=higher_is_better,
        target=target,
        real_time=True,
        facts=facts,
    )
    mixed, encrypted = policy, None
    if policy.ckks is not None:
        assert public_key is not None, "the controller has looked for it"
        mixed, encrypted = encrypted_policy(policy, public_key), EncryptedUpdates(public_key, initial_model.layout)
    make = make_core(mixed, began_with, terms, config.run.refusals_allowed, setting.exchange_bytes)
    settings = json.dumps(settings_document(config) | ({"frozen": frozen} if frozen else {}))
    reported = tuple(sorted({"loss", metric, *metrics}))
    caps = {name: group.max_examples for group in config.learners for name in group.learner_names}
    limits = {name: cap for name, cap in caps.items() if cap is not None}
    return FederationPlan(
        make, initial_model, settings, setting, members, terms, policy.wire, reported, limits,
        began_with=began_with, stop=rule, secure_sum=policy.secure_sum, encrypted=encrypted,
        settings_of_added=None
        if config.site is None
        else lambda name: json.dumps(_settings_of_added(config, name, frozen)),
    )  # fmt: skip
