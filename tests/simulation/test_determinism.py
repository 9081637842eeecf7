"""The same seed gives the same bits: for any number of workers, any hash seed and either store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import metis
from metis.core.events import LearnerLeft, UpdateRequest
from simulation.federations import POLICIES, fingerprint, lively, simulate_lively

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=POLICIES)
def inline(request: pytest.FixtureRequest) -> tuple[str, metis.Run]:
    return request.param, simulate_lively(request.param)


def test_the_federation_of_these_tests_is_lively(inline: tuple[str, metis.Run]) -> None:
    """Otherwise equal bits would mean little: updates are made, somebody leaves, and the weights move."""
    _, run = inline

    kinds = [type(item) for _, item in run.events]
    assert kinds.count(UpdateRequest) > 10
    assert LearnerLeft in kinds
    assert run.rounds >= 3
    assert run.community_model.sha256() != lively().initial_model.sha256()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_same_bits_for_any_number_of_workers(inline: tuple[str, metis.Run], workers: int) -> None:
    """Worker processes finish in any order; nothing of that is seen in the run."""
    policy, run = inline

    assert fingerprint(simulate_lively(policy, workers=workers)) == fingerprint(run)


def test_same_bits_on_the_disk_store(inline: tuple[str, metis.Run], tmp_path: Path) -> None:
    """Models in files are mixed to the same bits as models in memory."""
    policy, run = inline

    assert fingerprint(simulate_lively(policy, store="disk", out=tmp_path)) == fingerprint(run)


def test_same_bits_on_the_disk_store_with_workers(tmp_path: Path) -> None:
    """Models that are mapped from files cross to worker processes whole."""
    run = simulate_lively("fedrec", store="disk", out=tmp_path, workers=2)

    assert fingerprint(run) == fingerprint(simulate_lively("fedrec"))


def test_another_seed_gives_other_bits() -> None:
    """The seed reaches the initial model, the batches and the speeds."""
    one, other = (lively(seed=seed).simulate(metis.fedrec(1), update_requests=10) for seed in (1990, 1991))

    assert one.community_model.sha256() != other.community_model.sha256()
    assert [at for at, _ in one.events] != [at for at, _ in other.events]


def test_watching_writing_and_targets_change_nothing(tmp_path: Path) -> None:
    """What only looks at a run does not take part in it."""
    plain = simulate_lively("fedrec")
    seen = []

    watched = simulate_lively(
        "fedrec", out=tmp_path, target=0.1, checkpoint_every=0.0, watch=lambda fold: seen.append(fold.now)
    )

    assert fingerprint(watched) == fingerprint(plain)
    assert seen == sorted(seen)
    assert len(seen) > 10


SHAS = """
import json
from simulation.federations import POLICIES, simulate_lively
runs = {name: simulate_lively(name, seconds=2, workers=number % 2) for number, name in enumerate(POLICIES)}
print(json.dumps({name: run.community_model.sha256() for name, run in runs.items()}))
"""


def test_same_bits_for_any_hash_seed() -> None:
    """No order of a set or dict of strings reaches the weights."""

    def start(hash_seed: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(TESTS), *sys.path])
        return subprocess.Popen(
            [sys.executable, "-c", SHAS],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )

    shas = []
    for process in [start("0"), start("1")]:
        with process:
            assert process.stdout is not None
            shas.append(json.loads(process.stdout.read()))

    assert shas[0] == shas[1]
    assert shas[0]["fedrec"] == simulate_lively("fedrec", seconds=2).community_model.sha256()
