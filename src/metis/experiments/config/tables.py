"""Tables from definitions: what a name in a file names says which keys stand beside it."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from typing import Annotated, Any, Union

from pydantic import BaseModel, Field, ValidationError, create_model

from metis.core.layers import LAYERS, Layer
from metis.core.solvers import SOLVERS
from metis.experiments.config.errors import ConfigErrors
from metis.experiments.config.schema import Count, Table
from metis.registry import Parameter, did_you_mean, parameters_of

_GENERAL = ("learning_rate", "weight_decay")  # keys of [training] that every solver shares


@cache
def table_model(definition: Callable[..., Any], skip: int = 0, sizes: bool = False) -> type[BaseModel]:
    """A strict table whose keys are the settings of a definition, after the first `skip`; sizes are 1 or more."""
    parameters = list(parameters_of(definition).values())[skip:]
    fields = {item.name: _field(item, sizes) for item in parameters if item.setting.in_files}
    return create_model(definition.__name__, __base__=Table, **typing.cast("Any", fields))


def _field(parameter: Parameter, sizes: bool) -> tuple[Any, Any]:
    annotation, default = _for_files(parameter.annotation), parameter.default
    if isinstance(default, tuple):  # TOML has lists
        default = list(default)
    if sizes and annotation in (int, list[int]):  # layers, filters, kernels: none can be 0
        annotation = Count if annotation is int else list[Count]
    setting = parameter.setting
    if setting.limits:
        annotation = Annotated[annotation, Field(**typing.cast("Any", setting.limits))]
    return annotation, Field(... if default is MISSING else default, description=setting.doc or None)


def _for_files(annotation: Any) -> Any:
    """The annotation as a file can express it: dataclasses are tables, functions cannot be written."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return table_model(annotation)
    if origin in (Sequence, tuple):
        return list[arguments[0]]  # type: ignore[valid-type]
    if origin in (Union, types.UnionType):
        kept = [_for_files(item) for item in arguments if typing.get_origin(item) is not _CALLABLE]
        return Union[tuple(kept)]  # noqa: UP007 - the number of members is known only here
    return annotation


_CALLABLE = typing.get_origin(Callable[[], None])


def check_table(
    model: type[BaseModel], given: Mapping[str, Any], errors: ConfigErrors, path: Sequence[str | int]
) -> dict[str, Any] | None:
    """All keys of a table with the defaults filled in; None if something is wrong, which goes to the errors."""
    try:
        return model.model_validate(dict(given)).model_dump()
    except ValidationError as problem:
        errors.add_validation(problem, dict(given), model, path)
        return None


# --- solvers ----------------------------------------------------------------------------------


@cache
def solver_model(name: str) -> type[BaseModel]:
    """The settings of a solver beside the learning rate and the weight decay."""
    parameters = parameters_of(SOLVERS[name])
    fields = {
        item.name: _field(item, sizes=False)
        for item in parameters.values()
        if item.setting.in_files and item.name not in _GENERAL
    }
    return create_model(name, __base__=Table, **typing.cast("Any", fields))


def solver_settings(name: str) -> frozenset[str]:
    """The names of these settings."""
    return frozenset(solver_model(name).model_fields)


# --- layers -----------------------------------------------------------------------------------


def layer_class(
    key: str, table: Mapping[str, Any], errors: ConfigErrors, path: Sequence[str | int]
) -> type[Layer] | None:
    """The layer that a table chooses; None if it does not say, which goes to the errors."""
    kind = LAYERS[key]
    if not kind.selector:
        return kind.classes[""]
    choice = table.get(kind.selector)
    if choice is None:
        errors.add([*path, kind.selector], f"missing; it must be one of {', '.join(kind.classes)}")
    elif choice not in kind.classes:
        guess = did_you_mean(str(choice), kind.classes)
        hint = f"; {guess}" if "did you mean" in guess else ""
        errors.add([*path, kind.selector], f"is '{choice}', must be one of {', '.join(kind.classes)}{hint}")
    else:
        return kind.classes[choice]
    return None


def check_layer(
    key: str, table: Any, errors: ConfigErrors, path: Sequence[str | int]
) -> tuple[type[Layer], dict[str, Any]] | None:
    """The layer of a table and all its keys with the defaults filled in; None if something is wrong."""
    if not isinstance(table, dict):
        errors.add(path, "must be a table; {} takes all defaults")
        return None
    chosen = layer_class(key, table, errors, path)
    if chosen is None:
        return None
    model, kind = table_model(chosen.definition()), LAYERS[key]
    given = {name: value for name, value in table.items() if name != kind.selector}
    unused = [name for name in given.keys() - model.model_fields.keys() if _takers(key, name)]
    for name in sorted(unused):
        errors.add(
            [*path, name],
            f"is given, but {kind.selector} = '{chosen.choice}' does not use it; "
            f"{' and '.join(repr(taker) for taker in _takers(key, name))} would",
        )
    complete = check_table(model, {k: v for k, v in given.items() if k not in unused}, errors, path)
    if complete is None or unused:
        return None
    return chosen, {kind.selector: chosen.choice, **complete} if kind.selector else complete


def _takers(key: str, name: str) -> list[str]:
    """Which choices of a layer use this key."""
    return [
        choice
        for choice, layer in LAYERS[key].classes.items()
        if choice and name in table_model(layer.definition()).model_fields
    ]


def make_layer(layer: type[Layer], table: Mapping[str, Any]) -> Layer:
    """The layer of a complete table."""
    parameters = parameters_of(layer.definition())
    given = {name: value for name, value in table.items() if name in parameters}
    for name, value in given.items():
        nested = next((kind for kind in _dataclasses(parameters[name].annotation) if isinstance(value, dict)), None)
        if nested is not None:
            given[name] = nested(**value)
    return layer.from_table(given)


def _dataclasses(annotation: Any) -> list[Any]:
    options = (annotation, *typing.get_args(annotation))
    return [option for option in options if isinstance(option, type) and is_dataclass(option)]
