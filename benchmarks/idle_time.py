"""How long real learners wait: idle time of paced learners in a deployment on this machine, after the cold start.

    python benchmarks/idle_time.py [--rounds 10] [--quick] [--out FOLDER]

A controller and four learners as processes on loopback: two that take 0.02 s a batch and two that take 0.1 s. Idle is
the time between the journaled arrival of an update and the sending of the next task, as a share of that time and the
time of the tasks; rounds before the first community model (the cold start) do not count.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from _bench import Report, arguments, report
from time_to_accuracy import deploy

from metis.core.events import CommunityPublished
from metis.runs.folds import timeline
from metis.runs.trace import read_trace

PACES = {"lyon": 0.02, "turin": 0.02, "oslo": 0.1, "porto": 0.1}
POLICIES = {"semisync_fedavg": "policy.slowest_learner_epochs=2", "sync_fedavg": "policy.local_epochs=2"}


def shares(folder: Path) -> list[tuple[str, float, float, float]]:
    """Learner, seconds from the cold start to the end, and the shares of idle and transfer time in them."""
    events = list(read_trace(folder / "state" / "run" / "events.jsonl"))
    begin = next(at for at, item in events if isinstance(item, CommunityPublished))
    end = max(at for at, item in events if isinstance(item, CommunityPublished))
    rows = []
    for name in PACES:
        spans = [
            (span.kind, min(span.end, end) - max(span.start, begin))
            for span in timeline(events)
            if span.learner == name and span.end > begin and span.start < end
        ]
        total = sum(length for _, length in spans)
        idle, transfer = (sum(length for kind, length in spans if kind == k) / total for k in ("idle", "transfer"))
        rows.append((name, total, idle, transfer))
    return rows


def measure(sheet: Report, policies: list[str], rounds: int) -> None:
    table: list[list[Any]] = [["policy, learner", "pace, s", "measured, s", "idle", "transfer and overhead"]]
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder:
            deploy(Path(folder), [f"policy.name={policy}", POLICIES[policy], f"stop.rounds={rounds}"], PACES, 600)
            found = shares(Path(folder))
        for learner, total, idle, transfer in found:
            table.append([f"{policy}, {learner}", PACES[learner], total, f"{idle:.1%}", f"{transfer:.1%}"])
        sheet.figures[policy] = found
    sheet.table(table)
    worst = max(idle for _, _, idle, _ in sheet.figures["semisync_fedavg"])
    sheet.goal("idle time of SemiSync's learners in a real deployment", "under 5 %", f"{worst:.1%}", worst < 0.05)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, list(POLICIES)[: 1 if options.quick else None], 2 if options.quick else options.rounds)


if __name__ == "__main__":
    main()
