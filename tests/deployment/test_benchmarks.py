"""The deployment benchmarks run, at a tiny size, and tell what they promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def figures_of(name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--json", str(folder / "figures")]
    environment = {**os.environ, "TMPDIR": str(folder)}  # certificates too are made anew
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "figures").read_text("utf-8"))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wire", "controller_memory", "load", "soak"])
def test_a_quick_benchmark_measures_what_it_says(name: str, tmp_path: Path) -> None:
    """Real processes, a real wire; figures are there and nothing has failed. How large they are is not asked."""
    figures = figures_of(name, tmp_path)
    match name:
        case "wire":
            assert len(figures["transfers"]) == len(figures["latency"]) == 4
            assert all(ways["of_raw_memory"] > 0 and ways["of_raw_file"] > 0 for ways in figures["transfers"].values())
        case "controller_memory":
            assert figures["rounds"] and all(row["rss"] > 0 for row in figures["rounds"])
        case "load":
            for time in ("first", "second"):
                assert figures[time]["joined"] == figures[time]["handed_in"] == 12
                assert not figures[time]["failures"]
        case "soak":
            assert figures["samples"][-1]["round"] > 40
            assert figures["samples"][-1]["threads"] <= figures["samples"][20]["threads"] + 2
