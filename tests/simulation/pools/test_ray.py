"""Learners on Ray: the same bits, whatever worker or node is lost; models put into the object store once a version."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import metis
from metis.core.model import Model
from metis.errors import ConfigError, DataError, InternalError
from metis.learning import ArrayExamples, TorchEngine
from metis.simulation.pools.settings import PoolSettings
from simulation.federations import POLICIES, blobs, fingerprint, lively, simulate_lively
from simulation.pools.test_batched import federation as small


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, before anything is trained."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "metis.simulation.pools.ray", raising=False)

    with pytest.raises(ConfigError, match=r"the pool 'ray' needs the package ray; .*: pip install '\.\[ray\]'"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, pool="ray")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"pool": "dask"}, "pool is 'dask'; allowed: inline, processes, ray"),
        ({"pool": "inline", "workers": 2}, "the pool 'inline' has no workers, but 2 are asked for"),
        ({"workers": 2, "gpus_per_learner": 1.0}, "gpus_per_learner is for the pool 'ray', but"),
        ({"ray_address": "auto"}, "ray_address is for the pool 'ray', but the pool is 'inline'"),
        ({"pool": "ray", "gpus_per_learner": -1.0}, "gpus_per_learner is -1.0; it must be 0 or more"),
    ],
)  # fmt: skip
def test_places_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    """By the name of what does not fit."""
    with pytest.raises(ConfigError, match=sentence):
        lively().simulate(metis.sync_fedavg(1), rounds=1, **options)


def test_which_pool_it_is_follows_from_the_workers() -> None:
    """Unless it is named."""
    assert [PoolSettings().kind, PoolSettings(workers=2).kind, PoolSettings("ray", 2).kind] == [
        "inline",
        "processes",
        "ray",
    ]


# --- on a cluster of this machine -------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """The package; whatever cluster the tests have started ends with them."""
    if "METIS_TEST_RAY" not in os.environ:
        pytest.skip("starts clusters, which takes minutes: make test-ray")
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


class Watched:
    """The pools that a run makes, and the processes of their workers."""

    def __init__(self, ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from metis.simulation.pools import ray as ray_pool

        self.pools: list[Any] = []
        watched = self

        class Pool(ray_pool.RayPool):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                watched.pools.append(self)

        self._ray = ray
        monkeypatch.setattr(ray_pool, "RayPool", Pool)

    def processes(self) -> list[int]:
        """Of the workers that are alive; waits for what they are doing."""
        alive = []
        for actor in list(self.pools[-1]._actors.values()):
            with suppress(self._ray.exceptions.RayActorError):  # it is replaced when there is work for it
                alive.append(int(self._ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))))
        return alive


@pytest.fixture
def watched(ray: Any, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(ray, monkeypatch)


@pytest.fixture(scope="module")
def in_processes() -> dict[str, Any]:
    """What worker processes make of every policy; they are forked before Ray is there."""
    return {policy: fingerprint(simulate_lively(policy, seconds=4, workers=2)) for policy in POLICIES}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_same_bits_inline_in_processes_and_on_ray(in_processes: dict[str, Any], ray: Any, policy: str) -> None:
    """Every policy, every kind of learner: the sequence of events and every weight."""
    on_ray = fingerprint(simulate_lively(policy, seconds=4, pool="ray", workers=2))

    assert on_ray == fingerprint(simulate_lively(policy, seconds=4))
    assert on_ray == in_processes[policy]


def test_small_learners_that_train_together_on_ray(ray: Any) -> None:
    """As one computation in one worker, to the same bits as here."""
    here, there = (
        fingerprint(small().simulate(metis.sync_fedavg(local_epochs=2), rounds=2, batched=3, **options))
        for options in ({}, {"pool": "ray", "workers": 2})
    )
    assert here == there


def test_worker_processes_after_ray(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork while Ray's threads run would hang: our own cluster is shut down first, the program's is an error."""
    from metis.simulation.pools import ray as ray_pool

    on_ray = lively().simulate(metis.sync_fedavg(1), rounds=1, pool="ray", workers=1)
    assert ray.is_initialized()
    monkeypatch.setattr(ray_pool, "_ours", False)
    with pytest.raises(ConfigError, match="where the program uses Ray itself"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, workers=1)

    monkeypatch.setattr(ray_pool, "_ours", True)
    assert fingerprint(lively().simulate(metis.sync_fedavg(1), rounds=1, workers=1)) == fingerprint(on_ray)
    assert not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["sync_fedavg", "fedrec"])
