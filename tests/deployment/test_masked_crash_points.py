"""A controller or a learner of masked rounds or windows that is killed at some system call, with real processes.

`python tests/deployment/masked_crash_points.py --all` tries every one, with `--windows` those of windows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grpc")

from deployment import masked
from deployment.crash_points import strace_problem
from deployment.masked_crash_points import NAMES, ROUNDS, VICTIM, WINDOWS, all_points, prepared, run, strike

needs_strace = pytest.mark.skipif((_problem := strace_problem()) is not None, reason=str(_problem))


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("policy", [ROUNDS, WINDOWS])
@pytest.mark.parametrize("who", ["controller", "learner"])
def test_killed_at_any_call_the_rounds_end_with_the_same_bits(who: str, policy: str, tmp_path: Path) -> None:
    """Also while the sum is being opened; nothing is lost, signed twice, answered twice or masked twice."""
    points = all_points(tmp_path, who, policy)
    assert len(points) > 100
    chosen = [points[len(points) * share // 100] for share in (40, 70)]  # which thread makes the n-th call may differ
    results = [strike(tmp_path, point) for point in chosen]
    assert [result.problem for result in results] == ["", ""]
    assert any(result.struck for result in results) and all(result.acknowledged for result in results)


def test_a_learner_that_trains_otherwise_after_its_restart_still_sends_one_body(tmp_path: Path) -> None:
    """The crash comes between masking and handing in; the second training would have another model."""
    home = prepared(tmp_path, "home")
    federation, problem = run(home, None, "learner", fresh=True, killed="1")
    assert problem == "" and federation.struck
    mine = {key: digests for key, digests in federation.said.uploads.items() if key[1] == VICTIM}
    assert len(mine) == masked.ROUNDS and all(len(digests) == 1 for digests in mine.values())
    assert {name for _, name in federation.said.uploads} == set(NAMES)
