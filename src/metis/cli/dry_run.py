"""`metis learner --dry-run`: what would leave this site, from its own network and data, without a connection."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from metis import __version__
from metis.cli.output import print_json, say, stdout
from metis.deployment.learner import outgoing
from metis.deployment.learner.site_policy import PolicyFile, SitePolicy, check_own_name
from metis.deployment.learner.work import update_of
from metis.deployment.trainer.child import Child
from metis.deployment.wire import wire_pb2 as pb
from metis.deployment.wire.causes import cause, reference
from metis.deployment.wire.protocol import PROTOCOL
from metis.errors import ConfigError, LearnerError
from metis.experiments.bridges import site_table
from metis.experiments.compose import build_policy
from metis.experiments.config.load import load_config, resolve_config
from metis.experiments.deploy import settings_document
from metis.text import plural, printable, size

if TYPE_CHECKING:
    from metis.experiments.config.load import ExperimentConfig

_BATCH = 16  # where no federation's file says how many examples a batch has
_RUN = "RUN"  # only the controller knows it


def federation_of(file: Path | None, site: Path | None, name: str) -> ExperimentConfig:
    """The settings that the controller would send: those of its file, or the simplest ones for this site file."""
    if file is not None:
        return load_config(file, [])
    if site is None:
        raise ConfigError("a dry run needs this site's network and data: give --site FILE, --federation FILE, or both")
    assumed = {
        "site": site_table(site),
        "learners": [{"name": "site", "names": [name], "batch_size": _BATCH, "time_per_batch": 1.0}],
        "policy": {"name": "sync_fedavg", "local_epochs": 1},
        "stop": {"rounds": 1},
    }
    return resolve_config(assumed, "the dry run")


async def show(
    config: ExperimentConfig,
    policy: PolicyFile,
    *,
    assumed: bool,
    site: Path | None,
    name: str,
    device: str | None,
    trainer: Sequence[str],
    as_json: bool,
    ckks_key: Path | None = None,
) -> None:
    """Prepare, train one batch, evaluate, and print every field that a learner would send, with its value."""
    rules = policy.read()
    check_own_name(rules, name)
    try:
        facts, trained, measured = await _rehearse(config, site, name, device, trainer, rules, ckks_key)
    except LearnerError as problem:
        raise ConfigError(f"this site could not take part: {problem}") from problem
    masked = build_policy(config.policy[0]).secure_sum is not None
    if masked:
        trained["loss"] = None  # it is a part of the sum
    fields = _fields(_messages(facts, trained, measured, rules), masked)
    refused = [] if assumed else refusals(config, rules)
    if as_json:
        print_json(
            {
                "sent": False,
                "learner": name,
                "settings": "assumed" if assumed else "of the federation's file",
                "policy": {"file": None if policy.path is None else str(policy.path), "rules": rules.rules()},
                "masked": masked,
                "refused": refused,
                "fields": [dict(zip(("field", "value", "meaning"), row, strict=True)) for row in fields],
            }
        )
        return
    table = Table("field", "value", "what it is", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for field, value, meaning in fields:
        table.add_row(field, "[dim]–[/]" if value is None else escape(_shown(value)), f"[dim]{escape(meaning)}[/]")
    stdout().print(table)
    say("")
    say(f"Besides, the controller sees the address of this machine and its name, '{name}'. Nothing else leaves it.")
    if assumed:
        say(f"Batches of {_BATCH} and a plain policy were assumed: give --federation FILE for the federation's own.")
    for reason in refused:
        say(f"This site would refuse the federation's tasks: {reason}.")
    say(_limits(policy, rules))
    say("This was a dry run: one batch was trained, nothing was sent, and nothing is kept.")


async def _rehearse(
    config: ExperimentConfig,
    site: Path | None,
    name: str,
    device: str | None,
    trainer: Sequence[str],
    rules: SitePolicy,
    ckks_key: Path | None,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
    """What the training process answers when it prepares, trains a batch and evaluates."""
    child = Child(trainer)
    try:
        with tempfile.TemporaryDirectory(prefix="metis-dry-run-") as folder:
            model, update = Path(folder) / "initial.model", Path(folder) / "update.model"
            places = {"ledger": f"{folder}/ledger", "witness": f"{folder}/witness"}  # nothing is really spent
            own = {key: value for key, value in (rules.privacy or {}).items() if key not in (*places, "data")}
            facts = await child.call(
                "prepare", settings=settings_document(config), site=None if site is None else str(site), name=name,
                index=0, layout=None, memory=None, device=device, pace=None,
                privacy={"settings": own or None, **places}, ckks_key=None if ckks_key is None else str(ckks_key),
            )  # fmt: skip
            await child.call("initial", seed=None, out=str(model))
            trained = await child.call(
                "train", task=1, model=str(model), steps=1, seconds=None, rate=1.0, out=str(update)
            )  # fmt: skip
            measured = await child.call("evaluate", model=str(model)) if facts["evaluation_examples"] else None
            return facts, trained, measured
    finally:
        await child.close()


def _messages(
    facts: dict[str, Any], trained: dict[str, Any], measured: dict[str, Any] | None, rules: SitePolicy
) -> list[Any]:
    """One of each message, as the learner makes them; what only a failure has stays empty."""
    loss = outgoing.loss(trained["loss"], facts["examples"], rules)
    update = update_of(_RUN, {**trained, "loss": loss})
    evaluation = None
    if measured is not None and not facts.get("private", False):
        evaluation = outgoing.evaluation(0, measured, facts["metrics"], rules)
    instance = secrets.token_hex(16)
    return [
        pb.Hello(protocol=PROTOCOL, software=f"metis {__version__}", instance=instance, unix_time=time.time()),
        outgoing.ready(facts, rules),
        pb.Heartbeat(task=1, steps=1),
        outgoing.header(update),
        pb.UploadEnd(bytes=update.bytes, sha256=update.sha256),
        evaluation or pb.Evaluation(),
        cause(pb.Cause.SITE_CODE),
    ]


def refusals(config: ExperimentConfig, rules: SitePolicy) -> list[str]:
    """Why this site's policy would not let it train in the federation of this file."""
    policy = build_policy(config.policy[0])
    masked, rounds = policy.secure_sum is not None, policy.protocol.has_rounds
    task = pb.Task(number=1, opening=b"an opening" if masked and rounds else b"", window=masked and not rounds)
    found = [] if (refusal := rules.refuses_task(task)) is None else [refusal.text]
    if masked:
        names = [name for group in config.learners for name in group.learner_names]
        if not rules.peers:
            found.append("its sums are masked, and this policy does not name the learners to take part with (peers)")
        elif strangers := sorted(set(names) - set(rules.peers)):
            found.append(f"{strangers[0]} is not among the peers of this policy")
        if (fewest := rules.min_masked_members) is not None and len(names) < fewest:
            found.append(f"its rounds have {len(names)} members, and this site wants {fewest} (min_masked_members)")
    return found


