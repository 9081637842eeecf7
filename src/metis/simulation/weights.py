"""The weights of a simulation for its checkpoint: the numbers that a replay of the events cannot bring back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metis.core.mixing import ModelStore
from metis.core.model import Model
from metis.simulation.pools.local import Pool
from metis.simulation.simulator import Measurement, Simulator


def weights_of(simulator: Simulator) -> dict[str, NDArray[Any]]:
    """Community, base models of open tasks and the learners' memories, by name."""
    community = simulator.controller.community
    arrays: dict[str, NDArray[Any]] = {
        "model": community.model.vector,
        "counters": community.model.counters,
        **{f"community/{name}": array for name, array in community.arrays().items()},
        **{f"base/{version}": np.array(fetch().vector) for version, fetch in simulator._base_models.items()},
    }
    if simulator.best_model is not None:
        arrays["best"] = simulator.best_model.vector
    for index, memory in simulator._memories.items():
        arrays |= {f"memory/{index}/{name}": array for name, array in memory.items()}
    return arrays


def restore_weights(
    simulator: Simulator, initial_model: Model, arrays: Mapping[str, NDArray[Any]], pool: Pool, store: ModelStore
) -> None:
    """After a replay without weights: put the weights back and let the open tasks really train."""

    def model(vector: NDArray[Any]) -> Model:
        return Model(initial_model.layout, vector, arrays["counters"])

    def below(prefix: str) -> dict[str, NDArray[Any]]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    simulator._pool = pool
    simulator.controller.store = store
    simulator.controller.community.load_arrays(model(arrays["model"]), below("community/"), store)
    simulator.best_model = model(arrays["best"]) if "best" in arrays else None
    bases = {int(version): model(vector) for version, vector in below("base/").items()}
    simulator._base_models = {version: simulator._keep(version, base) for version, base in bases.items()}
    for index in range(len(simulator._machines)):
        if memory := below(f"memory/{index}/"):
            simulator._memories[index] = memory
    dues = {id(occurrence): at for at, occurrence in simulator._agenda}
    for arrival in simulator._open.values():
        if simulator.controller.community.uses_base:
            simulator.controller.roster[simulator._machines[arrival.learner].name].base_model = bases[arrival.version]
        arrival.ticket = pool.train(
            dues.get(id(arrival), math.inf),  # or over a line that stays cut
            arrival.learner,
            simulator._base_models[arrival.version],
            arrival.task,
            arrival.spent.steps,
            simulator._memories.get(arrival.learner),
            arrival.rate,
            arrival.batches_per_step,
        )
    for at, occurrence in simulator._agenda:
        if isinstance(occurrence, Measurement):  # it comes first, so it is of the latest model
            occurrence.model = simulator.controller.community.model
            occurrence.ticket = pool.evaluate(at, occurrence.model, simulator._kept())