def test_killed_workers_change_nothing(watched: Watched, policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    """kill -9 of a worker's process, in the middle of what it trains ahead: it is trained again, to the same bits."""
    killed: list[int] = []

    def kill_one(fold: Any) -> None:
        if len(killed) < 3 and fold.costs.update_requests >= 2 * (len(killed) + 1):
            for pid in watched.processes()[-1:]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    run = simulate_lively(policy, slow=True, pool="ray", workers=2, watch=kill_one)

    assert len(set(killed)) == 3
    assert capfd.readouterr().out == "", "stdout belongs to the result"
    assert fingerprint(run) == fingerprint(simulate_lively(policy))


def test_a_model_is_put_once_per_version_and_released(
    ray: Any, watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Five learners train on it and it is evaluated: one copy in the object store, until the simulator drops it."""
    put, put_there = [], ray.put

    def counted(what: Any) -> Any:
        put.append(type(what))
        return put_there(what)

    monkeypatch.setattr(ray, "put", counted)

    run = simulate_lively("sync_fedavg", pool="ray", workers=2, store="disk", out=tmp_path)
    again = simulate_lively("sync_fedavg", pool="ray", workers=2)

    assert fingerprint(run) == fingerprint(again)
    tasks = run.costs.models_exchanged - run.costs.update_requests
    assert tasks > 2 * run.rounds
    # From the disk a model is read once for the evaluation and once for the tasks: two functions fetch it.
    assert put.count(Model) <= 2 * (run.rounds + 1) + (again.rounds + 1)
    pool = watched.pools[-1]
    del again
    gc.collect()
    assert len(pool._by_model) <= 1 and len(pool._by_fetch) <= 1


class Bad(ArrayExamples):
    """Examples that raise a given exception in the process that reads them."""

    def __init__(self, problem: Exception | None) -> None:
        super().__init__(*blobs())
        self.problem = problem

    def batch(self, indices: Any) -> Any:
        if self.problem is None:
            os._exit(7)
        raise self.problem


class Unreadable(ArrayExamples):
    """Examples that no other process can make sense of."""

    def __reduce__(self) -> Any:
        return os.strerror, ("not a number",)


@pytest.mark.parametrize(
    ("train", "kind", "sentence"),
    [
        (lambda: Bad(DataError("disk on fire")), DataError, "^disk on fire$"),
        (lambda: Bad(ValueError("not a picture")), ConfigError, "cannot train on its .* ValueError: not a picture"),
        (lambda: Bad(None), InternalError, "task . ended its worker on Ray 5 times"),
        (lambda: Unreadable(*blobs()), ConfigError, "a worker on Ray cannot work: TypeError"),
    ],
)
def test_what_fails_on_ray_is_told_here(ray: Any, train: Any, kind: type[Exception], sentence: str) -> None:
    """As inline; what ends its process each time, or cannot start, is not tried for ever."""
    with pytest.raises(kind, match=sentence):
        lively(train=train()).simulate(metis.sync_fedavg(1), rounds=2, pool="ray", workers=2)


def test_a_node_with_other_versions_is_refused(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch may give other bits, and nobody would notice."""
    from metis.simulation.pools import ray as ray_pool

    ours = ray_pool._versions()
    monkeypatch.setattr(ray_pool, "_versions", lambda: ours | {"torch": "2.5.1"})

    with pytest.raises(ConfigError, match=f"it has .*torch {ours['torch']}, .* here is .*torch 2.5.1"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, pool="ray", workers=1)


def test_gpus_that_are_not_there_are_told(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster has none; a device that the workers would not see is refused as well."""
    with pytest.raises(ConfigError, match=r"the Ray cluster has .* and 0 GPUs; a worker needs 1 and 0\.5"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, pool="ray", gpus_per_learner=0.5)

    monkeypatch.setattr(TorchEngine, "device", "cuda:1")
    with pytest.raises(ConfigError, match="device is 'cuda:1', but a worker on Ray sees only the GPUs"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, pool="ray")


@pytest.mark.slow
def test_a_cluster_that_runs_already_and_loses_a_node(watched: Watched, ray: Any) -> None:
    """Found by its address; when a machine goes, its workers' tasks go to the other one, and the bits are the same."""
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        lost = False

        def lose_a_node(fold: Any) -> None:
            nonlocal lost
            if not lost and fold.costs.update_requests >= 4:
                assert len(set(watched.processes())) == 2
                cluster.remove_node(node, allow_graceful=False)
                lost = True

        run = simulate_lively("fedrec", slow=True, pool="ray", ray_address=cluster.address, watch=lose_a_node)

        assert lost
        assert fingerprint(run) == fingerprint(simulate_lively("fedrec"))
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_cluster_that_is_not_there_is_told(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence with the address."""
    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(ConfigError, match="the Ray cluster at nowhere cannot be used"):
        lively().simulate(metis.sync_fedavg(1), rounds=1, pool="ray")
