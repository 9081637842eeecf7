import numpy as np


class IidPartitioner:
    def __init__(self, num_partitions):
        self.count = num_partitions

    def load(self, data, partition_id):
        return data.shard(self.count, partition_id)


class DirichletPartitioner(IidPartitioner):
    def __init__(self, num_partitions, partition_by, alpha, seed=42, **_):
        super().__init__(num_partitions)
        self.by, self.alpha, self.seed = partition_by, alpha, seed

    def load(self, data, partition_id):
        rng, labels = np.random.default_rng(self.seed), np.array(data[self.by])
        parts = [[] for _ in range(self.count)]
        for label in np.unique(labels):
            where = np.flatnonzero(labels == label)
            cuts = (rng.dirichlet([self.alpha] * self.count).cumsum()[:-1] * len(where)).astype(int)
            for part, indices in zip(parts, np.split(where, cuts), strict=True):
                part.extend(indices.tolist())
        return data.select(parts[partition_id])
