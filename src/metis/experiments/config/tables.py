"""Open tables: what a name in a file names decides which keys are allowed next to it.

They are checked as the file has them, before the rest is known to be right, so that every error has its path.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from functools import cache
from typing import Annotated, Any, Union

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, create_model

from metis.core.layers import LAYERS, Layer
from metis.core.policies import POLICIES
from metis.experiments.config.errors import ConfigErrors, did_you_mean, not_a_choice, one_of, shown, unknown_key
from metis.experiments.config.kinds import Count, Table
from metis.experiments.config.schema import PolicyConfig, SolverConfig, TrainingConfig
from metis.learning.engine import PERSONAL_MODELS, SOLVERS
from metis.registry import Parameter, parameters_of

GENERAL = ("learning_rate", "weight_decay")  # settings of solvers that have a key of their own in [training]

Path = tuple[str | int, ...]


def table_model(
    definition: Callable[..., Any], skip: int = 0, sizes: bool = False, without: tuple[str, ...] = ()
) -> type[BaseModel]:
    """A strict table whose keys are the settings of a definition, after the first `skip`; sizes are 1 or more."""
    return _table_model(definition, skip, sizes, without)


@cache
def _table_model(definition: Any, skip: int, sizes: bool, without: tuple[str, ...]) -> type[BaseModel]:
    fields = {
        item.name: _field(item, sizes)
        for item in list(parameters_of(definition).values())[skip:]
        if item.setting.in_files and item.name not in without
    }
    return create_model(definition.__name__, __base__=Table, **typing.cast("Any", fields))


def _field(parameter: Parameter, sizes: bool) -> tuple[Any, Any]:
    setting, default = parameter.setting, parameter.default
    annotation = _for_files(parameter.annotation, infinite=setting.infinite)
    if isinstance(default, tuple):  # TOML has lists
        default = list(default)
    if sizes and annotation in (int, list[int]):  # layers, filters, kernels: none can be 0
        annotation = Count if annotation is int else list[Count]
    if setting.limits:
        annotation = Annotated[annotation, Field(**typing.cast("Any", setting.limits))]
    return annotation, Field(... if default is MISSING else default, description=setting.doc or None)


def _for_files(annotation: Any, *, infinite: bool = False) -> Any:
    """The annotation as a file can express it: dataclasses are tables, functions cannot be written."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is float and not infinite:
        return FiniteFloat
    if isinstance(annotation, type) and is_dataclass(annotation):
        return table_model(annotation)
    if origin in (Sequence, tuple):
        return list[arguments[0]]  # type: ignore[valid-type]
    if origin in (Union, types.UnionType):
        kept = [_for_files(item, infinite=infinite) for item in arguments if typing.get_origin(item) is not _CALLABLE]
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


def check_open_tables(raw: Mapping[str, Any], errors: ConfigErrors) -> None:
    """The settings of policies, layers, solvers and augmentations."""
    policies = [_as_table(entry) for entry in _as_list(raw.get("policy"))]
    for index, entry in enumerate(policies):
        name = entry.get("name")
        if isinstance(name, str):
            _check_policy(name, entry, errors, ("policy", index))
    training = _as_table(raw.get("training"))
    _check_solvers(training, policies, errors)
    _check_personal(_as_table(training.get("personal")), errors)
    for index, entry in enumerate(_as_list(_as_table(raw.get("data")).get("augment"))):
        name = _as_table(entry).get("name")
        if isinstance(name, str) and name in OPERATIONS:
            given = {key: value for key, value in entry.items() if key != "name"}
            check_table(operation_model(name), given, errors, ["data", "augment", index])


def _as_table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# --- policies and their layers ----------------------------------------------------------------


