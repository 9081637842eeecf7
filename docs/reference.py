"""The pages of the reference, generated from docstrings, the configuration's schema and the commands."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import typer

import metis
from metis import errors
from metis.cli import app as cli
from metis.core import contribution, mixing, protocols
from metis.core.events import Budget, CommunityStamp, UpdateRequest
from metis.core.layers import LAYERS, Layer, Outgoing, Work
from metis.core.policies import POLICIES
from metis.core.roster import LearnerRecord, Roster
from metis.core.schedules import Moment
from metis.core.solvers import SOLVERS, Solver
from metis.data import datasets, partition
from metis.experiments.config.load import config_schema
from metis.experiments.config.tables import table_model
from metis.learning import NETWORKS
from metis.learning.engine import Engine
from metis.registry import Parameter, parameters_of
from metis.reporting.trackers.tracker import Tracker


def pages() -> dict[str, str]:
    """Every page of the reference by its path in the site."""
    return {
        "reference/configuration.md": configuration(),
        "reference/commands.md": commands(),
        "reference/python.md": python(),
        "reference/data.md": data(),
    }


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar would end a cell, unless it is in code."""

    def safe(cell: str) -> str:
        return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in re.split("(`.*?`)", cell))

    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(safe, line)) + " |" for line in lines) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# --- configuration ----------------------------------------------------------------------------

_WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": ""}


def configuration() -> str:
    """All tables and keys of an experiment file."""
    schema = config_schema()
    parts = [
        "# Configuration",
        "Every table and key of an experiment file, generated from the schema that checks it. `metis init FILE` writes "
        "a commented example. An unknown key is refused, with the closest valid one; `--set KEY=VALUE` changes a key "
        "for a single run, as in `--set learners.0.count=3`. Keys that are neither required nor have a default may be "
        "omitted.",
        _keys({"properties": {"seed": schema["properties"]["seed"]}}),
    ]
    for name, rule in schema["properties"].items():
        reference = _reference(rule)
        if reference is None:
            continue
        listed = rule.get("type") == "array"
        parts += _section(schema, rule, f"[[{name}]]" if listed else f"[{name}]", name, 2)
        if name == "policy":
            parts.append("A `[[policy]]` table also takes the parameters of the policy that it names:")
            for policy, parameters in schema["policies"].items():
                parts += [f"### {policy}", _first_paragraph(POLICIES[policy]), _keys(parameters)]
            parts += ["## Layers", "A `[[policy]]` table may contain a table for each [layer](../beyond.md):"]
            for key, choices in schema["layers"].items():
                parts += _layer(key, choices)
        if name == "training":
            for solver, settings in schema["solvers"].items():
                parts += [f"### {solver}", _first_paragraph(SOLVERS[solver]), _keys(settings)]
    return "\n\n".join(parts) + "\n"


def _layer(key: str, choices: Mapping[str, Any]) -> list[str]:
    """The table of a layer; one table for each choice where several layers share a key."""
    kind = LAYERS[key]
    parts = [f"### policy.{key}"]
    if kind.selector:
        parts.append(f"`{kind.selector}` is one of {', '.join(code(choice) for choice in choices)}.")
    for choice, settings in choices.items():
        words = _first_paragraph(kind.classes[choice])
        parts += [f"`{choice}`: {words}" if choice else words, _keys(settings)]
    return parts


def _first_paragraph(thing: Any) -> str:
    return _sentence((inspect.getdoc(thing) or "").split("\n\n")[0])


