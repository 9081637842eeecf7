"""Inside a silo: examples, networks and the training loop. The only package that imports torch."""

from metis.learning.engine import Batch, Engine, Examples, Trained
from metis.learning.learner import Learner
from metis.learning.torch.augmentation import (
    Augmentation,
    Transform,
    centre_crop,
    cifar_tutorial,
    compose,
    horizontal_flip,
    random_crop,
    standardize,
)
from metis.learning.torch.batched import kind_of, train_batched
from metis.learning.torch.engine import TorchEngine
from metis.learning.torch.examples import ArrayExamples, DatasetExamples, JoinedExamples, as_examples
from metis.learning.torch.networks import (
    NETWORKS,
    brain_age_cnn3d,
    brain_age_mlp,
    cifar10_cnn,
    cifar_resnet,
    femnist_cnn,
    logistic,
    mlp,
    small_cnn,
)

__all__ = [
    "NETWORKS",
    "ArrayExamples",
    "Augmentation",
    "Batch",
    "DatasetExamples",
    "Engine",
    "Examples",
    "JoinedExamples",
    "Learner",
    "TorchEngine",
    "Trained",
    "Transform",
    "as_examples",
    "brain_age_cnn3d",
    "brain_age_mlp",
    "centre_crop",
    "cifar10_cnn",
    "cifar_resnet",
    "cifar_tutorial",
    "compose",
    "femnist_cnn",
    "horizontal_flip",
    "kind_of",
    "logistic",
    "mlp",
    "random_crop",
    "small_cnn",
    "standardize",
    "train_batched",
]
