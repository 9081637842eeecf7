"""What is wrong with a file, in one sentence a fault: where, what was given, what is allowed, the nearest name."""

from __future__ import annotations

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


# The symbols of the paper and of other programs, for what is called by its full name here.
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
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list" if len(value) > 6 or any(isinstance(item, (dict, list)) for item in value) else str(value)
    return f"'{value}'" if isinstance(value, str) else str(value)


class ConfigErrors:
    """Everything that is wrong with one file, one line each."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.single_policy = False
        self.overridden: list[str] = []
        self.lines: list[str] = []

    def add(self, path: Sequence[str | int], message: str) -> None:
        if self.single_policy and list(path[:2]) == ["policy", 0]:
            path = ["policy", *path[2:]]
        name = ".".join(str(part) for part in path)
        by_hand = any(name == key or name.startswith(f"{key}.") for key in self.overridden)
        line = f"--set {name}: {message}" if by_hand else f"{self.source}: {name}: {message}"
        if line not in self.lines:
            self.lines.append(line)

    def add_validation(
        self, problem: ValidationError, raw: Any, model: type[BaseModel], prefix: Sequence[str | int] = ()
    ) -> None:
        """Pydantic's findings in our words; several about one place (a union) become one."""
        expected: dict[tuple[str | int, ...], list[str]] = {}
        given: dict[tuple[str | int, ...], Any] = {}
        for found in problem.errors(include_url=False):
            kind, context = found["type"], found.get("ctx", {})
            path = _place(found["loc"], raw, keep_last=kind in ("missing", "extra_forbidden"))
            if kind == "extra_forbidden":
                self.add([*prefix, *path], unknown_key(str(path[-1]), _fields_at(model, path[:-1])))
            elif kind == "missing":
                self.add([*prefix, *path], f"missing; {_missing_hint(path)}")
            elif kind in ("too_short", "string_too_short", "too_long"):
                self.add([*prefix, *path], _length_hint(path, context, found["input"]))
            elif kind == "literal_error":
                known = re.findall(r"'([^']*)'", context["expected"])
                tail = f"; {did_you_mean(found['input'], known)}" if isinstance(found["input"], str) else ""
                tail = tail if "did you mean" in tail else ""
                self.add([*prefix, *path], f"is {shown(found['input'])}, must be one of {', '.join(known)}{tail}")
            else:
                text = _EXPECTED.get(kind)
                if kind in _LIMITS:
                    words, key = _LIMITS[kind]
                    limit = context[key]
                    text = f"{words} {limit:,}" if isinstance(limit, int) else f"{words} {limit:g}"
                expected.setdefault(tuple(path), []).append(text or found["msg"])
                given[tuple(path)] = found["input"]
        for place, texts in expected.items():
            unique = list(dict.fromkeys(texts))
            # Of a union the branch that came closest counts: not "a whole number" for an entry of a list.
            if any(other[: len(place)] == place and other != place for other in expected):
                continue
            hint = ": write [[learners]], with two brackets" if list(place) == ["learners"] else ""
            self.add([*prefix, *place], f"is {shown(given[place])}, must be {' or '.join(unique)}{hint}")

    def error(self) -> ConfigError:
        return ConfigError("\n".join(self.lines))

    def raise_if_any(self) -> None:
        if self.lines:
            raise self.error()


def _place(location: Sequence[str | int], raw: Any, *, keep_last: bool) -> list[str | int]:
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


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that the table at this path has."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        current = _model_in(current.model_fields[part].annotation) if part in current.model_fields else None
        if current is None:
            return []
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for item in typing.get_args(annotation) if (found := _model_in(item)) is not None), None)


def _missing_hint(path: Sequence[str | int]) -> str:
    hints = {
        "learners": "say who learns, in at least one table [[learners]]",
        "policy": f"choose one of {', '.join(POLICIES)} in a table [policy]",
        "batch_size": "say how many examples a batch has, as in batch_size = 100",
    }
    return hints.get(str(path[-1]), "it must be given")


def _length_hint(path: Sequence[str | int], context: Mapping[str, Any], value: Any) -> str:
    if isinstance(value, str):
        return "must not be empty"
    if "drift" in path:
        return f"is {shown(value)}, must be a pair [second, factor]"
    if path and path[0] in ("learners", "policy") and len(path) == 1:
        return f"is empty; {_missing_hint(path)}"
    return f"is {shown(value)}, must have at least {context.get('min_length', 1)} entry"
