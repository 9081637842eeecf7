"""Why a task failed or a learner left, as it travels: a kind of a closed set and a reference, no words."""

from __future__ import annotations

from metis.deployment.wire import wire_pb2 as pb
from metis.system import random_bytes

_REFERENCES = 1 << 24

_SENTENCES = {
    pb.Cause.UNKNOWN: "it does not say why",
    pb.Cause.SITE_CODE: "its code raised an exception",
    pb.Cause.SETUP: "its network, data or settings cannot be used",
    pb.Cause.NETWORK_DIFFERS: "its network is not the federation's",
    pb.Cause.DATA_NOT_FINITE: "its data contain numbers that are not finite",
    pb.Cause.DIVERGED: "its training left the finite numbers",
    pb.Cause.OUT_OF_MEMORY: "it ran out of memory",
    pb.Cause.DISK: "it could not write to its disk",
    pb.Cause.PROCESS_DIED: "its training process ended",
    pb.Cause.ABANDONED: "the training was abandoned",
    pb.Cause.MODEL_NOT_FETCHED: "it could not fetch the community model",
    pb.Cause.UPDATE_LOST: "its update was lost before it was handed in",
    pb.Cause.SITE_POLICY: "its site policy does not allow it",
    pb.Cause.STOPPED: "it was stopped by its operator",
    pb.Cause.PRIVACY_BUDGET: "its privacy budget does not allow it",
}
# Each rule by its key in `site-policy.toml`.
RULES = {
    pb.Cause.FEDERATION: "federation",
    pb.Cause.CONTROLLER: "controller",
    pb.Cause.HOURS: "hours",
    pb.Cause.TASK_SECONDS: "max_task_seconds",
    pb.Cause.TASK_STEPS: "max_task_steps",
    pb.Cause.DOWNLOAD: "max_download_bytes",
    pb.Cause.MEMBERS: "min_members",
    pb.Cause.UNREADABLE: "unreadable",
    pb.Cause.MASKS: "min_masked_members",
    pb.Cause.PEERS: "peers",
    pb.Cause.COLLUDERS: "colluders",
    pb.Cause.MASKED_WINDOWS: "masked_windows",
}


def rule_named(key: str) -> pb.Cause.Rule:
    """The rule with this key in `site-policy.toml`; `NO_RULE` if there is none."""
    return next((rule for rule, name in RULES.items() if name == key), pb.Cause.NO_RULE)


def cause(kind: pb.Cause.Kind, rule: pb.Cause.Rule = pb.Cause.NO_RULE) -> pb.Cause:
    """A cause with a new reference."""
    return pb.Cause(kind=kind, rule=rule, reference=int.from_bytes(random_bytes(8), "big") % (_REFERENCES - 1) + 1)


def reference(cause: pb.Cause) -> str:
    """The reference as people write it, such as 7F3A-19."""
    number = cause.reference % _REFERENCES
    return f"{number >> 8:04X}-{number & 0xFF:02X}"


def sentence(cause: pb.Cause) -> str:
    """What the controller writes and journals, in its own words."""
    text = _SENTENCES.get(cause.kind, _SENTENCES[pb.Cause.UNKNOWN])
    if cause.kind == pb.Cause.SITE_POLICY and cause.rule in RULES:
        text += f" (rule {RULES[cause.rule]})"
    return f"{text}; reference {reference(cause)} in the log of the site" if cause.reference else text