def _section(schema: Mapping[str, Any], table_rule: Mapping[str, Any], title: str, path: str, depth: int) -> list[str]:
    """One table of the file, with the tables inside it."""
    reference = _reference(table_rule)
    rules = schema["$defs"][reference]
    words = _sentence(rules["description"])
    more = table_rule.get("description", "")
    if more not in words:
        words = f"{words.rstrip('.')}: {more}."
    parts = [f"{'#' * depth} {title}", words]
    plain = {key: rule for key, rule in rules["properties"].items() if _reference(rule) is None}
    if plain:
        parts.append(_keys({**rules, "properties": plain}))
    for key, rule in rules["properties"].items():
        if key not in plain:
            parts += _section(schema, rule, f"{path}.{key}", f"{path}.{key}", depth + 1)
    if reference == "Operation":
        for operation, options in schema["operations"].items():
            if options["properties"]:
                parts += [f"Options of `{operation}`:", _keys(options)]
    return parts


def _reference(rule: Mapping[str, Any]) -> str | None:
    """The table to which a key refers, as a table, a list of tables or one of several types."""
    options = [rule, rule.get("items", {}), *rule.get("anyOf", [])]
    return next((option["$ref"].rpartition("/")[2] for option in options if "$ref" in option), None)


def _keys(rules: Mapping[str, Any]) -> str:
    rows = []
    for key, rule in rules["properties"].items():
        kind, allowed = _type(rule)
        required = key in rules.get("required", ())
        default = "**required**" if required else _toml(rule.get("default"))
        rows.append([code(key), kind, default, allowed, rule.get("description", "")])
    return table(["key", "type", "default", "allowed", "what it means"], rows)


def _type(rule: Mapping[str, Any]) -> tuple[str, str]:
    """The type of a value and the allowed values, in words."""
    if "$ref" in rule:
        return f"table ({_reference(rule).lower()})", ""
    if "anyOf" in rule:
        options = [_type(option) for option in rule["anyOf"] if option.get("type") != "null"]
        limits = dict.fromkeys(allowed for _, allowed in options if allowed)
        return " or ".join(kind for kind, _ in options), ", ".join(limits)
    if "const" in rule:
        return "text", code(rule["const"])
    if "enum" in rule:
        return "text", ", ".join(code(value) for value in rule["enum"])
    if rule.get("type") == "array":
        kind, allowed = _type(rule.get("items", {}))
        if "maxItems" in rule and rule.get("minItems") == rule["maxItems"]:
            return f"list of {rule['maxItems']} {kind}s", allowed
        return f"list of {kind}" if kind.startswith("list") else f"list of {kind}s", allowed
    limits = []
    for word, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if word in rule:
            limits.append(f"{sign} {'2^63 - 1' if rule[word] == 2**63 - 1 else format(rule[word], 'g')}")
    if rule.get("minLength") or rule.get("minItems"):
        limits.append("not empty")
    return _WORDS.get(rule.get("type", ""), "any"), ", ".join(limits)


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, float):
        return code("inf" if value == math.inf else f"{value:g}")
    return code(f'"{value}"' if isinstance(value, str) else str(value))


def _sentence(text: str) -> str:
    return " ".join(text.split())


# --- commands ---------------------------------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options, as `--help` shows them."""
    root = typer.main.get_command(cli.app)
    parts = [
        "# Command line",
        "What `metis --help` and `metis COMMAND --help` print. Results go to stdout, everything else to stderr. Exit "
        "codes: 0 success, 2 an error in a file or an argument, 130 interrupted, 1 a bug in Metis.",
        "Before the command, `--debug` shows the full traceback of an error; `metis --version` prints the version.",
    ]
    return "\n\n".join(parts + _group(root, ("metis",))) + "\n"


def _group(group: Any, path: tuple[str, ...]) -> list[str]:
    parts = []
    for name, command in group.commands.items():
        if command.hidden:
            continue
        whole = (*path, name)
        parts.append(f"{'#' * len(whole)} {' '.join(whole)}")
        if hasattr(command, "commands"):
            parts += [_unmarked(command.help or ""), *_group(command, whole)]
            continue
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        usage = " ".join([*whole, *(_shown(argument) for argument in arguments), "[OPTIONS]"])
        parts += [_unmarked(command.help or ""), f"```text\n{usage}\n```"]
        rows = [[code(_shown(argument)), _help(argument)] for argument in arguments]
        rows += [[_spelled(option), _help(option)] for option in options if "--help" not in option.opts]
        if rows:
            parts.append(table(["", "what it means"], rows))
        examples = [line for line in _unmarked(command.epilog or "").splitlines() if line]
        if examples:
            parts.append("```sh\n" + "\n".join(examples) + "\n```")
    return parts


