"""A script of NVFlare's Client API: what a file or the command line says of it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from metis.errors import ConfigError, needs_package

OLDEST, NEWEST = (2, 7), (2, 9)  # releases with the interface that is used here; the newest one was tested
_PREFIX = "nvflare:"


def require_nvflare() -> None:
    """Refuse a missing package and releases that are too old, each in one sentence."""
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(needs_package("a script of NVFlare", "nvflare", "nvflare")) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"nvflare {version} is installed, and Metis works with {wanted} and later: pip install -U nvflare"
        )
    logging.getLogger("nvflare").setLevel(logging.ERROR)


@dataclass(frozen=True)
class NVFlareSource:
    """A script, its arguments and its initial model; it can be sent to another process as one string."""

    script: str
    args: str = ""  # as train_args of a recipe
    network: str | None = None  # FILE.py:NAME of what makes the initial model
    learners: tuple[str, ...] = ()
    unit: Literal["auto", "step", "call"] = "auto"
    start: str | None = None  # a file with the initial model

    @staticmethod
    def is_spec(text: str | Path) -> bool:
        return str(text).startswith(_PREFIX)

    @property
    def spec(self) -> str:
        """The whole as one string without slashes, which a path to a file never is."""
        return _PREFIX + quote(json.dumps(asdict(self), separators=(",", ":")), safe="")

    @staticmethod
    def of(spec: str | Path) -> NVFlareSource:
        table = json.loads(unquote(str(spec).removeprefix(_PREFIX)))
        return NVFlareSource(**{**table, "learners": tuple(table["learners"])})

    @property
    def title(self) -> str:
        """For messages."""
        return f"the NVFlare script {Path(self.script).name}"


def with_settings(
    source: NVFlareSource,
    learners: Sequence[str],
    args: str | None,
    network: str | None,
    unit: str | None,
    start: str | None,
) -> NVFlareSource:
    """With what the federation's file says; what the site itself says comes first."""
    chosen: Any = source.unit if source.unit != "auto" else unit or "auto"
    return replace(
        source,
        args=source.args or args or "",
        network=source.network or network,
        learners=tuple(learners),
        unit=chosen,
        start=source.start or start,
    )
