"""Data sets by name, and partitions of their examples among learners."""

from metis.data.dataset import Dataset
from metis.data.datasets import (
    DATASETS,
    DatasetSource,
    RemoteFile,
    fetch_dataset,
    find_dataset,
    load_dataset,
)
from metis.data.partition import (
    PUBLISHED_CLASSES,
    classes_per_learner,
    describe,
    dirichlet,
    explicit_sizes,
    iid,
    natural,
    non_iid,
    power_law_sizes,
    skewed_sizes,
    target_ranges,
    uniform_sizes,
    zipf_sizes,
)
from metis.data.volumes import NiftiVolumes, VolumeFolder, brain_phantoms, load_volumes

__all__ = [
    "DATASETS",
    "PUBLISHED_CLASSES",
    "Dataset",
    "DatasetSource",
    "NiftiVolumes",
    "RemoteFile",
    "VolumeFolder",
    "brain_phantoms",
    "classes_per_learner",
    "describe",
    "dirichlet",
    "explicit_sizes",
    "fetch_dataset",
    "find_dataset",
    "iid",
    "load_dataset",
    "load_volumes",
    "natural",
    "non_iid",
    "power_law_sizes",
    "skewed_sizes",
    "target_ranges",
    "uniform_sizes",
    "zipf_sizes",
]