def _check_policy(name: str, table: Mapping[str, Any], errors: ConfigErrors, path: Path) -> None:
    if name not in POLICIES:
        errors.add((*path, "name"), f"there is no policy '{name}'; {did_you_mean(name, POLICIES)}")
        return
    model = table_model(POLICIES[name])
    layers = [key for key, kind in LAYERS.items() if kind.in_files and key not in model.model_fields]
    for key, value in table.items():
        if key in layers:
            _check_layer(key, value, errors, (*path, key))
        elif key not in model.model_fields and key not in PolicyConfig.model_fields:
            takers = [other for other, policy in POLICIES.items() if key in table_model(policy).model_fields]
            known = [*model.model_fields, *PolicyConfig.model_fields, *layers]
            errors.add((*path, key), _unused(name, takers) if takers else unknown_key(key, known))
    own = {key: value for key, value in table.items() if key in model.model_fields}
    check_table(model, own, errors, path)
    for key in layers:
        for replaced in sorted(replaced_by(key) & own.keys()) if key in table else ():
            errors.add((*path, replaced), f"is given together with {key}; keep one of them")


def _check_layer(key: str, table: Any, errors: ConfigErrors, path: Path) -> None:
    if not isinstance(table, dict):
        errors.add(path, f"is {shown(table)}, must be a table")
        return
    kind = LAYERS[key]
    choice = table.get(kind.selector, "")
    if not isinstance(choice, str) or choice not in kind.classes:
        missing = kind.selector not in table
        message = f"missing; it must be {one_of([*kind.classes])}" if missing else not_a_choice(choice, kind.classes)
        errors.add((*path, kind.selector), message)
        return
    model = layer_model(kind.classes[choice])
    given = {}
    for name, value in table.items():
        takers = [other for other, layer in kind.classes.items() if name in layer_model(layer).model_fields]
        if name in model.model_fields or (not takers and name != kind.selector):
            given[name] = value
        elif takers:
            errors.add((*path, name), _unused(f"{kind.selector} = '{choice}'", takers))
    check_table(model, given, errors, path)


def _unused(where: str, takers: Sequence[str]) -> str:
    """Why a key is refused that only others use."""
    quoted = [f"'{taker}'" for taker in takers]
    listed = " and ".join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else quoted[0]
    return f"is given, but {where} does not use it; {listed} would"


def layer_model(layer: type[Layer]) -> type[BaseModel]:
    """The table of a layer, without the key that chooses it."""
    return table_model(layer.definition())


