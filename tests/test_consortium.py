"""The consortium example: in virtual time, and with processes over lines that are cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "consortium"


def example(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *words],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_run_completes_in_virtual_time(tmp_path: Path) -> None:
    """Cut lines make some updates late; no run ends before its rounds, and idle time stays under 5 %."""
    example("virtual.py", "--seeds", "5", "--out", str(tmp_path / "results.json"))
    results = [json.loads(line) for line in (tmp_path / "results.json").read_text().splitlines()]
    assert [result["rounds"] for result in results] == [20, 20, 40] * 5
    waiting, semi = results[::3], results[1::3]
    assert all(result["cuts"] > 10 for result in (*waiting, *semi))
    assert all(result["idle"] < 0.05 for result in semi)
    assert all(result["idle"] > 0.7 for result in waiting)
    assert all(3 * fast["seconds"] < slow["seconds"] for fast, slow in zip(semi, waiting, strict=True))


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.json", "two.json")]
    for file in files:
        example("virtual.py", "--seeds", "2", "--rounds", "3", "--out", str(file))
    assert files[0].read_text() == files[1].read_text()


@pytest.mark.slow
def test_processes_complete_over_lines_that_are_cut(tmp_path: Path) -> None:
    """Real processes with certificates: no update that a learner was told is safe is lost or counted twice."""
    shown = example("processes.py", str(tmp_path), "--small", "--rounds", "6", "--policy", "semisync_fedavg")
    (result,) = [json.loads(line) for line in (tmp_path / "results.json").read_text().splitlines()]
    assert (result["rounds"], result["lost"], result["doubled"]) == (6, 0, 0)
    assert result["acknowledged"] >= 6
    assert "| SemiSync, λ = 0.3 | 1 of 1 |" in shown
    assert (tmp_path / "timelines.svg").exists()
    again = example(
        "processes.py", str(tmp_path), "--small", "--rounds", "6", "--policy", "semisync_fedavg", "--resume"
    )
    assert "| SemiSync, λ = 0.3 | 1 of 1 |" in again and "seed 1" not in again
