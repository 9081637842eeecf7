"""What is wrong with a file, one sentence per error: where, what was given, what is allowed, the nearest name."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from metis import registry
from metis.core.policies import POLICIES
from metis.errors import ConfigError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


# Symbols of the paper and names in other programs, for keys that have a full name here.
_ALSO_CALLED = {
    "lambda": "slowest_learner_epochs",
    "epochs": "local_epochs",
    "lr": "learning_rate",
    "eta": "learning_rate",
    "gamma": "momentum",
    "mu": "proximal_term",
    "rho": "regularization",
    "beta": "batch_size",
    "normalize": "normalise",
}


# Keys that had another name in earlier versions.
RENAMED = {"most_local_epochs": "max_local_epochs", "most_examples": "max_examples", "together": "batched"}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or the list of all."""
    return registry.did_you_mean(name, known, _ALSO_CALLED)


def unknown_key(name: str, known: Iterable[str]) -> str:
    """Why a key is refused, with the one that was probably meant."""
    known = list(known)
    if RENAMED.get(name) in known:
        return f"was renamed; write '{RENAMED[name]}'"
    return f"unknown key; {did_you_mean(name, known)}"


def shown(value: Any) -> str:
    """A value as a file has it; long ones by their kind."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list" if len(value) > 6 or any(isinstance(item, (dict, list)) for item in value) else str(value)
    return f"'{value}'" if isinstance(value, str) else str(value)


class ByOption(str):
    """A change of a file, KEY=VALUE, by an option of its own, which errors name instead of --set."""

    __slots__ = ("option",)

    option: str

    def __new__(cls, option: str, key: str, value: Any) -> ByOption:
        made = super().__new__(cls, f"{key}={json.dumps(value) if isinstance(value, str) else value}")
        made.option = option
        return made


class ConfigErrors:
    """Everything that is wrong with one file, one line each."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.single_policy = False  # [policy] instead of [[policy]]: paths have no number then
        self.overridden: dict[str, str] = {}  # paths that an option changed or made, and which one
        self._found: dict[tuple[tuple[str | int, ...], str], None] = {}

    def add(self, path: Sequence[str | int], message: str) -> None:
        self._found[tuple(path), message] = None

    def about(self, *path: str | int) -> bool:
        """Whether something is wrong at this path or below it."""
        return any(found[: len(path)] == path for found, _ in self._found)

    def _line(self, path: tuple[str | int, ...], message: str) -> str:
        if self.single_policy and path[:2] == ("policy", 0):
            path = ("policy", *path[2:])
        name = ".".join(map(str, path))
        by = next((by for key, by in self.overridden.items() if name == key or name.startswith(f"{key}.")), None)
        if by is None:
            return f"{self.source}: {name}: {message}"
        return f"--set {name}: {message}" if by == "--set" else f"{by}: {message}"

    def error(self) -> ConfigError:
        return ConfigError("\n".join(self._line(*found) for found in self._found))

    def raise_if_any(self) -> None:
        if self._found:
            raise self.error()

    def add_validation(
        self, problem: ValidationError, raw: Any, model: type[BaseModel], prefix: Sequence[str | int] = ()
    ) -> None:
        """Pydantic's findings in our words; several about one value (of a union type) become one."""
        expected: dict[tuple[str | int, ...], list[str]] = {}
        given: dict[tuple[str | int, ...], Any] = {}
        for found in problem.errors(include_url=False):
            kind, context, value = found["type"], found.get("ctx", {}), found["input"]
            inside = _path_in_file(found["loc"], raw, keep_last=kind in ("missing", "extra_forbidden"))
            path = (*prefix, *inside)
            if kind == "extra_forbidden":
                self.add(path, unknown_key(str(path[-1]), table_at(model, inside[:-1])))
            elif kind == "missing":
                self.add(path, _missing(path, table_at(model, inside[:-1]).get(str(inside[-1]))))
            elif kind in ("too_short", "string_too_short", "too_long"):
                self.add(path, _wrong_length(path, context, value))
            elif kind == "literal_error":
                self.add(path, not_a_choice(value, re.findall(r"'([^']*)'", context["expected"])))
            else:
                expected.setdefault(path, []).append(_expected(kind, context) or found["msg"])
                given[path] = value
        for path, texts in expected.items():
            # Of a union the branch that came closest counts: not "a whole number" for an entry of a list.
            if any(other[: len(path)] == path and other != path for other in expected):
                continue
            hint = ": write [[learners]], with two brackets" if path == ("learners",) else ""
            self.add(path, f"is {shown(given[path])}, must be {' or '.join(dict.fromkeys(texts))}{hint}")


def not_a_choice(value: Any, known: Iterable[str]) -> str:
    """Why a value is refused where only a few texts are allowed."""
    known = list(known)
    guess = registry.nearest(value, known, _ALSO_CALLED) if isinstance(value, str) and len(known) > 1 else None
    hint = f"; did you mean '{guess}'?" if guess else ""
    return f"is {shown(value)}, must be {one_of(known)}{hint}"


def one_of(known: Sequence[str]) -> str:
    return f"one of {', '.join(known)}" if len(known) > 1 else f"'{known[0]}'"


def _expected(kind: str, context: Mapping[str, Any]) -> str | None:
    if kind not in _LIMITS:
        return _EXPECTED.get(kind)
    words, key = _LIMITS[kind]
    limit = context[key]
    return f"{words} {limit:,}" if isinstance(limit, int) else f"{words} {limit:g}"


def _path_in_file(location: Sequence[str | int], raw: Any, *, keep_last: bool) -> list[str | int]:
    """Pydantic's location without the names of union branches, which are not in the file."""
    path: list[str | int] = []
    here = raw
    for depth, part in enumerate(location):
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = cast("Any", here)[part]
            path.append(part)
        elif keep_last and depth == len(location) - 1:
            path.append(part)
    return path


def table_at(model: type[BaseModel], path: Sequence[str | int]) -> Mapping[str, Any]:
    """The fields of the table at this path."""
    current: type[BaseModel] | None = model
    for part in path:
        if current is not None and isinstance(part, str):
            field = current.model_fields.get(part)
            current = None if field is None else _model_in(field.annotation)
    return {} if current is None else current.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for item in typing.get_args(annotation) if (found := _model_in(item)) is not None), None)


def _how_to_give(path: Sequence[str | int]) -> str | None:
    """How to write what a file cannot do without."""
    return {
        ("learners",): "describe the learners in at least one table [[learners]]",
        ("policy",): f"choose one of {', '.join(POLICIES)} in a table [policy]",
        ("learners", "batch_size"): "give the examples in a batch, as in batch_size = 100",
    }.get(tuple(part for part in path if isinstance(part, str)))


def _missing(path: Sequence[str | int], field: Any) -> str:
    annotation = getattr(field, "annotation", None)
    choices = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
    required = f"it must be {one_of(choices)}" if choices else "it must be given"
    return f"missing; {_how_to_give(path) or required}"


def _wrong_length(path: Sequence[str | int], context: Mapping[str, Any], value: Any) -> str:
    if isinstance(value, str):
        return "must not be empty"
    if "drift" in path:
        return f"is {shown(value)}, must be a pair [second, factor]"
    if len(value) == 0 and (how := _how_to_give(path)):
        return f"is empty; {how}"
    return f"is {shown(value)}, must have at least {context.get('min_length', 1)} entry"
