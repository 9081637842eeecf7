"""Which parameters are federated, which stay in their silo, and which nobody trains."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from metis.errors import ConfigError
from metis.registry import did_you_mean

Kind = Literal["federated", "local", "frozen"]
# Patterns by kind, of which the first that matches counts, or a function of a name; what nothing matches is federated,
# or if only `federated` is given, frozen.
Sharing: TypeAlias = Mapping[str, Sequence[str] | str] | Callable[[str], str]

PERSONAL = "personal"  # what a personal model is called beside the network


def own_name(name: str) -> str:
    """The name that a parameter of a personal model has in the network."""
    return name.removeprefix(f"{PERSONAL}.")


def kinds_of(sharing: Sharing | None, names: Sequence[str]) -> dict[str, Kind]:
    """What each parameter and buffer is."""
    kinds = get_args(Kind)
    if sharing is None:
        return dict.fromkeys(names, "federated")
    if callable(sharing):
        found: dict[str, Any] = {name: sharing(name) for name in names}
        for name, kind in found.items():
            if kind not in kinds:
                raise ConfigError(
                    f"parameters: the function returned {kind!r} for '{name}'; allowed: {', '.join(kinds)}"
                )
    else:
        patterns = _patterns(sharing)
        for kind, each in patterns:
            if not fnmatch.filter(names, each):
                shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                raise ConfigError(f"parameters.{kind}: the pattern '{each}' matches nothing in the network: {shown}")
        rest = "frozen" if {kind for kind, _ in patterns} == {"federated"} else "federated"
        found = {
            name: next((kind for kind, pattern in patterns if fnmatch.fnmatchcase(name, pattern)), rest)
            for name in names
        }
    if "federated" not in found.values():
        raise ConfigError("parameters leaves nothing to federate; every parameter would be local or frozen")
    return found


def with_personal(kinds: dict[str, Kind], personal: Sequence[str]) -> dict[str, Kind]:
    """And what those of a personal model are: local, unless nobody trains them in the network."""
    return kinds | {name: "frozen" if kinds.get(own_name(name)) == "frozen" else "local" for name in personal}


def _patterns(sharing: Any) -> list[tuple[str, str]]:
    kinds = get_args(Kind)
    if not isinstance(sharing, Mapping):
        raise ConfigError(
            f"parameters is {sharing!r}; it must be a table such as {{'local': ['head.*']}}, with the keys "
            f"{', '.join(kinds)}, or a function that says for a name which of these it is"
        )
    patterns = []
    for kind, given in sharing.items():
        if kind not in kinds:
            raise ConfigError(f"parameters has the key '{kind}'; {did_you_mean(kind, kinds)}")
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, (list, tuple)) or not all(isinstance(pattern, str) for pattern in listed):
            raise ConfigError(
                f"parameters.{kind} is {given!r}; it must be a list of patterns such as 'head.*'; a function of names "
                "takes the place of the whole table"
            )
        patterns += [(kind, pattern) for pattern in listed]
    return patterns
