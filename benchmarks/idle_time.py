"""How long real learners wait: idle time of paced learners in a deployment on this machine, after the cold start.

    python benchmarks/idle_time.py [--policy semisync_fedavg|sync_fedavg] [--rounds 10]

A controller and four learners as processes on loopback: two that take 0.02 s a batch and two that take 0.1 s. Idle is
the time between the journaled arrival of an update and the sending of the next task, as a share of that time and the
time of the tasks; rounds before the first community model (the cold start) do not count.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from metis.core.events import CommunityPublished
from metis.runs import timeline
from metis.trace import read_trace

PACES = {"lyon": 0.02, "turin": 0.02, "oslo": 0.1, "porto": 0.1}
METIS = [sys.executable, "-m", "metis.cli"]
EXAMPLE = Path(__file__).parent.parent / "examples" / "deployment.toml"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def deploy(folder: Path, policy: str, rounds: int) -> None:
    """One federation from start to end; raises if a process fails."""
    port, logs = free_port(), (folder / "log").open("ab")
    length = "slowest_learner_epochs=2" if policy == "semisync_fedavg" else "local_epochs=2"
    changes = [f"policy.name={policy}", f"policy.{length}", f"stop.rounds={rounds}"]
    text = EXAMPLE.read_text("utf-8").replace("slowest_learner_epochs = 1      # lambda\n", "")
    file = folder / "federation.toml"
    file.write_text(text, "utf-8")
    controller = subprocess.Popen(
        [*METIS, "controller", file, "--state", folder / "state", "--insecure", "--listen", f"127.0.0.1:{port}"]
        + ["--http", ""] + [word for change in changes for word in ("--set", change)],
        stdout=logs, stderr=logs,
    )  # fmt: skip
    learners = [
        subprocess.Popen(
            [*METIS, "learner", "--controller", f"127.0.0.1:{port}", "--insecure", "--name", name,
             "--work", folder / name, "--pace", str(pace)],
            stdout=logs, stderr=logs,
        )
        for name, pace in PACES.items()
    ]  # fmt: skip
    try:
        codes = [process.wait(600) for process in (controller, *learners)]
        if any(codes):
            sys.exit((folder / "log").read_text("utf-8")[-2000:])
    finally:
        for process in (controller, *learners):
            process.kill()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="semisync_fedavg", choices=["semisync_fedavg", "sync_fedavg"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        deploy(Path(name), options.policy, options.rounds)
        print(f"{options.policy}, {options.rounds} rounds, {time.monotonic() - began:.0f} s in all\n")
        print(f"| learner | pace (s) | after the cold start (s) | idle | transfer and overhead |\n{'|---' * 5}|")
        for learner, total, idle, transfer in shares(Path(name)):
            print(f"| {learner} | {PACES[learner]} | {total:.1f} | {idle:.1%} | {transfer:.1%} |")


if __name__ == "__main__":
    main()
