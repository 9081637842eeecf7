"""`site-policy.toml`: what the operator of a site allows; read here only, again before each task, and never sent."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, time as Time
from pathlib import Path
from typing import Any, NamedTuple

from metis.core.mixing.secure import fewest_members
from metis.deployment.wire import wire_pb2 as pb
from metis.errors import ConfigError
from metis.registry import did_you_mean
from metis.system import unix_time
from metis.text import plural, size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

POLICY = "site-policy.toml"
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")

EXAMPLE = """\
# What this site allows. Only this site reads it, again before each task; it is never sent. Remove a '#' to set a rule.

# The controller that may be dialled, and the federation: the fingerprint of its CA, or the name of one run.
# controller = "federation.example.org"
# federation = "1f0c:93aa:5e27:70b1:c6f4:0d6e:8a11:92d3"

# When this site trains, in local time; a window may go over midnight. Outside it leaves, and it comes back by itself.
# hours = ["19:00-07:00", "12:00-13:00"]

# A task beyond these is refused.
# max_task_seconds = 3600
# max_task_steps = 100000
# max_download_bytes = 500_000_000

# With fewer members it does not take part. How many there are is what the controller claims.
# min_members = 3

# Metrics of models on this site's evaluation data, and the loss of training: whether they are reported, with how many
# decimals (the counts and sums behind them then stay here), and on how many examples at least.
# report_metrics = false
# metric_decimals = 2
# min_metric_examples = 50

# Records are protected by noise (DP-SGD), whatever the federation says; where it says more, that counts. The budget is
# epsilon, over all runs with the data set of this name; the ledger of what is spent lies beside this file.
# privacy = { noise = 1.1, clip = 1.0, budget = 8.0, delta = 1e-5, data = "cohort-2024" }

# Masked sums: the learners that this site takes part with, itself included, by the names in their certificates, and how
# many of them may work together with the controller without learning this site's model. Without peers it takes part in
# no masked round; with them it takes part in no other, and in none with fewer members than min_masked_members.
# peers = ["hospital-a", "hospital-b", "hospital-c", "hospital-d", "hospital-e"]
# colluders = 1
# min_masked_members = 5

# Asynchronous policies sum what members have trained from different community models. This site takes part in such
# windows only if it says so: a controller that lies can keep the others of a window from moving.
# masked_windows = true
"""


class Refusal(NamedTuple):
    """The rule that something breaks, and the sentence for this site's operator."""

    rule: pb.Cause.Rule
    text: str


class Window(NamedTuple):
    """From one time of day to another, perhaps over midnight; the end does not belong to it."""

    start: Time
    end: Time

    def __contains__(self, now: object) -> bool:
        assert isinstance(now, Time)
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"


