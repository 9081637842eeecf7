"""Definitions by name: policies, solvers, layers, networks, data sets and engines, as files and messages call them.

A definition registers itself where it is written. Its settings are the fields of a dataclass or the parameters of a
function, each with a `Setting` in its annotation; configuration tables, reference pages and checks come from these.
Packages outside of Metis add definitions by entry points, which `metis.plugins` loads when a name is looked up.
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, cast

from metis.errors import ArgumentError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What a setting means and which numbers it takes; stands in `Annotated[type, Setting(...)]`."""

    doc: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    infinite: bool = False  # whether infinity is allowed
    in_files: bool = True  # False: only from Python, because something else fills it in

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set, by the names that pydantic uses too."""
        return {
            name: limit
            for name in ("gt", "ge", "lt", "le")
            if (limit := cast("float | None", getattr(self, name))) is not None
        }

    @property
    def allowed(self) -> str:
        """The limits in words."""
        words = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
        return " and ".join(f"{words[name]} {limit:g}" for name, limit in self.limits.items()) or "a finite number"

    def permits(self, value: float) -> bool:
        """Whether a number is within the limits."""
        return not (
            math.isnan(value)
            or (math.isinf(value) and not self.infinite)
            or (self.gt is not None and not value > self.gt)
            or (self.ge is not None and not value >= self.ge)
            or (self.lt is not None and not value < self.lt)
            or (self.le is not None and not value <= self.le)
        )


@dataclass(frozen=True)
class Parameter:
    """One setting of a definition."""

    name: str
    annotation: Any  # without the Setting
    setting: Setting
    default: Any = MISSING  # MISSING: it must be given

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it takes, if it is a choice; None is not one of them."""
        options = [self.annotation, *typing.get_args(self.annotation)]
        return tuple(
            choice for option in options if typing.get_origin(option) is Literal for choice in typing.get_args(option)
        )


def parameters_of(definition: Callable[..., Any]) -> Mapping[str, Parameter]:
    """The settings of a dataclass or a function, by name; what has no annotation takes anything."""
    return _parameters_of(definition)


@cache
def _parameters_of(definition: Any) -> Mapping[str, Parameter]:
    hints = typing.get_type_hints(definition, include_extras=True)
    if isinstance(definition, type) and is_dataclass(definition):
        given = {
            field.name: field.default if field.default is not MISSING or field.default_factory is MISSING
            else field.default_factory()
            for field in fields(definition) if field.init
        }  # fmt: skip
    else:
        given = {
            name: MISSING if parameter.default is inspect.Parameter.empty else parameter.default
            for name, parameter in inspect.signature(definition).parameters.items()
        }
    return types.MappingProxyType(
        {name: _parameter(name, hints.get(name, Any), default) for name, default in given.items()}
    )


def _parameter(name: str, hint: Any, default: Any) -> Parameter:
    extras = getattr(hint, "__metadata__", ())
    setting = next((extra for extra in extras if isinstance(extra, Setting)), Setting(""))
    return Parameter(name, hint.__origin__ if extras else hint, setting, default)


def document(definition: Any) -> None:
    """Add to a docstring the settings that it does not name yet, as their annotations describe them."""
    words = inspect.cleandoc(definition.__doc__ or "")
    missing = [
        f"- `{name}`: {parameter.setting.doc}{_default(parameter)}."
        for name, parameter in parameters_of(definition).items()
        if parameter.setting.doc and f"- `{name}`: " not in words
    ]
    if missing:
        definition.__doc__ = "\n\n".join(part for part in (words, "\n".join(missing)) if part)


def _default(parameter: Parameter) -> str:
    return "" if parameter.default in (MISSING, None, "") else f"; {parameter.default!r} by default"


def check_settings(value: Any, called: str | None = None) -> None:
    """Refuse a dataclass with a setting outside of its limits; `called` names it in the error."""
    owner = called or type(value).__name__
    for name, parameter in parameters_of(type(value)).items():
        check_setting(owner, parameter, getattr(value, name))