def _shown(argument: Any) -> str:
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _spelled(option: Any) -> str:
    """`--set KEY=VALUE`, as a user types it."""
    spelled = ", ".join(f"`{name}`" for name in option.opts)
    if option.is_flag:
        return spelled
    return f"{spelled} {code(option.metavar or option.opts[0].strip('-').upper())}"


def _help(parameter: Any) -> str:
    words = _unmarked(getattr(parameter, "help", None) or "")
    default = parameter.default
    if parameter.required and parameter.param_type_name == "option":
        words = f"{words} **Required.**"
    elif default not in (None, False, (), []) and not callable(default) and str(default) not in words:
        shown = ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
        words = f"{words} By default `{shown}`."
    return words.strip()


def _unmarked(text: str) -> str:
    """The text without terminal markup; what a terminal prints in bold is code here, except in the examples."""
    if text.lstrip().startswith("[bold]metis"):
        return re.sub(r"\[/?(?:bold)?\]", "", text)
    return re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", text)


# --- Python -----------------------------------------------------------------------------------

_GROUPS = {
    "Federations": ("Federation", "SimulatedLearner", "Speed", "Link", "RandomAvailability", "RecordedAvailability"),
    "Ends": ("StopRule", "Target"),
    "Results": ("Run", "Comparison", "Power", "Model", "draw", "Tracking"),
    "Data": ("Dataset", "load_dataset"),
}


def python() -> str:
    """The public names of `metis`, grouped by purpose, and the interfaces for extensions."""
    named = [name for name in metis.__all__ if not name.startswith("__")]
    classes = {name: thing for name in named if inspect.isclass(thing := getattr(metis, name))}
    groups = {
        "Policies": ["Policy", *(name for name in POLICIES if name in named)],
        "Layers": [*(name for name, thing in classes.items() if issubclass(thing, Layer)), "Schedule", "Moment"],
        "Solvers": [name for name, thing in classes.items() if issubclass(thing, Solver)],
        **_GROUPS,
    }
    rest = set(named) - {name for names in groups.values() for name in names}
    parts = [
        "# Python",
        "The names of `metis`, from their docstrings. Seconds are seconds of the run: virtual in a simulation.",
    ]
    for title, names in groups.items():
        parts.append(f"## {title}")
        for name in names:
            parts += _described(f"metis.{name}", getattr(metis, name), 3)
    left = rest - {"MetisError"}
    parts += [f"## {title}" for title in (["Others"] if left else [])]
    for name in sorted(left):
        parts += _described(f"metis.{name}", getattr(metis, name), 3)
    parts += [
        "## Errors",
        f"```text\n{(errors.__doc__ or '').strip()}\n```",
        "All of them are in `metis.errors`; `metis.MetisError` is their base class.",
        "## Partitions",
        "`metis.data.partition`: who holds which examples. First the sizes, then the examples.",
        *_functions(partition),
        "## For extensions",
        "The parts of [a policy of your own](../extend.md), and the arguments that they receive.",
    ]
    for name in protocols.__all__:
        parts += _described(f"metis.core.protocols.{name}", getattr(protocols, name), 3)
    for name in mixing.__all__:
        if name != "Mixing":  # an alias
            parts += _described(f"metis.core.mixing.{name}", getattr(mixing, name), 3)
    for thing in (Roster, LearnerRecord, UpdateRequest, CommunityStamp, Budget, Moment, Work, Outgoing):
        if thing.__name__ not in metis.__all__:
            parts += _described(f"{thing.__module__.removesuffix('.base')}.{thing.__name__}", thing, 3)
    parts += _described("metis.core.layers.Layer", Layer, 3)
    parts += _described("metis.core.solvers.Solver", Solver, 3)
    parts += _described("metis.learning.engine.Engine", Engine, 3)
    parts += _functions(contribution)
    parts += _described("metis.reporting.trackers.tracker.Tracker", Tracker, 3)
    return "\n\n".join(part for part in parts if part) + "\n"


