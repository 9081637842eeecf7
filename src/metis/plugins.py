"""Definitions from other packages, found by their entry points.

A package names a module, or an object in one, in a group such as `metis.policies`. Importing it registers what it
defines; an object that has not registered itself is registered under the name of its entry point.
"""

from __future__ import annotations

import importlib.metadata
from types import ModuleType
from typing import Any

from metis.errors import ConfigError, described
from metis.registry import Registry


def load_group(registry: Registry[Any], group: str) -> None:
    """Load all entry points of a group into its registry."""
    for point in importlib.metadata.entry_points(group=group):
        try:
            loaded = point.load()
        except Exception as problem:
            package = point.dist.name if point.dist is not None else point.value
            raise ConfigError(
                f"the {registry.kind} '{point.name}' of {package} cannot be loaded: {described(problem)}"
            ) from problem
        if not isinstance(loaded, ModuleType) and point.name not in registry.registered:
            registry.add(point.name, loaded)
