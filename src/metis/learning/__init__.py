"""Inside a silo: examples, networks, solvers and the training loop. The only package that imports torch."""

from metis.learning.engine import Batch, Engine, Examples, Memory, Trained
from metis.learning.learner import ArrayExamples, DatasetExamples, JoinedExamples, Learner, as_examples
from metis.learning.scaffold import engine_for
from metis.learning.solvers import (
    FedProx,
    MomentumSGD,
    Scaffold,
    Solver,
    VanillaSGD,
    accumulation,
    with_proximal_term,
)
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
    "FedProx",
    "JoinedExamples",
    "Learner",
    "Memory",
    "MomentumSGD",
    "Scaffold",
    "Solver",
    "TorchEngine",
    "Trained",
    "Transform",
    "VanillaSGD",
    "accumulation",
    "as_examples",
    "brain_age_cnn3d",
    "brain_age_mlp",
    "centre_crop",
    "cifar10_cnn",
    "cifar_resnet",
    "cifar_tutorial",
    "compose",
    "engine_for",
    "femnist_cnn",
    "horizontal_flip",
    "kind_of",
    "logistic",
    "mlp",
    "random_crop",
    "small_cnn",
    "standardize",
    "train_batched",
    "with_proximal_term",
]