def layer_table(key: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a layer's table, which was checked before, with the defaults filled in."""
    selector = LAYERS[key].selector
    choice = {selector: table[selector]} if selector else {}
    given = {name: value for name, value in table.items() if name not in choice}
    return {**choice, **layer_model(_layer_class(key, table)).model_validate(given).model_dump()}


def build_layer(key: str, table: Mapping[str, Any]) -> Layer:
    """The layer that a table describes."""
    layer = _layer_class(key, table)
    parameters = parameters_of(layer.definition())
    given = {name: value for name, value in layer_table(key, table).items() if name in parameters}
    for name, value in given.items():
        if isinstance(value, dict):
            options = (parameters[name].annotation, *typing.get_args(parameters[name].annotation))
            nested: Any = next((item for item in options if isinstance(item, type) and is_dataclass(item)), dict)
            given[name] = nested(**value)
    return layer.from_table(given)


def _layer_class(key: str, table: Mapping[str, Any]) -> type[Layer]:
    kind = LAYERS[key]
    return kind.classes[table[kind.selector] if kind.selector else ""]


def replaced_by(key: str) -> set[str]:
    """Parameters of a policy that a layer replaces."""
    return {name for layer in LAYERS[key].classes.values() for name in layer.replaces}


# --- solvers ----------------------------------------------------------------------------------


def solver_model(name: str) -> type[BaseModel]:
    """The settings of a solver that have no key of their own in [training]."""
    return table_model(SOLVERS[name], without=GENERAL)


def solver_settings(name: str) -> frozenset[str]:
    """The names of all its settings."""
    return frozenset(table_model(SOLVERS[name]).model_fields)


def inherited(solver: str, shared: str) -> frozenset[str]:
    """Which settings of [training], whose solver is `shared`, a policy's solver uses too."""
    inherits = SOLVERS[solver].inherits
    if inherits is None or solver == shared:
        return solver_settings(solver)
    return solver_settings(solver) & (inherits | set(GENERAL))


def _check_solvers(shared: dict[str, Any], policies: Sequence[dict[str, Any]], errors: ConfigErrors) -> None:
    """A setting must be used by the solver next to it; in [training] by the solver of some policy."""
    tables: dict[Path, dict[str, Any]] = {("training",): shared}
    for index, policy in enumerate(policies):
        tables["policy", index, "training"] = _as_table(policy.get("training"))
    default = shared.get("solver", TrainingConfig.model_fields["solver"].default)
    solvers = {path: table.get("solver", default) for path, table in tables.items()}
    for path, name in solvers.items():
        if isinstance(name, str) and name not in SOLVERS and "solver" in tables[path]:
            errors.add((*path, "solver"), f"there is no solver '{name}'; {did_you_mean(name, SOLVERS.names())}")
    if any(not isinstance(name, str) or name not in SOLVERS for name in solvers.values()):
        # Which settings are used is not known; those that no solver has are wrong in any case.
        anyone = frozenset().union(*map(solver_settings, SOLVERS))
        for path, table in tables.items():
            _check_settings(next(iter(SOLVERS)), anyone, table, errors, path)
        return
    undecorated = [
        path for path, name in solvers.items() if _is_undecorated(SOLVERS[name]) and "solver" in tables[path]
    ]
    for path in undecorated:
        errors.add((*path, "solver"), f"the class of '{solvers[path]}' must be a @dataclass, for its settings")
    if undecorated:
        return
    for path, table in tables.items():
        known = solver_settings(solvers[path])
        if path == ("training",):
            known = known.union(*(inherited(solver, default) for solver in solvers.values()))
        _check_settings(solvers[path], known, table, errors, path)
    for path, solver in solvers.items():
        model = solver_model(solver)
        for where, table in {("training",): shared, path: tables[path]}.items():
            check_table(model, {key: value for key, value in table.items() if key in model.model_fields}, errors, where)


def _is_undecorated(solver: Any) -> bool:
    """Whether this is a class without @dataclass; those of torch.optim are functions, whose parameters are settings."""
    return isinstance(solver, type) and not is_dataclass(solver)


def _check_settings(
    solver: str, known: frozenset[str], given: Mapping[str, Any], errors: ConfigErrors, path: Path
) -> None:
    fields = (TrainingConfig if path == ("training",) else SolverConfig).model_fields
    for key, value in given.items():
        if key in known or (key in fields and (key not in GENERAL or value == fields[key].default)):
            continue
        takers = [name for name in SOLVERS if key in solver_settings(name)]
        if takers:
            errors.add((*path, key), _unused(f"solver = '{solver}'", takers))
        else:
            errors.add((*path, key), unknown_key(key, [*fields, *solver_model(solver).model_fields]))


def _check_personal(table: dict[str, Any], errors: ConfigErrors) -> None:
    name, path = table.get("name"), ["training", "personal"]
    if not isinstance(name, str):
        return
    if name not in PERSONAL_MODELS:
        known = PERSONAL_MODELS.names()
        errors.add([*path, "name"], f"there is no personal model '{name}'; {did_you_mean(name, known)}")
        return
    check_table(table_model(PERSONAL_MODELS[name]), {k: v for k, v in table.items() if k != "name"}, errors, path)


# --- augmentation -----------------------------------------------------------------------------

OPERATIONS: dict[str, dict[str, Any]] = {
    "random_crop": {
        "size": (Count, Field(description="pixels a side that are cut out")),
        "padding": (Annotated[int, Field(ge=0)], Field(default=0, description="black pixels around, before cutting")),
    },
    "horizontal_flip": {
        "probability": (
            Annotated[float, Field(ge=0, le=1)],
            Field(default=0.5, description="that an image is mirrored"),
        )
    },
    "random_contrast": {
        "lower": (
            Annotated[float, Field(ge=0)],
            Field(default=0.2, description="least factor of a channel's contrast"),
        ),
        "upper": (Annotated[float, Field(ge=0)], Field(default=1.8, description="largest factor")),
    },
    "standardize": {},
}


def operation_model(name: str) -> type[BaseModel]:
    """A strict table whose keys are the options of one step of an augmentation."""
    return create_model(name, __base__=Table, **OPERATIONS[name])
