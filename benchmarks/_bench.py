"""What all benchmarks share: their options, the clock, and a report as tables, JSON and figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from metis.errors import MetisError

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
QUICK_RESULTS = ROOT / ".cache" / "benchmarks" / "quick"
SPENT_BYTES = 6e9  # of memory, at most, in any benchmark


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny one in seconds, to see that it works")
    parser.add_argument("--no-peers", action="store_true", help="leave other systems out")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"default: {RESULTS.relative_to(ROOT)}; "
        f"with --quick {QUICK_RESULTS.relative_to(ROOT)}",
    )  # fmt: skip
    return parser


class Report:
    """Collects what a benchmark has to say, prints it as it comes, and writes NAME.md and NAME.json at the end."""

    def __init__(self, options: argparse.Namespace, description: str | None) -> None:
        self.name = Path(sys.argv[0]).stem
        self.folder: Path = options.out or (QUICK_RESULTS if options.quick else RESULTS)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.title = (description or self.name).strip().splitlines()[0].rstrip(".")
        self.figures: dict[str, Any] = {}  # whatever is worth keeping: goes to the JSON file
        self._goals: list[dict[str, Any]] = []
        self._parts: list[str] = []
        self._began, self._load = time.monotonic(), os.getloadavg()[0]

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._parts.append(text)

    def table(self, rows: Sequence[Sequence[Any]]) -> None:
        """The first row is the head."""
        print(aligned(rows), flush=True)
        self._parts.append(markdown(rows))

    def goal(self, what: str, goal: str, measured: str, met: bool, of_goal: float | None = None) -> None:
        """A figure that has a goal; all of them stand at the head of RESULTS.md.

        `of_goal` is which part of the goal was reached, 1 and more if it is met: that is drawn over time.
        """
        self._goals.append({"what": what, "goal": goal, "measured": measured, "met": met, "of_goal": of_goal})
        print(f"{what}: {measured} (goal: {goal}; {'met' if met else 'not met'})", flush=True)

    def chart(self, name: str, draw: Callable[[Any], None], caption: str) -> None:
        """A small SVG beside the results; `draw` gets the axes."""
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "metis"  # the same figures, the same file
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
        draw(axes)
        axes.grid(alpha=0.3)
        folder = HERE / "figures" if self.folder == RESULTS else self.folder / "figures"
        folder.mkdir(exist_ok=True)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
        self._parts.append(f"![{caption}](figures/{name}.svg)")

    def write(self) -> None:
        content = {
            "name": self.name,
            "title": self.title,
            "command": " ".join(["python", f"benchmarks/{self.name}.py", *map(_quoted, _settings(sys.argv[1:]))]),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - self._began, 1),
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "niceness": os.nice(0),
            "machine": machine(),
            "goals": self._goals,
            "figures": self.figures,
        }
        text = "\n\n".join(self._parts)
        (self.folder / f"{self.name}.md").write_text(text + "\n", "utf-8")
        (self.folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")


def _settings(words: list[str]) -> list[str]:
    """Without the folder of the results, which is one of this machine."""
    return [word for word, before in zip(words, ["", *words], strict=False) if "--out" not in (word, before)]


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


@contextmanager
def report(options: argparse.Namespace, description: str | None) -> Iterator[Report]:
    """Written also if the benchmark breaks off: what was measured is kept, and what went wrong is said."""
    made = Report(options, description)
    try:
        yield made
    except MetisError as problem:
        if not made.figures:  # such as a data set that is not here: what an earlier run has found stays
            raise SystemExit(f"{made.name}: {problem}") from None
        made.say(f"**Broken off:** {problem}")
        made.write()
        raise SystemExit(2) from None
    except BaseException as problem:
        made.say(f"**Broken off:** {type(problem).__name__}: {problem}")
        made.write()
        raise
    made.write()


def machine() -> dict[str, str]:
    """What the figures depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text("utf-8"))
    versions = {}
    for package in ("torch", "numpy", "grpcio", "ray"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": f"{cpu.group(1) if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{int(memory.group(1)) / 2**20:.0f} GiB" if memory else "?",
        "system": platform.platform(),
        "python": platform.python_version(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        **versions,
    }


# --- the clock ----------------------------------------------------------------------------------


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def best(work: Callable[[], Any], repeats: int = 5, least: float = 0.0) -> float:
    """The shortest time of a call after one that warms up: load from outside can only add.

    Goes on beyond `repeats` until `least` seconds have been spent.
    """
    work()
    times: list[float] = []
    while len(times) < repeats or sum(times) < least:
        times.append(seconds_of(work))
    return min(times)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


# --- tables -------------------------------------------------------------------------------------


def _texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    return [[_text(cell) for cell in row] for row in rows]


def _text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def aligned(rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as they must be; the first to the left, the others to the right."""
    texts = _texts(rows)
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in texts
    )


def markdown(rows: Sequence[Sequence[Any]]) -> str:
    head, *rest = ("| " + " | ".join(row) + " |" for row in _texts(rows))
    return "\n".join([head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *rest])
