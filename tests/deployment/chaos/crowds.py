"""More learners at once than anybody expects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deployment.chaos.harness import HERE, SOURCE, Outcome, Tally

LOAD = HERE.parents[2] / "benchmarks" / "load.py"
STEP = 100  # learners for each time


def row_30(tmp: Path, times: int) -> Outcome:
    """learners by the hundred join at once with mTLS, hand in 1 MB each, and again after a kill of the controller"""
    tally, count = Tally(), STEP * times
    out = tmp / "load.json"
    command = [sys.executable, str(LOAD), "--learners", str(count), "--swarms", "2", "--out", str(tmp)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp)}
    )
    if done.returncode or not out.exists():
        tally.problems.append(f"it ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
        return tally.outcome("all served", "nothing was measured")
    figures = json.loads(out.read_text())["figures"]
    summaries = []
    for when, name in (("first", "at once"), ("second", "after the kill")):
        found = figures[when]
        tally.tried += 2 * count
        tally.check(found["joined"] == count, f"{name}: {found['joined']} of {count} joined")
        tally.check(found["handed_in"] == count, f"{name}: {found['handed_in']} of {count} handed in")
        tally.check(not found["failures"], f"{name}: {found['failures'][:1]}")
        summaries.append(f"{name} join p50 {found['join_p50']:.1f} s, p99 {found['join_p99']:.1f} s")
    memory = (figures["second"]["peak"] - figures["idle"]["rss"]) * 1e3 / count
    return tally.outcome(
        "all are served, both times; 0 failures",
        f"{count} learners, 0 failures; {'; '.join(summaries)}; {memory:.0f} kB a learner at the peak",
    )
