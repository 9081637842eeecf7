"""A federation from the name of a data set, as a file would describe it: `Federation.from_dataset`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from metis.core.solvers import MomentumSGD, Solver
from metis.data.datasets import load_dataset
from metis.errors import ArgumentError, ConfigError
from metis.experiments.build import build_federation
from metis.experiments.config.load import resolve_config, task_of
from metis.learning import TorchEngine
from metis.text import plural

if TYPE_CHECKING:
    from metis.experiments.federation import Federation


def named_federation(
    dataset: str,
    *,
    learners: int | None,
    sizes: str | Sequence[int],
    speeds: Sequence[float] | float,
    batch_size: int,
    network: str | Callable[[], Any],
    network_options: Mapping[str, Any] | None,
    solver: Solver | None,
    seed: int,
    train_examples: int | None,
    test_examples: int | None,
    validation: float | None,
    own_tests: bool,
    **partition: Any,
) -> Federation:
    """The federation; the arguments are those of `Federation.from_dataset`."""
    speeds = [speeds] if isinstance(speeds, (int, float)) else speeds
    if not speeds or not all(isinstance(seconds, Real) for seconds in speeds):
        raise ArgumentError(f"speeds is {speeds!r}; give the seconds that a batch takes, as in [0.03, 0.3]", "speeds")
    listed = None if isinstance(sizes, str) else list(sizes)
    if learners is None:
        silos = set(load_dataset(dataset).silos) if sizes == "natural" else ()
        learners = len(listed or silos) or 10
    if type(learners) is not int or learners < 1:
        raise ArgumentError(f"learners is {learners!r}; it must be a whole number, 1 or more", "learners")
    if len(speeds) > learners:
        raise ArgumentError(f"speeds has {len(speeds)} entries, but there are {plural(learners, 'learner')}", "speeds")
    named = isinstance(network, str)
    if not isinstance(network, str) and not callable(network):
        raise ArgumentError(f"network is {network!r}; give a name, or a function that makes a torch module", "network")
    if network_options and not named:
        raise ArgumentError("network_options are for a network by name, but network is a function", "network_options")
    content = {
        "seed": seed,
        "data": {
            "dataset": dataset,
            "train_examples": train_examples,
            "test_examples": test_examples,
            "validation": validation,
        },
        "partition": {
            "sizes": "explicit" if listed else sizes,
            "explicit": listed,
            "test": "own" if own_tests else "shared",
            **partition,
        },
        "learners": _groups(learners, list(speeds), batch_size, named=sizes != "natural"),
        "network": {"name": network, **(network_options or {})} if named else {"name": "logistic"},
        "policy": {"name": "sync_fedavg"},
        "stop": {"rounds": 1},
    }
    try:
        config = resolve_config(_given(content), "from_dataset")
        federation = build_federation(config, solver=solver or MomentumSGD(learning_rate=0.05, momentum=0.75))
    except ConfigError as problem:
        raise ConfigError(str(problem).removeprefix("from_dataset: ").removeprefix(": ")) from None
    if not isinstance(network, str):
        federation.engine = TorchEngine(network, task_of(config))
        federation.facts["network"] = "the user's"
    return federation


def _groups(learners: int, speeds: list[float], batch_size: int, *, named: bool) -> list[dict[str, Any]]:
    """One group for each speed; the learners take the speeds in turn."""
    groups = []
    for index, seconds in enumerate(speeds):
        names = [f"site-{number + 1}" for number in range(index, learners, len(speeds))]
        group = {"name": f"speed-{index + 1}", "batch_size": batch_size, "time_per_batch": float(seconds)}
        groups.append(group | ({"names": names} if named else {"count": len(names)}))
    return groups


def _given(value: Any) -> Any:
    """Without what is None."""
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return value
