"""What a learner reports of its site, as its policy allows; `metis learner --dry-run` shows the same messages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from metis.deployment.learner.site_policy import SitePolicy
from metis.deployment.learner.work import Update
from metis.deployment.wire import wire_pb2 as pb
from metis.learning.sums import Sums, sums_problem


def ready(facts: Mapping[str, Any], policy: SitePolicy) -> pb.Ready:
    """From what the training process found when it prepared; without metrics to report there is nothing to evaluate."""
    private, measured = facts.get("private", False), facts["evaluation_examples"]
    return pb.Ready(
        examples=facts["examples"],
        batch_size=facts["batch_size"],
        evaluation_examples=measured if policy.reports(measured) and not private else 0,
        layout=facts["fingerprint"],
        steps_left=facts.get("steps_left"),
        larger_batches=facts.get("larger_batches", False),
    )


def loss(value: float | None, examples: int, policy: SitePolicy) -> float:
    """The training loss over this many examples as it travels; NaN if it does not, as of records that are protected."""
    return math.nan if value is None or not policy.reports(examples) else policy.coarse(value)


def evaluation(
    version: int, answer: Mapping[str, Any], known: Collection[str], policy: SitePolicy
) -> pb.Evaluation | None:
    """What the site measured, under names that the federation knows; None if nothing of it may be reported."""
    metrics = {name: policy.coarse(value) for name, value in answer["metrics"].items() if name in known}
    if not (metrics and policy.reports(answer["examples"])):
        return None
    sums = {}
    if policy.metric_decimals is None:  # sums are exact
        given = {name: Sums(*own) for name, own in answer.get("sums", {}).items() if name in metrics}
        fitting = {name: own for name, own in given.items() if not sums_problem(own, metrics[name], answer["examples"])}
        sums = {name: pb.Sums(kind=own.kind, values=own.values) for name, own in fitting.items()}
    return pb.Evaluation(version=version, examples=answer["examples"], metrics=metrics, sums=sums)


def header(update: Update, content: bytes = b"") -> pb.UploadHeader:
    """What accompanies a trained update; its loss was made coarse, or left out, when it was trained.

    Of a small one it has the content too.
    """
    return pb.UploadHeader(
        run=update.run,
        task=update.task,
        steps=update.steps,
        seconds=update.seconds,
        time_per_batch=update.time_per_batch,
        loss=update.loss,
        bytes=update.bytes,
        compression_error=update.compression_error,
        sha256=update.sha256,
        seal=bytes.fromhex(update.seal),
        content=content,
    )


# Every field that a learner sends, as the dry run and docs/secure.md show it.
FIELDS = {
    "Hello.protocol": "version of the protocol",
    "Hello.software": "version of Metis",
    "Hello.instance": "random, to recognize this process again",
    "Hello.run": "run that it took part in before",
    "Hello.task": "task that it works on",
    "Hello.unix_time": "clock of this machine",
    "Ready.examples": "number of training examples",
    "Ready.batch_size": "examples in a batch",
    "Ready.evaluation_examples": "number of evaluation examples; 0 if no metric is reported",
    "Ready.layout": "SHA-256 of the names and shapes of the network's tensors",
    "Ready.steps_left": "steps that its privacy budget allows, to two digits",
    "Ready.larger_batches": "whether it fills with larger batches what that leaves of a period",
    "Heartbeat.task": "task that it works on",
    "Heartbeat.steps": "batches done in it",
    "Evaluation.version": "community model that was measured",
    "Evaluation.examples": "number of evaluation examples",
    "Evaluation.metrics": "metrics under names that the federation announced, rounded as the policy says",
    "Evaluation.sums": "sums and counts per class behind those metrics, to pool them; none where the policy rounds",
    "Failed.task": "task without a result",
    "Failed.steps": "batches done in it",
    "Failed.seconds": "time that it took",
    "SecureSum.kind": "what it answers in a masked round",
    "SecureSum.version": "community model of that round",
    "SecureSum.content": "signed key of the round, vote for its sum, or shares of masks",
    "SecureSum.task": "task that is trained and waits for a window",
    "Cause.kind": "why a task failed or the learner leaves: one of a fixed list, no text",
    "Cause.rule": "rule of the site policy that was broken",
    "Cause.reference": "random number under which failures.log has the text",
    "UploadHeader.run": "run of the update",
    "UploadHeader.task": "task of the update",
    "UploadHeader.steps": "batches that were trained",
    "UploadHeader.seconds": "time that training took",
    "UploadHeader.time_per_batch": "time of a batch",
    "UploadHeader.loss": "mean training loss, rounded as the policy says; NaN if it is not reported",
    "UploadHeader.bytes": "size of the update",
    "UploadHeader.compression_error": "share of the update that compression left out for now",
    "UploadHeader.sha256": "checksum of the update",
    "UploadHeader.content": "the whole update, if it is small, as Chunk.data has it otherwise",
    "UploadHeader.seal": "checksum of the update under a random key, instead of the other one",
    "Chunk.offset": "position in the update",
    "Chunk.data": "the update: the trained weights, or what compression leaves of their change",
    "UploadEnd.bytes": "size of the update",
    "UploadEnd.sha256": "checksum of the update",
    "UploadPart.acknowledge": "asks how much has arrived",
    "ModelRequest.run": "run of a community model",
    "ModelRequest.sha256": "community model to fetch",
    "ModelRequest.offset": "where to go on",
    "ModelRequest.length": "how much of it",
}
