"""Layers whose table in a file is a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from metis.core.layers.base import Layer
from metis.core.schedules import Schedule


class Scheduled(Layer):
    """A layer with one field, a `Schedule` or a function of the `Moment`; a file gives the keys of a schedule."""

    @classmethod
    def definition(cls) -> Callable[..., Any]:
        return Schedule

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Layer:
        return cls(Schedule(**table))  # type: ignore[call-arg]
