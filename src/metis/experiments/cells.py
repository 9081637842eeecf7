"""The paper's experiments: one file for each environment, one cell of a table for each of its policies.

A file is that of `metis simulate` with three tables more: [paper] says what of the paper it is, `published`
in a policy what the paper reports for it, and [small] which values `--scale small` changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from metis.errors import ConfigError
from metis.experiments.config import (
    ExperimentConfig,
    PolicyConfig,
    Table,
    did_you_mean,
    read_toml,
    resolve_config,
    slug,
)

Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")


class Published(Table):
    """What the paper reports for a policy, in its own units; `energy` is its column EC."""

    reached: bool = True
    iterations: int | None = None
    fast: int | None = None  # iterations of the fast learners
    slow: int | None = None
    parallel_time: float | None = None
    cumulative_time: float | None = None
    communication_cost: int | None = None
    energy: float | None = None


class Paper(Table):
    """Which experiment of the paper a file is."""

    title: str
    domain: str
    cluster: Literal["homogeneous", "heterogeneous"]
    distribution: str
    results: list[str]
    note: str  # which data and network it is, and what they stand in for
    centralized: bool = False  # whether a model trained on all the data in one place is compared
    silos: bool = False  # whether each learner also trains alone


@dataclass(frozen=True)
class Cell:
    """One policy in one environment, at one scale."""

    environment: Environment
    config: ExperimentConfig  # with this policy only
    published: Published | None

    @property
    def policy(self) -> PolicyConfig:
        return self.config.policy[0]

    @property
    def label(self) -> str:
        return self.policy.label or self.policy.name

    @property
    def name(self) -> str:
        """Environment and policy, as the folder of the run is called."""
        return f"{self.environment.name}/{slug(self.label)}"


@dataclass(frozen=True)
class Environment:
    """One federation of the paper with all policies that it compares there."""

    name: str
    scale: Scale
    paper: Paper
    config: ExperimentConfig
    published: tuple[Published | None, ...]  # of each policy

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(
            Cell(self, self.config.model_copy(update={"policy": [policy]}), published)
            for policy, published in zip(self.config.policy, self.published, strict=True)
        )


def environments_folder() -> Path:
    """Where the files are: in the installed package, or in the checkout that it runs from."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "paper", here.parents[3] / "experiments"):
        if folder.is_dir():
            return folder
    raise ConfigError("the experiments of the paper are not installed with this package; name their folder")


def load_environments(
    scale: Scale, folder: Path | None = None, overrides: Sequence[str] = ()
) -> dict[str, Environment]:
    """Every environment by the name of its file, at one scale, changed by `key.path=value` overrides."""
    folder = environments_folder() if folder is None else folder
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise ConfigError(f"there is no experiment in {folder}")
    return {file.stem: load_environment(file, scale, overrides) for file in files}


def load_environment(file: Path, scale: Scale, overrides: Sequence[str] = ()) -> Environment:
    """One file at one scale, checked whole."""
    content = read_toml(file)
    source = f"{file.name} ({scale})"
    if not isinstance(content.get("paper"), dict):
        raise ConfigError(f"{file.name}: paper: missing; say in a table [paper] which experiment of the paper it is")
    paper = _checked(Paper, content.pop("paper"), file.name, "paper")
    small = content.pop("small", {})
    policies = content.get("policy")
    published = []
    for place, policy in enumerate(policies if isinstance(policies, list) else []):
        given = policy.pop("published", None)
        published.append(None if given is None else _checked(Published, given, file.name, f"policy.{place}.published"))
    if scale == "small":
        content = merged(content, small)
    config = resolve_config(content, source, overrides, folder=file.parent)
    return Environment(file.stem, scale, paper, config, tuple(published))


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with what the changes say; a list is replaced whole."""
    result = dict(content)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _checked(model: Any, given: Any, source: str, path: str) -> Any:
    try:
        return model.model_validate(given)
    except ValidationError as problem:
        lines = [_complaint(model, found, f"{source}: {path}") for found in problem.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _complaint(model: type[BaseModel], found: Any, source: str) -> str:
    key = ".".join(str(part) for part in found["loc"])
    if found["type"] == "extra_forbidden":
        return f"{source}.{key}: unknown key; {did_you_mean(key, model.model_fields)}"
    return f"{source}.{key}: {found['msg'][:1].lower()}{found['msg'][1:]}"
