"""Data sets by name, and partitions of their examples among learners."""

from metis.data.datasets import (
    DATASETS,
    Dataset,
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
    non_iid,
    power_law_sizes,
    skewed_sizes,
    target_ranges,
    uniform_sizes,
    zipf_sizes,
)

__all__ = [
    "DATASETS",
    "PUBLISHED_CLASSES",
    "Dataset",
    "DatasetSource",
    "RemoteFile",
    "classes_per_learner",
    "describe",
    "dirichlet",
    "explicit_sizes",
    "fetch_dataset",
    "find_dataset",
    "iid",
    "load_dataset",
    "non_iid",
    "power_law_sizes",
    "skewed_sizes",
    "target_ranges",
    "uniform_sizes",
    "zipf_sizes",
]
