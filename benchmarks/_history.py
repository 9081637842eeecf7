"""Which part of each goal was reached in earlier runs of all benchmarks: history.json, drawn as figures/history.svg."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from _bench import HERE, ROOT

HISTORY = HERE / "history.json"
PICTURE = HERE / "figures" / "history.svg"


def add(results: list[dict[str, Any]]) -> None:
    """Append what these benchmarks measured."""
    reached = {goal["what"]: goal["of_goal"] for result in results for goal in result["goals"] if goal.get("of_goal")}
    if not reached:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    entry = {
        "date": results[-1]["date"],
        "version": commit.stdout.strip() or "?",
        "load": max(result["load_before"] for result in results),
        "of_goal": {what: round(value, 4) for what, value in reached.items()},
    }
    HISTORY.write_text(json.dumps([*read(), entry], indent=1) + "\n", "utf-8")


def read() -> list[dict[str, Any]]:
    return json.loads(HISTORY.read_text("utf-8")) if HISTORY.exists() else []


def draw(picture: Path = PICTURE) -> None:
    """A line for each goal over the runs; above 1 it is met."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "metis"  # the same figures, the same file
    from matplotlib import pyplot

    entries = read()
    names = sorted({what for entry in entries for what in entry["of_goal"]})
    figure, axes = pyplot.subplots(figsize=(9.0, 0.28 * len(names) + 2.2), layout="constrained")
    for number, what in enumerate(names):
        places = [place for place, entry in enumerate(entries) if what in entry["of_goal"]]
        axes.plot(
            places, [entries[place]["of_goal"][what] for place in places], color=f"C{number % 10}", label=what,
            marker="osD^v"[number // 10], linestyle=("-", "--", ":")[number // 10 % 3],
        )  # fmt: skip
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(yscale="log", ylabel="part of the goal that was reached (1: met)")
    axes.set_xticks(range(len(entries)), [f"{entry['date'][:16]}\n{entry['version']}" for entry in entries], fontsize=8)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)