def _functions(module: ModuleType) -> list[str]:
    parts = []
    for name, thing in vars(module).items():
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not name.startswith("_"):
            parts += _described(f"{module.__name__}.{name}", thing, 3)
    return parts


def _described(path: str, thing: Any, depth: int) -> list[str]:
    """A function, or a class with its fields and methods."""
    name = path.rpartition(".")[2]
    words = _prose(thing)
    if not words:
        raise ValueError(f"{path} is part of the reference and has no docstring")
    heading = f"{'#' * depth} {name}"
    settings = _settings(thing)
    if not inspect.isclass(thing):
        rows = [
            [code(key), code(_annotation(item.annotation)), item.setting.doc]
            for key, item in settings.items()
            if item.setting.in_files
        ]
        listed = [table(["parameter", "type", "what it means"], rows)] if rows else []
        return [heading, _signature(path, thing), words, *listed]
    protocol = getattr(thing, "_is_protocol", False)
    parts = [heading, f"```python\nclass {path}\n```" if protocol else _signature(path, thing), words]
    if dataclasses.is_dataclass(thing):
        comments = {**{key: item.setting.doc for key, item in settings.items()}, **field_comments(thing)}
        rows = [
            [code(field.name), code(_plain(settings, field.name, field.type)), comments.get(field.name, "")]
            for field in dataclasses.fields(thing)
            if not field.name.startswith("_")
        ]
        if any(comments.values()):  # without them the signature says everything
            parts.append(table(["field", "type", "what it means"], rows))
    members, methods = [], []
    bases = [base for base in (Layer, Solver) if issubclass(thing, base) and thing is not base]
    for key, value in vars(thing).items():
        if key.startswith("_") or any(hasattr(base, key) for base in bases):  # described with the base
            continue
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(value, property) or hasattr(value, "func"):
            getter = value.fget if isinstance(value, property) else value.func
            kind = code(_annotation(getattr(getter, "__annotations__", {}).get("return", "")))
            members.append([code(key), kind, _sentence(inspect.getdoc(getter) or "")])
        elif inspect.isfunction(value) and _prose(value):
            if len(_listed(value)) > 3:
                methods += [f"{'#' * (depth + 1)} {name}.{key}", _signature(f"{name}.{key}", value), _prose(value)]
            else:
                members.append([code(f"{key}{_parameters(value)}"), code(_returned(value)), _sentence(_prose(value))])
    members = [row for row in members if row[2]]
    if members:
        parts.append(table(["attribute or method", "gives", "what it means"], members))
    return parts + methods


def _settings(thing: Any) -> Mapping[str, Parameter]:
    """The parameters of a definition whose annotations say what they mean; else nothing."""
    try:
        found = parameters_of(thing)
    except (NameError, TypeError, ValueError):  # annotations that only a type checker sees; no signature
        return {}
    return found if any(item.setting.doc for item in found.values()) else {}


def _plain(settings: Mapping[str, Parameter], name: str, annotation: Any) -> str:
    """An annotation without its setting."""
    return _annotation(settings[name].annotation if name in settings else annotation)


def _prose(thing: Any) -> str:
    words = inspect.getdoc(thing) or ""
    for name in _settings(thing):  # they are in the table below
        words = re.sub(rf"^- `{name}`: .*\n?", "", words, flags=re.MULTILINE).strip()
    return "" if dataclasses.is_dataclass(thing) and words.startswith(f"{thing.__name__}(") else words


