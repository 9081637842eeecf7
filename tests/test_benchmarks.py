"""Benchmarks are listed and pinned; `make bench ARGS=--quick` runs them, tiny, and checks what they measured."""

from __future__ import annotations

import re
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


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