@dataclass(frozen=True)
class SitePolicy:
    """The rules of one site; without a rule everything is allowed."""

    controller: str | None = None
    federation: str | None = None
    hours: tuple[Window, ...] = ()
    max_task_seconds: float | None = None
    max_task_steps: int | None = None
    max_download_bytes: int | None = None
    min_members: int | None = None
    report_metrics: bool = True
    metric_decimals: int | None = None
    min_metric_examples: int | None = None
    privacy: Mapping[str, Any] | None = None  # the settings of `Privacy`, and data, ledger, witness
    peers: tuple[str, ...] = ()
    colluders: int = 0
    min_masked_members: int | None = None
    masked_windows: bool = False

    # --- what is refused ------------------------------------------------------------------------

    def refuses_hour(self, now: Time) -> Refusal | None:
        if not self.hours or any(now in window for window in self.hours):
            return None
        text = f"it is {now:%H:%M}, and this site trains {' and '.join(map(str, self.hours))} only (hours)"
        return Refusal(pb.Cause.HOURS, text)

    def refuses_controller(self, target: str) -> Refusal | None:
        """`target` is HOST:PORT; the rule may name the host alone."""
        host = target.rpartition(":")[0].strip("[]")
        if self.controller is None or self.controller in (target, host):
            return None
        return Refusal(pb.Cause.CONTROLLER, f"{target} is not the controller that this site allows, {self.controller}")

    def refuses_federation(self, run: str, fingerprint: str | None, members: int) -> Refusal | None:
        """`fingerprint` is that of the CA in this site's own kit."""
        if self.federation is not None and self.federation not in (run, fingerprint):
            known = f"run {run}" + (f" of the CA {fingerprint}" if fingerprint else "")
            return Refusal(pb.Cause.FEDERATION, f"{known} is not the federation that this site allows")
        if self.min_members is not None and members < self.min_members:
            text = f"the federation has {members} members, by its controller's word; this site wants {self.min_members}"
            return Refusal(pb.Cause.MEMBERS, f"{text} or more (min_members)")
        return None

    def refuses_task(self, task: pb.Task) -> Refusal | None:
        """A task without an end in steps is judged while it runs, by `max_task_seconds`."""
        opening: Any = task.opening
        if task.window and not self.masked_windows:
            text = "its sums are of windows, whose members train from different models (masked_windows)"
            return Refusal(pb.Cause.MASKED_WINDOWS, text)
        if not (opening or task.window) and (self.peers or self.min_masked_members is not None):
            without = "its model would not be masked, and this site wants a sum with"
            if self.min_masked_members is None:
                return Refusal(pb.Cause.PEERS, f"{without} peers (peers)")
            return Refusal(pb.Cause.MASKS, f"{without} {self.min_masked_members} members (min_masked_members)")
        most = self.max_task_seconds
        if most is not None and task.HasField("seconds") and task.seconds > most:
            text = f"it may take {task.seconds:g} s, and this site allows {most:g} s (max_task_seconds)"
            return Refusal(pb.Cause.TASK_SECONDS, text)
        steps = task.steps if task.HasField("steps") else None
        if self.max_task_steps is not None and (steps is None or steps > self.max_task_steps):
            asked = "any number of steps" if steps is None else f"{steps} steps"
            text = f"it is for {asked}, and this site allows {self.max_task_steps} (max_task_steps)"
            return Refusal(pb.Cause.TASK_STEPS, text)
        return self.refuses_download(task.bytes)

    def refuses_download(self, length: int) -> Refusal | None:
        if self.max_download_bytes is None or length <= self.max_download_bytes:
            return None
        text = f"its model has {size(length)}, and this site allows {size(self.max_download_bytes)}"
        return Refusal(pb.Cause.DOWNLOAD, f"{text} (max_download_bytes)")

    # --- what is reported -----------------------------------------------------------------------

    def reports(self, examples: int) -> bool:
        """Whether a metric over this many examples may leave the site."""
        return self.report_metrics and examples >= (self.min_metric_examples or 0)

    def coarse(self, value: float) -> float:
        """A metric as it may leave the site."""
        return value if self.metric_decimals is None else round(value, self.metric_decimals)

    def rules(self) -> dict[str, Any]:
        """The rules that are set, by their keys."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in found.items() if value != getattr(SitePolicy, name)}
        return {name: list(map(str, value)) if name in ("hours", "peers") else value for name, value in given.items()}


class PolicyFile:
    """The file as it is now; a site without one allows everything."""

    def __init__(self, path: Path | None = None, *, required: bool = True) -> None:
        """One that is not required counts from the moment on that it exists."""
        self.path, self._required = path, required

    def read(self) -> SitePolicy:
        """The rules at this moment; raises ConfigError."""
        if self.path is None or not (self._required or self.path.exists()):
            return SitePolicy()
        self._required = True  # it must not vanish unnoticed
        return parsed(_content(self.path), self.path.name)

    def ask(self, *questions: Callable[[SitePolicy], Refusal | None]) -> tuple[SitePolicy, Refusal | None]:
        """The current rules and what they refuse first; while they cannot be read, everything is refused."""
        try:
            policy = self.read()
        except ConfigError as problem:
            return SitePolicy(), Refusal(pb.Cause.UNREADABLE, f"the site policy cannot be used: {problem}")
        return policy, next((refusal for question in questions if (refusal := question(policy))), None)


def at_this_hour(policy: SitePolicy) -> Refusal | None:
    """Whether the site trains now, by the clock on its wall."""
    return policy.refuses_hour(datetime.fromtimestamp(unix_time()).time())


def _content(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no site policy {path}") from None
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError as problem:  # not TOML, or not UTF-8
        raise ConfigError(f"{path.name}: {problem}") from None


def parsed(content: Mapping[str, Any], name: str) -> SitePolicy:
    """The rules in a file of this name; raises ConfigError at the first that is wrong."""
    given: dict[str, Any] = {}
    for key, value in content.items():
        if key not in _CHECKS:
            raise ConfigError(f"{name}: {key}: unknown key; {did_you_mean(key, list(_CHECKS))}")
        allowed, check = _CHECKS[key]
        if not check(value):
            raise ConfigError(f"{name}: {key} is {value!r}; it must be {allowed}")
        given[key] = tuple(map(_window, value)) if key == "hours" else tuple(value) if key == "peers" else value
    policy = SitePolicy(**given)
    peers, fewest = len(set(policy.peers)), fewest_members(policy.colluders)
    if policy.peers and peers < fewest:
        raise ConfigError(
            f"{name}: peers names {plural(peers, 'learner')}; with colluders = {policy.colluders} a masked sum needs "
            f"{fewest} or more, this site included"
        )
    if policy.peers and (policy.min_masked_members or 0) > peers:
        raise ConfigError(f"{name}: min_masked_members is {policy.min_masked_members}, and peers names only {peers}")
    return policy


def check_own_name(policy: SitePolicy, learner: str) -> None:
    """Without itself among its peers a site would refuse every sum."""
    if policy.peers and learner not in policy.peers:
        raise ConfigError(f"the site policy names peers ({', '.join(policy.peers)}) without this site, '{learner}'")


def _window(text: str) -> Window:
    numbers = _WINDOW.fullmatch(text)
    assert numbers is not None, "it was checked"
    first, second, third, fourth = map(int, numbers.groups())
    return Window(Time(first, second), Time(third, fourth))


def _is_window(value: object) -> bool:
    return isinstance(value, str) and _WINDOW.fullmatch(value) is not None and value[:5] != value[6:]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


_COUNT = ("a whole number of 1 or more", _is_count)
_PRIVACY: dict[str, Callable[[Any], bool]] = {
    "noise": _is_positive,
    "clip": _is_positive,
    "budget": _is_positive,
    "delta": lambda value: _is_positive(value) and value < 1,
    "larger_batches": lambda value: isinstance(value, bool),
    "data": _is_text,
    "ledger": _is_text,
    "witness": _is_text,
}
_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "controller": ("a host, or HOST:PORT", _is_text),
    "federation": ("the fingerprint of a CA, or the name of a run", _is_text),
    "hours": (
        'a list of windows such as "19:00-07:00"',
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_window, value)),
    ),
    "max_task_seconds": (
        "a number of seconds above 0",
        lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    ),
    "max_task_steps": _COUNT,
    "max_download_bytes": _COUNT,
    "min_members": _COUNT,
    "report_metrics": ("true or false", lambda value: isinstance(value, bool)),
    "metric_decimals": ("a whole number from 0 to 15", lambda value: type(value) is int and 0 <= value <= 15),
    "min_metric_examples": _COUNT,
    "privacy": (
        "a table with noise, and perhaps clip, budget, delta, larger_batches, data, ledger, witness",
        lambda value: isinstance(value, dict) and "noise" in value and all(
            key in _PRIVACY and _PRIVACY[key](given) for key, given in value.items()
        ),
    ),
    "peers": (
        "a list of learners' names",
        lambda value: isinstance(value, list) and bool(value) and all(map(_is_text, value)),
    ),
    "colluders": ("a whole number of 0 or more", lambda value: type(value) is int and value >= 0),
    "min_masked_members": _COUNT,
    "masked_windows": ("true or false", lambda value: isinstance(value, bool)),
}  # fmt: skip
