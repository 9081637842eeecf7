"""Inside a silo: examples, networks and the training loop; names are imported when they are first used.

`engine.py` and `learner.py` need no tensor library; `torch/` is the one that comes with Metis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from metis.learning.engine import (
        ENGINES as ENGINES,
        Batch as Batch,
        Engine as Engine,
        EngineJob as EngineJob,
        Examples as Examples,
        Trained as Trained,
    )
    from metis.learning.learner import (
        Learner as Learner,
    )
    from metis.learning.torch.augmentation import (
        Augmentation as Augmentation,
        Transform as Transform,
        centre_crop as centre_crop,
        cifar_tutorial as cifar_tutorial,
        compose as compose,
        horizontal_flip as horizontal_flip,
        random_contrast as random_contrast,
        random_crop as random_crop,
        standardize as standardize,
    )
    from metis.learning.torch.batched import (
        kind_of as kind_of,
        train_batched as train_batched,
    )
    from metis.learning.torch.engine import (
        TorchEngine as TorchEngine,
    )
    from metis.learning.torch.examples import (
        ArrayExamples as ArrayExamples,
        DatasetExamples as DatasetExamples,
        JoinedExamples as JoinedExamples,
        as_examples as as_examples,
    )
    from metis.learning.torch.metrics import (
        BatchMean as BatchMean,
    )
    from metis.learning.torch.networks import (
        NETWORKS as NETWORKS,
        brain_age_cnn3d as brain_age_cnn3d,
        brain_age_mlp as brain_age_mlp,
        cifar10_cnn as cifar10_cnn,
        cifar_resnet as cifar_resnet,
        femnist_cnn as femnist_cnn,
        logistic as logistic,
        mlp as mlp,
        small_cnn as small_cnn,
    )

_HOMES = {
    "engine": ("ENGINES", "Batch", "Engine", "EngineJob", "Examples", "Trained"),
    "learner": ("Learner",),
    "torch.augmentation": (
        "Augmentation",
        "Transform",
        "centre_crop",
        "cifar_tutorial",
        "compose",
        "horizontal_flip",
        "random_contrast",
        "random_crop",
        "standardize",
    ),
    "torch.batched": ("kind_of", "train_batched"),
    "torch.engine": ("TorchEngine",),
    "torch.examples": ("ArrayExamples", "DatasetExamples", "JoinedExamples", "as_examples"),
    "torch.metrics": ("BatchMean",),
    "torch.networks": (
        "NETWORKS",
        "brain_age_cnn3d",
        "brain_age_mlp",
        "cifar10_cnn",
        "cifar_resnet",
        "femnist_cnn",
        "logistic",
        "mlp",
        "small_cnn",
    ),
}
_MODULES = {name: f"metis.learning.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'metis.learning' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
