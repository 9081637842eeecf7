"""The table [site]: whose network and data are trained, if not those that the file names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from metis.experiments.config.kinds import Table


class SiteConfig(Table):
    """A site file or a client of another system, instead of [data], [partition] and [network]."""

    file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Python file with the network and the data of every site"
    )
    flower: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="a Flower app instead: its folder, a Python file or a module, perhaps with :NAME"
    )
    run_config: dict[str, bool | int | float | str] | None = Field(
        default=None, description="changes of the Flower app's own configuration, as flwr run --run-config"
    )
    node_config: dict[str, bool | int | float | str] | None = Field(
        default=None, description="of every node, as flower-supernode --node-config"
    )
    nvflare: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="a script of NVFlare's Client API instead: a Python file"
    )
    args: str | None = Field(
        default=None, description="arguments of the NVFlare script, as train_args of a recipe; {site} is the learner"
    )
    network: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="what makes the initial model of the NVFlare script, in a file next to it, as in 'model.py:Net'",
    )
    unit: Literal["step", "call"] | None = Field(
        default=None,
        description="what counts as a batch of such a client: a step of its optimizer, or a whole call of it; by "
        "default a step where its loop can be bounded",
    )

    @property
    def title(self) -> str:
        """How messages and reports call it."""
        return Path(self.file or self.flower or str(self.nvflare)).name
