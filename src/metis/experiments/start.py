"""Where a federation starts from, if not from the network's own initialization."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from metis.core.model import Model
from metis.errors import ArgumentError, DataError
from metis.learning.engine import Engine
from metis.runs.storage import load_arrays, warm_start

Start: TypeAlias = str | Path | Mapping[str, Any] | Any  # a file or folder, a state dict, or a torch module


def started_from(source: Start, model: Model, engine: Engine | None = None) -> Model:
    """This model with the weights of the source; what a layer adds is kept. Files are read, never executed.

    The source may have the parts of the engine's network that are not sent.
    """
    arrays, whose = _arrays_of(source)
    return warm_start(arrays, model, whose, _kept(engine))


def with_kept_parts(source: Start, engine: Engine, seed: int) -> Engine:
    """The engine with what the source has of the parts that are not sent: those that are local or frozen."""
    started_from(source, engine.initial_model(seed), engine)
    kept = _kept(engine)
    own = {name: array for name, array in _arrays_of(source)[0].items() if name in kept}
    return engine.starting_with(own) if own else engine  # type: ignore[attr-defined]


def _kept(engine: Engine | None) -> Collection[str]:
    return getattr(engine, "kept", ())


def _arrays_of(source: Start) -> tuple[Mapping[str, Any], str]:
    """The tensors of a source, and what an error calls it."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.exists():
            raise DataError(f"the initial model: there is no file {path}")
        return _read(path), f"the initial model {path}"
    from metis.learning.torch.start import weights_of

    if not isinstance(source, Mapping) and not hasattr(source, "state_dict"):
        raise ArgumentError(
            f"initial_model is {source!r}; it must be a file, a folder, a state dict or a torch module", "initial_model"
        )
    return weights_of(source), "the initial model"


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
