"""Kinds of numbers and of tables in an experiment's file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[FiniteFloat, Field(gt=0)]
NotNegative = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Hour = Annotated[FiniteFloat, Field(ge=0, le=24)]


class Table(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class OpenTable(BaseModel):
    """A table that also takes the parameters of whatever its `name` names."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @property
    def extras(self) -> dict[str, Any]:
        """The parameters next to the keys that every such table has."""
        return dict(self.model_extra or {})


class NamedTable(OpenTable):
    """An open table that is nothing but a definition by name."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the definition."""
        return self.extras
