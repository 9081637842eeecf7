"""Play seeds of the whole system: `run.py --seeds 0:1000`, or one of them with its trace: `run.py --seed 7 --trace`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

_BATCH = 25  # seeds in one process: what they leave behind in the interpreter goes with it


def show(seed: int, folder: str, *, trace: bool, picture: Path | None, case: Path | None) -> int:
    """Play one seed, or a case, and say what happened."""
    from system.federation import Fault, play, shrink, signature

    faults = None
    if case is not None:
        content = json.loads(case.read_text(encoding="utf-8"))
        seed, faults = content["seed"], [Fault(**fault) for fault in content["faults"]]
    federation, problem = play(seed, folder, traced=True, faults=faults)
    if trace:
        print("\n".join(federation.lines))
    if picture is not None:
        from system.picture import save_picture

        save_picture(federation, picture)
    print(f"seed {seed}: {federation.policy_name}, {federation.loop.steps} steps, digest {federation.digest}")
    if problem is None:
        return 0
    print(f"VIOLATED: {problem}")
    print("the fewest faults that show it, as a case for tests/system/cases/:")
    left = shrink(seed, folder, signature(problem), federation.faults)
    faults_text = [{"at": round(fault.at, 6), "kind": fault.kind, "number": fault.number} for fault in left]
    print(json.dumps({"found": str(problem), "seed": seed, "faults": faults_text}, indent=1))
    return 1


def _batch(first: int, last: int, folder: str, out: int, bug: str | None) -> None:
    """Play seeds in this process and write what was found; with a bug, until it is found."""
    if bug is not None:
        from system.bugs import plant

        plant(bug)
    from system.federation import play

    reached: Counter[str] = Counter()
    found: dict[int, str] = {}
    for seed in range(first, last):
        federation, problem = play(seed, folder)
        reached.update(federation.reached)
        reached["steps"] += federation.loop.steps
        if problem is not None:
            found[seed] = str(problem)
            if bug is not None:
                break
    os.write(out, json.dumps({"reached": reached, "found": found}).encode() + b"\n")


def farm(first: int, last: int, jobs: int, folder: str, bug: str | None) -> tuple[dict[int, str], Counter[str]]:
    """Play many seeds in several processes."""
    if bug is None:
        import system.federation  # noqa: F401  # once, for all that are forked
    batches = [(start, min(start + _BATCH, last)) for start in range(first, last, _BATCH)]
    running: dict[int, int] = {}
    found: dict[int, str] = {}
    reached: Counter[str] = Counter()
    while batches or running:
        while batches and len(running) < jobs:
            start, end = batches.pop(0)
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os.close(read)
                _batch(start, end, folder, write, bug)
                os._exit(0)  # SQLite's simulated files must not be closed in the order of the interpreter's end
            os.close(write)
            running[pid] = read
        pid, status = os.wait()
        with os.fdopen(running.pop(pid)) as pipe:
            text = pipe.read()
        if status or not text:
            raise SystemExit(f"a process that played seeds ended with status {status}")
        answer = json.loads(text)
        found.update({int(seed): problem for seed, problem in answer["found"].items()})
        reached.update(answer["reached"])
        if bug is not None and found:
            batches = []
    return found, reached


def hunt(names: list[str], most: int, jobs: int, folder: str) -> int:
    """How many seeds it takes to find each planted bug."""
    survivors = 0
    for name in names:
        found, _ = farm(0, most, jobs, folder, name)
        if found:
            seed = min(found)
            print(f"| {name} | {seed + 1} | {found[seed][:110]} |", flush=True)
        else:
            survivors += 1
            print(f"| {name} | **not in {most}** | |", flush=True)
    print(f"{len(names) - survivors} of {len(names)} found")
    return bool(survivors)


def never_reached(reached: Counter[str]) -> list[str]:
    """What these seeds were to reach at least once and did not."""
    from system.federation import SOMETIMES

    return [what for what in SOMETIMES if not reached[what]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one, and shrink it if it fails")
    parser.add_argument("--case", type=Path, metavar="FILE", help="play the faults of this file")
    parser.add_argument("--trace", action="store_true", help="show every event")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it as PNG, SVG or PDF")
    parser.add_argument("--seeds", default="0:200", help="FIRST:LAST")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reached", action="store_true", help="show how often each rare branch was reached")
    parser.add_argument("--sometimes", action="store_true", help="fail if one of them was never reached")
    parser.add_argument("--bug", action="append", metavar="NAME", help="plant it and play seeds until it is found; all")
    parser.add_argument("--most", type=int, default=10_000, help="seeds for each planted bug")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        if options.bug is not None:
            from system.bugs import BUGS

            names = list(BUGS) if options.bug == ["all"] else options.bug
            return hunt(names, options.most, options.jobs, folder)
        if options.seed is not None or options.case is not None:
            return show(
                options.seed or 0, folder, trace=options.trace, picture=options.picture, case=options.case
            )  # fmt: skip
        first, last = (int(part) for part in options.seeds.split(":"))
        began = time.monotonic()
        found, reached = farm(first, last, options.jobs, folder, None)
    from system.federation import signature

    count, minutes = last - first, (time.monotonic() - began) / 60
    for what, times in sorted(reached.items()) if options.reached else ():
        print(f"{times:10,d}  {what}")
    for kind, times in Counter(signature(Exception(text)) for text in found.values()).most_common():
        seeds = [seed for seed, text in sorted(found.items()) if signature(Exception(text)) == kind]
        print(f"{times} seeds: {found[seeds[0]]}\n    {', '.join(map(str, seeds[:8]))}")
    missing = never_reached(reached) if options.sometimes else []
    if missing:
        print(f"never reached: {', '.join(missing)}")
    print(f"{count} seeds in {minutes:.1f} minutes ({count / minutes:.0f} a minute), {len(found)} failed")
    return bool(found or missing)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
