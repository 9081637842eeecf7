"""A trained network as an ONNX file, compared with the network itself on an example (the extra `export`)."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from metis.errors import ConfigError, DataError, needs_package
from metis.learning.torch.batches import call
from metis.learning.torch.flat import to_numpy

_CLOSE = 1e-4  # of outputs of both, relative to the largest


class Exported(NamedTuple):
    """What was written, and on what it was tried."""

    inputs: dict[str, NDArray[Any]]
    outputs: NDArray[Any]
    difference: float | None  # largest, of outputs by ONNX Runtime and by torch; None if it is not installed


class _Positional(nn.Module):
    """A network that takes the parts of a batch one after the other, whatever it takes itself."""

    def __init__(self, module: nn.Module, names: list[str] | None) -> None:
        super().__init__()
        self.module, self._names = module, names

    def forward(self, *parts: Any) -> Any:
        inputs = parts[0] if len(parts) == 1 else parts
        return call(self.module, dict(zip(self._names, parts, strict=True)) if self._names else inputs)


def export_onnx(module: nn.Module, inputs: Any, path: Path) -> Exported:
    """Write the network; the number of examples in a batch stays open."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(needs_package("an export to ONNX", package, "export"))
    names = [*inputs] if isinstance(inputs, Mapping) else None
    parts = tuple(inputs.values()) if names else inputs if isinstance(inputs, tuple) else (inputs,)
    called = names or (["input"] if len(parts) == 1 else [f"input_{index}" for index in range(len(parts))])
    wrapped = _Positional(module, names).eval()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports each package that it could also export
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = to_numpy(wrapped(*parts))
            torch.onnx.export(
                wrapped,
                parts,
                str(path),
                input_names=called,
                output_names=["output"],
                dynamic_shapes=(tuple({0: torch.export.Dim("batch")} for _ in parts),),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except Exception as problem:  # whatever an exporter finds in a network
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise DataError(f"torch cannot write this network as ONNX: {reason}") from problem
    given = {name: to_numpy(part) for name, part in zip(called, parts, strict=True)}
    return Exported(given, outputs, _compared(path, given, outputs))


def _compared(path: Path, inputs: dict[str, NDArray[Any]], outputs: NDArray[Any]) -> float | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, inputs)[0]
    difference = float(np.abs(found - outputs).max(initial=0.0))
    if not difference <= _CLOSE * max(1.0, float(np.abs(outputs).max(initial=0.0))):
        raise DataError(f"the network as ONNX gives other outputs: they differ by {difference:g}")
    return difference
