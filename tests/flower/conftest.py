"""A small Flower project with every kind of client, and a grid that calls it in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    """Each test imports its app again, and leaves nothing on the path."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name == "tiny" or name.startswith("tiny.")]:
        del sys.modules[name]
    from metis.flower import engine  # imports nothing of Flower

    engine.client_of.cache_clear()
    importlib.invalidate_caches()
