"""The benchmarks run, at a tiny size and without other systems, and tell what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def result_of(name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--no-peers", "--out", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}  # certificates too are made anew
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (folder / f"{name}.md").read_text("utf-8").count("|---") >= 2
    return json.loads((folder / f"{name}.json").read_text("utf-8"))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wire", "wire_learners", "controller_memory", "load", "soak"])
def test_a_quick_benchmark_of_the_wire_measures_what_it_says(name: str, tmp_path: Path) -> None:
    """Real processes, a real wire; figures are there and nothing has failed. How large they are is not asked."""
    figures = result_of(name, tmp_path)["figures"]
    match name:
        case "wire":
            assert len(figures["transfers"]) == len(figures["latency"]) == 4
            assert all(ways["of_raw_memory"] > 0 and ways["of_raw_file"] > 0 for ways in figures["transfers"].values())
            assert all(figures["bare"][name] > 0 for name in ("plain", "mTLS"))
        case "wire_learners":
            assert all(seconds > 0 for values in figures.values() for seconds in values.values())
        case "controller_memory":
            (size,) = figures["sizes"].values()
            assert size["rounds"] and all(row["rss"] > 0 for row in size["rounds"])
        case "load":
            for time in ("first", "second"):
                assert figures[time]["joined"] == figures[time]["handed_in"] == 12
                assert not figures[time]["failures"]
        case "soak":
            assert figures["samples"][-1]["round"] > 40
            assert figures["samples"][-1]["threads"] <= figures["samples"][20]["threads"] + 2


@pytest.mark.slow
def test_quick_benchmarks_of_the_core_measure_what_they_say(tmp_path: Path) -> None:
    mixing = result_of("mixing", tmp_path)
    assert all(speed > 0 for speed in mixing["figures"]["metis"].values())
    assert [goal["what"] for goal in mixing["goals"]]

    cached = result_of("cached_update", tmp_path)["figures"]
    assert 0 < cached["drift"] < 1e-12  # float64 does round, but not far


@pytest.mark.slow
def test_quick_benchmarks_of_the_simulator_measure_what_they_say(tmp_path: Path) -> None:
    found = result_of("simulator_peers", tmp_path)["figures"]["round_seconds"]
    assert set(found["small 4"]) == {"Metis, 2 workers", "Metis, in-process", "Metis, together"}
    assert set(found["medium 2"]) == {"Metis, 2 workers", "Metis, in-process"}

    result = result_of("round_overhead", tmp_path)
    assert all(seconds > 0 for seconds in result["figures"]["round_seconds"].values())
    assert result["load_before"] >= 0 and result["machine"]["torch"]


def test_every_benchmark_is_in_the_list_and_in_the_readme() -> None:
    """A file that `make bench` does not know would rot; one that nobody explains cannot be read."""
    listed = re.search(r"BENCHMARKS = \((.*?)\)", (BENCHMARKS / "__main__.py").read_text("utf-8"), re.DOTALL)
    assert listed is not None
    files = {path.stem for path in BENCHMARKS.glob("[!_]*.py")}
    assert files == set(re.findall(r'"(\w+)"', listed.group(1)))
    readme = (BENCHMARKS / "README.md").read_text("utf-8")
    assert [name for name in sorted(files) if f"`{name}" not in readme] == []


def test_peers_are_pinned() -> None:
    """A comparison with "the newest" could not be repeated, and one with another torch would not be fair."""
    constraints = (BENCHMARKS.parent / "constraints.txt").read_text("utf-8").splitlines()
    torch = next(line for line in constraints if line.startswith("torch=="))
    for path in (BENCHMARKS / "peers").glob("*.txt"):
        lines = path.read_text("utf-8").split()
        assert all("==" in line for line in lines), path.name
        assert path.stem == "fedjax" or torch in lines, path.name