def _fields(messages: Sequence[Any], masked: bool = False) -> list[tuple[str, Any, str]]:
    """Every field that a learner may send, its value here (None if it has none), and what it is."""
    known = {
        f"{message.DESCRIPTOR.name}.{field.name}": value
        for message in messages
        for field, value in message.ListFields()
    }
    known["Chunk.data"] = known["UploadHeader.bytes"]
    rows = [(name, _plain(name, known.get(name)), meaning) for name, meaning in outgoing.FIELDS.items()]
    if not masked:
        return rows
    data = "the update, masked: the controller learns only the sum of a round's"
    return [(name, value, data if name == "Chunk.data" else meaning) for name, value, meaning in rows]


def _plain(name: str, value: Any) -> Any:
    """A value as JSON has it."""
    match name:
        case "Evaluation.metrics":
            return None if value is None else dict(value)
        case "Evaluation.sums":
            return None if value is None else {metric: list(sums.values) for metric, sums in value.items()}
        case "Cause.kind":
            return f"such as {pb.Cause.Kind.Name(value).lower()}"
        case "Cause.reference":
            return f"such as {reference(pb.Cause(reference=value))}"
        case "Chunk.data":
            return f"{value} bytes"
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_numbers(found)}" for name, found in value.items())
    text = f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e9 else printable(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _numbers(found: float | list[float]) -> str:
    return " ".join(f"{number:.6g}" for number in (found if isinstance(found, list) else [found]))


def _limits(policy: PolicyFile, rules: SitePolicy) -> str:
    given = rules.rules()
    if not given:
        return "This site has no policy, or an empty one: write one with metis init site-policy.toml --site-policy."
    listed = "; ".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    downloads = f", downloads up to {size(rules.max_download_bytes)}" if rules.max_download_bytes else ""
    return f"The policy in {policy.path} has {plural(len(given), 'rule')}{downloads}: {listed}."
