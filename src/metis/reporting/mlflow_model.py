"""A network as an MLflow model with a signature (the extras `mlflow` and `export`): ONNX inside, no code of a site."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.errors import ConfigError, needs_package


def save_mlflow(
    onnx_file: Path, folder: Path, inputs: Mapping[str, NDArray[Any]], outputs: NDArray[Any], facts: Mapping[str, Any]
) -> None:
    """Write the model; `facts` are in its metadata."""
    for package, extra in (("mlflow", "mlflow"), ("onnx", "export")):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(needs_package("an MLflow model", package, extra))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's own modules
        import mlflow
        import onnx
        from mlflow.models import ModelSignature
        from mlflow.types import Schema, TensorSpec

        def spec(name: str, array: NDArray[Any]) -> Any:
            return TensorSpec(np.dtype(array.dtype), (-1, *array.shape[1:]), name)

        signature = ModelSignature(
            Schema([spec(name, array) for name, array in inputs.items()]), Schema([spec("output", outputs)])
        )
        mlflow.onnx.save_model(
            onnx.load(str(onnx_file)),
            str(folder),
            signature=signature,
            pip_requirements=["onnxruntime", "numpy"],
            metadata=dict(facts),
        )
