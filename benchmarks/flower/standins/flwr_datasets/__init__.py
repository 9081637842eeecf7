"""Flower's partitioned data sets on local data."""

from datasets import load_dataset


class FederatedDataset:
    def __init__(self, *, dataset, partitioners, **_):
        self._parts = load_dataset(dataset)
        self._partitioners = partitioners

    def load_partition(self, partition_id, split=None):
        split = split or next(iter(self._partitioners))
        return self._partitioners[split].load(self._parts[split], partition_id)

    def load_split(self, split):
        return self._parts[split]
