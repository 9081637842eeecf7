"""Write the tables of docs/reliability.md from what was played: `python tests/system/tables.py`.

`seeds-run.json` lists runs of many seeds; `bugs-found.json`, which `run.py --bug all --results FILE` writes, the
planted bugs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from system.bugs import BUGS  # noqa: E402

PAGE = HERE.parent.parent / "docs" / "reliability.md"
SEEDS, FOUND = HERE / "seeds-run.json", HERE / "bugs-found.json"


def seeds_table(runs: list[dict[str, Any]]) -> str:
    """Runs of many seeds, in order."""
    rows = [
        f"| {run['date']} | {run['seeds']:,} | {run['hours']:g} | {_speed(run)} | {run['failed']} | {run['note']} |"
        for run in runs
    ]
    seeds, hours = sum(run["seeds"] for run in runs), sum(run["hours"] for run in runs)
    head = ["| date | seeds | hours | a minute | failed | |", "|---|---:|---:|---:|---:|---|"]
    return "\n".join([*head, *rows, f"| all | {seeds:,} | {hours:.3g} | | {sum(run['failed'] for run in runs)} | |"])


def _speed(run: dict[str, Any]) -> str:
    return f"{run['seeds'] / run['hours'] / 60:.0f}"


def bugs_table(found: dict[str, Any]) -> str:
    """Every planted bug: where, within how many seeds it was found, and what noticed it."""
    rows = ["| planted bug | in | seeds | noticed by |", "|---|---|---:|---|"]
    for name, bug in BUGS.items():
        result = found.get(name, {"found": False, "seeds": 0, "checker": ""})
        seeds = f"{result['seeds']:,}" if result["found"] else f"**not in {result['seeds']:,}**"
        rows.append(f"| {name} | `{bug.module.removeprefix('metis.')}` | {seeds} | {result['checker']} |")
    count = sum(name in found and found[name]["found"] for name in BUGS)
    return "\n".join([f"{count} of {len(BUGS)} were found:", "", *rows])


def filled(page: str) -> str:
    """The page with its tables between their marks."""
    tables = {
        "seeds": seeds_table(json.loads(SEEDS.read_text("utf-8"))),
        "bugs": bugs_table(json.loads(FOUND.read_text("utf-8"))),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by tests/system/tables.py -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
