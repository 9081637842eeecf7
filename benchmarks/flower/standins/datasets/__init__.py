"""As much of Hugging Face's datasets as Flower's examples use, in memory and with local data."""

import pickle
from pathlib import Path

import numpy as np
from local_data import columns_of


class Dataset:
    """Columns of equal length; a transform is applied to what is taken out."""

    def __init__(self, columns, transform=None, kind=None):
        self._columns, self._transform, self._kind = columns, transform, kind

    @property
    def column_names(self):
        return list(self._columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def _taken(self, indices):
        return {name: [values[index] for index in indices] for name, values in self._columns.items()}

    def __getitem__(self, key):
        if isinstance(key, str):
            return list(self._columns[key])
        if isinstance(key, (int, np.integer)):
            batch = self._shown(self._taken([int(key)]))
            return {name: values[0] for name, values in batch.items()}
        indices = range(len(self))[key] if isinstance(key, slice) else key
        return self._shown(self._taken(indices))

    def _shown(self, batch):
        if self._transform is not None:
            return self._transform(batch)
        if self._kind == "pandas":
            import pandas

            return pandas.DataFrame(batch)
        return batch

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def with_transform(self, transform):
        return Dataset(self._columns, transform, self._kind)

    def set_transform(self, transform):
        self._transform = transform

    def with_format(self, kind):
        return Dataset(self._columns, self._transform, kind)

    def set_format(self, kind):
        self._kind = kind

    def select(self, indices):
        return Dataset(self._taken(indices), self._transform, self._kind)

    def shuffle(self, seed=None):
        return self.select(np.random.default_rng(seed).permutation(len(self)))

    def shard(self, count, index):
        return self.select(range(index, len(self), count))

    def batch(self, size, num_proc=None, drop_last_batch=False):
        starts = range(0, len(self) - (size - 1 if drop_last_batch else 0), size)
        parts = {name: [values[start : start + size] for start in starts] for name, values in self._columns.items()}
        return Dataset(parts, self._transform, self._kind)

    def train_test_split(self, test_size=None, train_size=None, seed=None, **_):
        order = np.random.default_rng(seed).permutation(len(self))
        held = round((1 - train_size if test_size is None else test_size) * len(self))
        return DatasetDict(train=self.select(order[held:]), test=self.select(order[:held]))


class DatasetDict(dict):
    def with_transform(self, transform):
        return DatasetDict({name: part.with_transform(transform) for name, part in self.items()})

    def with_format(self, kind):
        return DatasetDict({name: part.with_format(kind) for name, part in self.items()})

    def save_to_disk(self, path):
        Path(path).mkdir(parents=True)
        columns = {name: part._columns for name, part in self.items()}
        Path(path, "columns.pickle").write_bytes(pickle.dumps(columns))


def load_from_disk(path):
    columns = pickle.loads(Path(path, "columns.pickle").read_bytes())
    return DatasetDict({name: Dataset(part) for name, part in columns.items()})


def load_dataset(path, *_, split=None, **__):
    parts = DatasetDict({name: Dataset(columns) for name, columns in columns_of(path).items()})
    return parts if split is None else parts[split]
