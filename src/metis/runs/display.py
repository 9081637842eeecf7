"""How a run shows itself: drawing belongs to a layer above, which the package `metis` puts in here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

curves: Callable[[list[Any], Any], Any]  # runs, and the path of the figure or None
page: Callable[[Any], str]  # one run as HTML
comparison: Callable[[list[Any]], Any]  # several runs as one object
progress: Callable[[str, Any], AbstractContextManager[Any]]  # a bar for a policy's label and stop rule, to be called
