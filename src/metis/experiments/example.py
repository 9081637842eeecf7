"""A first experiment to start from: the example of the package, with the policy and the solver that a user chose."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import tomlkit

from metis.core.layers import LAYERS
from metis.core.policies import POLICIES
from metis.errors import ConfigError
from metis.learning.engine import SOLVERS
from metis.registry import Parameter, parameters_of

_EXAMPLE = Path(__file__).with_name("example.toml")
_LEARNING_RATE = 0.02  # suits the example's network and data
_COMMENTS_AT, _WIDTH = 32, 120
# Solvers that the example's network cannot be trained with, and what they are for.
_UNSUITABLE = {
    "own": "is for sites that train by a rule of their own, as those with engine = 'sklearn'",
    "optax": "needs engine = 'jax'",
    "LBFGS": "measures the loss several times in a step, which a solver cannot",
    "Muon": "is for networks whose parameters are all matrices, and this one has biases",
    "SparseAdam": "is for sparse gradients, and those of this network are dense",
}


def example(file_name: str, policy: str | None = None, solver: str | None = None) -> str:
    """A commented file that runs as it is; a policy or a solver by name comes with all its settings."""
    if solver in _UNSUITABLE and solver in SOLVERS:
        raise ConfigError(f"the example cannot be trained with the solver '{solver}': it {_UNSUITABLE[solver]}")
    text = _EXAMPLE.read_text("utf-8").replace("THIS_FILE", file_name)
    if policy is None and solver is None:
        return text
    before, training, rest = text.partition("[training]\n")
    _, stop, after = rest.partition("[stop]")
    chosen = [*_training(solver or "vanilla"), "", *_policy(policy or "semisync"), ""]
    return before + training + "\n".join(chosen) + "\n" + stop + after


def _training(name: str) -> Iterator[str]:
    solver = SOLVERS.named(name)
    yield from _line(f'solver = "{name}"', summary(solver))
    for parameter in _in_files(solver):
        given = _LEARNING_RATE if parameter.name == "learning_rate" else None
        yield from _setting(parameter, given)


def _policy(name: str) -> Iterator[str]:
    policy = POLICIES.named(name)
    yield from _line("[policy]", "to compare several, write [[policy]] here and repeat it")
    yield from _line(f'name = "{name}"', summary(policy))
    for parameter in _in_files(policy):
        yield from _setting(parameter)
    layers = [f"[policy.{key}]" for key, kind in LAYERS.items() if kind.in_files]
    more = f"Layers on top of it, each in its own table: {', '.join(layers)}; metis init --list describes them"
    yield from textwrap.wrap(more, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _in_files(definition: Callable[..., Any]) -> Iterable[Parameter]:
    return [parameter for parameter in parameters_of(definition).values() if parameter.setting.in_files]


def _setting(parameter: Parameter, given: float | None = None) -> Iterator[str]:
    """The key with a value, commented out unless it is given; what has no default shows a value that is allowed."""
    setting, default = parameter.setting, parameter.default
    value = given if given is not None else default
    if isinstance(value, (list, tuple)) and None in value:
        return  # TOML cannot write such a default
    note = ""
    if value is None or value is MISSING:
        value = parameter.choices[0] if parameter.choices else 1 if setting.permits(1) else 0.5
        note = "required" if default is MISSING else "not set by default"
    allowed = f"one of {', '.join(parameter.choices)}" if len(parameter.choices) > 1 else ""
    allowed = allowed or (setting.allowed if setting.limits else "")
    key = f"{parameter.name} = {tomlkit.item(value).as_string()}"
    comment = "; ".join(part for part in (setting.doc, allowed, note) if part)
    yield from _line(key if given is not None or default is MISSING else f"# {key}", comment)


def _line(code: str, comment: str) -> Iterator[str]:
    """A line with its comment next to it; a long comment goes on in the lines below."""
    lines = textwrap.wrap(comment, _WIDTH - _COMMENTS_AT - 2, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines):
        yield f"{code if number == 0 else '':<{_COMMENTS_AT - 1}} # {line}".rstrip("# ")


def summary(definition: Any) -> str:
    """The first paragraph of a definition's documentation on one line, after its title if it has one."""
    words = " ".join((inspect.getdoc(definition) or "").split("\n\n")[0].split())
    title = getattr(definition, "title", "")
    return f"{title}: {words}" if isinstance(title, str) and title else words


def definitions() -> dict[str, dict[str, str]]:
    """Everything that a file can name, by kind: names with a line each."""
    from metis.data.datasets import DATASETS
    from metis.learning.engine import ENGINES, networks_of

    # Those of engines that an extra installs have the same names, and their libraries take seconds to import.
    engines = [engine for engine in ENGINES.values() if not getattr(engine, "extra", "")]
    networks = [item for engine in engines for item in (networks_of(engine) or {}).items()]
    return {
        "policies": {name: summary(policy) for name, policy in POLICIES.items()},
        "layers": {
            f"{key}, {kind.selector} = '{choice}'" if choice else key: summary(layer)
            for key, kind in LAYERS.items()
            if kind.in_files
            for choice, layer in kind.classes.items()
        },
        "solvers": {name: summary(solver) for name, solver in SOLVERS.items()},
        "networks": {name: summary(network) for name, network in networks},
        "data sets": {name: source.title for name, source in DATASETS.items()},
        "engines": {name: summary(engine) for name, engine in ENGINES.items()},
    }
