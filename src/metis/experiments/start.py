"""Where a federation starts from, if not from the network's own initialization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from metis.core.model import Model
from metis.errors import ArgumentError, DataError
from metis.runs.storage import load_arrays, warm_start

Start: TypeAlias = str | Path | Mapping[str, Any] | Any  # a file or folder, a state dict, or a torch module


def started_from(source: Start, model: Model) -> Model:
    """This model with the weights of the source; what a layer adds is kept. Files are read, never executed."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        whose = f"the initial model {path}"
        if not path.exists():
            raise DataError(f"the initial model: there is no file {path}")
        return warm_start(_read(path), model, whose)
    from metis.learning.torch.start import weights_of

    if not isinstance(source, Mapping) and not hasattr(source, "state_dict"):
        raise ArgumentError(
            f"initial_model is {source!r}; it must be a file, a folder, a state dict or a torch module", "initial_model"
        )
    return warm_start(weights_of(source), model, "the initial model")


def name_of(source: Start) -> str:
    """How a report calls it."""
    if isinstance(source, (str, Path)):
        return Path(source).name
    return "a state dict" if isinstance(source, Mapping) else f"a {type(source).__name__}"


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return load_arrays(path)[0]  # with the digest of files that Metis wrote
        except (TypeError, ValueError, AttributeError, KeyError):  # numpy does not know bfloat16
            pass
    from metis.learning.torch.start import load_weights

    return load_weights(path)
