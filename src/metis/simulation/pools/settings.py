"""The settings of a pool: where learners train and with how many workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from metis.errors import ConfigError

Kind: TypeAlias = Literal["inline", "processes", "ray"]


@dataclass(frozen=True)
class PoolSettings:
    """Where learners train; only `batched` changes the result, and that in the last bits."""

    kind: Kind | None = None  # None: in this process for 0 workers, else in worker processes
    workers: int = 0
    threads: int = 1  # of torch, of each worker
    ray_address: str | None = None  # of a running cluster; else RAY_ADDRESS, else one is started on this machine
    gpus_per_learner: float = 0.0  # of a worker on Ray

    batched: int = 1  # maximum number of small learners that are trained as one computation

    def __post_init__(self) -> None:
        if self.batched < 1:
            raise ConfigError(f"batched is {self.batched}; it must be at least 1, which trains each learner alone")
        kind = self.kind or ("processes" if self.workers else "inline")
        if kind not in get_args(Kind):
            raise ConfigError(f"pool is '{kind}'; allowed: {', '.join(get_args(Kind))}")
        object.__setattr__(self, "kind", kind)
        if kind == "inline" and self.workers:
            raise ConfigError(f"the pool 'inline' has no workers, but {self.workers} are asked for; use 'processes'")
        if kind == "processes" and self.threads != 1:
            # More would not give the same bits as one, and OpenMP's threads do not survive a fork.
            raise ConfigError("worker processes train with one torch thread each: set threads to 1, or workers to 0")
        if not 0 <= self.gpus_per_learner < math.inf:
            raise ConfigError(f"gpus_per_learner is {self.gpus_per_learner}; it must be 0 or more")
        for name in ("ray_address", "gpus_per_learner"):
            if getattr(self, name) and kind != "ray":
                raise ConfigError(f"{name} is for the pool 'ray', but the pool is '{kind}'")