def check_setting(owner: str, parameter: Parameter, value: Any) -> None:
    """Refuse a number outside of the limits and a text that is not among the choices."""
    name, setting = parameter.name, parameter.setting
    if value is None and _optional(parameter.annotation):
        return
    if parameter.choices:
        if value not in parameter.choices:
            allowed = ", ".join(parameter.choices)
            raise ArgumentError(f"{name} of {owner} is {value!r}; it must be one of {allowed}", name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not setting.permits(value):
            # That infinity is not greater than 0 would be hard to understand.
            finite = "finite and " if value == math.inf and setting.limits else ""
            raise ArgumentError(f"{name} of {owner} is {value}; it must be {finite}{setting.allowed}", name)
    elif _number(parameter.annotation):
        raise ArgumentError(f"{name} of {owner} is {value!r}; it must be a number", name)


def _optional(annotation: Any) -> bool:
    return annotation is Any or types.NoneType in typing.get_args(annotation)


def _number(annotation: Any) -> bool:
    options = [option for option in typing.get_args(annotation) or (annotation,) if option is not types.NoneType]
    return bool(options) and all(option in (int, float) for option in options)


def nearest(name: str, known: Iterable[str], also: Mapping[str, str] = types.MappingProxyType({})) -> str | None:
    """The known name that was probably meant; `also` maps other common names to known ones."""
    known = list(known)
    if also.get(name.lower()) in known:
        return also[name.lower()]

    def likeness(item: str) -> float:
        whole = difflib.SequenceMatcher(None, name.lower(), item.lower()).ratio()
        # "semisink" for "semisync_fedavg", "flip" for "horizontal_flip": a part that is nearly right.
        parts = (item[: len(name)], item[-len(name) :]) if len(name) > 2 else ()
        return max(
            [whole, *(0.9 * difflib.SequenceMatcher(None, name.lower(), part.lower()).ratio() for part in parts)]
        )

    best = max(known, key=likeness, default=None)
    return best if best is not None and likeness(best) >= 0.6 else None


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The known name of which this is almost certainly a misspelling."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.9)), None)


def did_you_mean(name: str, known: Iterable[str], also: Mapping[str, str] = types.MappingProxyType({})) -> str:
    """The nearest known name as a question, or the list of all."""
    known = list(known)
    guess = nearest(name, known, also)
    return f"did you mean '{guess}'?" if guess else f"choose one of {', '.join(known)}" if known else "it takes none"


class Registry(MutableMapping[str, T]):
    """Definitions of one kind by name, in the order in which they were registered.

    Those of other packages, by entry points of `group`, are loaded when a name is not known or all are listed.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group  # the kind in error messages: "policy", "solver"
        self._definitions: dict[str, T] = {}
        self._complete = False
        self.elsewhere: Callable[[], Mapping[str, T]] = dict  # found by name, but not listed with the others

    @property
    def registered(self) -> Mapping[str, T]:
        """Those that are registered already, without looking for plugins."""
        return self._definitions

    def __getitem__(self, name: str) -> T:
        if name not in self._definitions:
            self._load_plugins()
        return self._definitions[name] if name in self._definitions else self.elsewhere()[name]

    def __setitem__(self, name: str, definition: T) -> None:
        self._definitions[name] = definition

    def __delitem__(self, name: str) -> None:
        del self._definitions[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(self._definitions)

    def __len__(self) -> int:
        self._load_plugins()
        return len(self._definitions)

    def named(self, name: str) -> T:
        """The definition of this name; the error for an unknown one names the nearest."""
        if name not in self:
            raise ConfigError(f"there is no {self.kind} '{name}'; {did_you_mean(name, self.names())}")
        return self[name]

    def names(self) -> list[str]:
        """All that can be named."""
        return [*self, *self.elsewhere()]

    def add(self, name: str, definition: T) -> T:
        """Register a definition; a name is taken once."""
        known = self._definitions.get(name)
        if known is not None and known is not definition:
            raise ConfigError(f"two definitions of the {self.kind} '{name}': {_home(known)} and {_home(definition)}")
        self._definitions[name] = definition
        return definition

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers what it decorates."""
        return lambda definition: self.add(name, definition)

    def _load_plugins(self) -> None:
        if not self._complete:
            self._complete = True  # before they are loaded: they may look names up
            from metis.plugins import load_group

            load_group(self, self.group)


def _home(definition: Any) -> str:
    return f"{getattr(definition, '__module__', '?')}.{getattr(definition, '__qualname__', type(definition).__name__)}"