def _signature(path: str, thing: Any) -> str:
    """The call on one line, or with one parameter per line."""
    parameters = _listed(thing)
    gives = "" if inspect.isclass(thing) else f" -> {_returned(thing)}"
    line = f"{path}({', '.join(parameters)}){gives}"
    if len(line) > 100:
        line = f"{path}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){gives}"
    return f"```python\n{line}\n```"


def _returned(thing: Any) -> str:
    return _annotation(thing.__annotations__.get("return", "None"))


def _parameters(thing: Any) -> str:
    names = [parameter.partition(":")[0].partition(" =")[0] for parameter in _listed(thing)]
    return f"({', '.join(names)})"


def _listed(thing: Any) -> list[str]:
    try:
        found = list(inspect.signature(thing).parameters.values())
    except ValueError:  # exceptions have no signature
        return ["..."]
    parts: list[str] = []
    settings = _settings(thing)
    for parameter in found:
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        text = "*" * {parameter.VAR_POSITIONAL: 1, parameter.VAR_KEYWORD: 2}.get(parameter.kind, 0) + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_plain(settings, parameter.name, parameter.annotation)}"
        if parameter.default is not parameter.empty:
            default = parameter.default
            shown = "math.inf" if default == math.inf else "..." if "factory" in repr(default) else _python(default)
            text += f" = {shown}"
        parts.append(text)
    return parts


def _python(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _annotation(annotation: Any) -> str:
    named = isinstance(annotation, type) and not typing.get_args(annotation)
    text = annotation if isinstance(annotation, str) else annotation.__name__ if named else str(annotation)
    return re.sub(r"\b(?:typing|collections\.abc|pathlib|metis(?:\.\w+)*)\.(?=[A-Z])", "", text)


def field_comments(thing: type) -> dict[str, str]:
    """The comment at the end of each field's line."""
    comments = {}
    lines = textwrap.dedent(inspect.getsource(thing)).splitlines()
    for line in lines:
        found = re.match(r"    (\w+): ", line)
        if found is None:
            continue
        for token in tokenize.generate_tokens(io.StringIO(line.strip().rstrip("([{") + "\n").readline):
            if token.type == tokenize.COMMENT:
                comments[found[1]] = token.string.lstrip("# ")
    return comments


# --- data sets and networks -------------------------------------------------------------------


def data() -> str:
    """The names of data sets and networks."""
    parts = [
        "# Data sets and networks",
        "The values of `data.dataset` and `network.name`. `metis data list` shows where a data set is, and "
        "`metis data fetch NAME` downloads it; data sets that are not bundled are looked up in the folder that "
        "`METIS_DATA` or `data.folder` names, then in the cache.",
        "## Data sets",
        table(
            ["name", "what it is", "example", "task", "train", "test", ""],
            [
                [
                    code(name),
                    source.title,
                    " × ".join(map(str, source.shape)),
                    source.task if source.task == "regression" else f"{len(source.class_names)} classes",
                    f"{source.train:,}",
                    f"{source.test:,}",
                    "in the package" if source.bundled else "",
                ]
                for name, source in datasets.DATASETS.items()
            ],
        ),
        "## Networks",
        "The options are keys of `[network]`, next to `name`. To use a network of your own, see "
        "[Bring your own network and data](../bring.md).",
    ]
    for name, function in NETWORKS.items():
        parts += [f"### {name}", inspect.getdoc(function) or ""]
        options = table_model(function, 2, sizes=True).model_json_schema()
        if options["properties"]:
            rows = []
            for key, rule in options["properties"].items():
                kind, allowed = _type(rule)
                rows.append([code(key), kind, _toml(rule.get("default")), allowed])
            parts.append(table(["option", "type", "default", "allowed"], rows))
    return "\n\n".join(parts) + "\n"
