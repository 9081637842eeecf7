"""Play seeds of the whole system: `run.py --seeds 0:1000`, or one of them with its trace: `run.py --seed 7 --trace`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

_BATCH = 25  # seeds in one process: what they leave behind in the interpreter goes with it


def show(seed: int, folder: str, *, trace: bool, picture: Path | None, case: Path | None) -> int:
    """Play one seed, or a case, and say what happened."""
    from system.federation import Fault, play, shrink, signature

    faults = None
    if case is not None:
        content = json.loads(case.read_text(encoding="utf-8"))
        seed, faults = content["seed"], [Fault(**fault) for fault in content["faults"]]
    federation, problem = play(seed, folder, traced=trace or picture is not None, faults=faults)
    if trace:
        print("\n".join(federation.lines))
    if picture is not None:
        from system.picture import save_picture

        save_picture(federation, picture)
    print(f"seed {seed}: {federation.policy_name}, {federation.loop.steps} steps, digest {federation.digest}")
    if problem is None:
        return 0
    print(f"VIOLATED: {problem}")
    if case is not None:
        return 1
    print("the fewest faults that show it, as a case for tests/system/cases/:")
    left = shrink(seed, folder, signature(problem), federation.faults)
    faults_text = [{"at": round(fault.at, 6), "kind": fault.kind, "number": fault.number} for fault in left]
    print(json.dumps({"found": str(problem), "seed": seed, "faults": faults_text}, indent=1))
    return 1


def _batch(first: int, last: int, folder: str, needs: str | None, only: str) -> dict[str, Any]:
    """Play seeds in this process; what was found and what was reached. With `needs` until something is found."""
    from system.federation import play, words_of

    reached: Counter[str] = Counter()
    found: dict[int, str] = {}
    digests: dict[int, str] = {}
    for seed in range(first, last):
        if not all(re.search(wanted, words_of(seed)) for wanted in (needs, only) if wanted):
            continue
        federation, problem = play(seed, folder)
        reached.update(federation.reached)
        reached["seeds"] += 1
        reached["steps"] += federation.loop.steps
        digests[seed] = federation.digest
        if problem is not None:
            found[seed] = str(problem)
            if needs is not None:
                break
    return {"reached": reached, "found": found, "digests": digests}


def _begin(work: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Start a process for this work; its number, and where its answer comes from."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        os.write(write, json.dumps(work(*arguments)).encode())
        os._exit(0)  # SQLite's simulated files must not be closed in the order of the interpreter's end
    os.close(write)
    return pid, read


def _answer(read: int, status: int) -> Any:
    with os.fdopen(read) as pipe:
        text = pipe.read()
    if status or not text:
        raise SystemExit(f"a process that played seeds ended with status {status}")
    return json.loads(text)


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do it in a process of its own, which has its own modules."""
    pid, read = _begin(work, *arguments)
    return _answer(read, os.waitpid(pid, 0)[1])


def farm(
    first: int, last: int, jobs: int, folder: str, *, needs: str | None = None, only: str = ""
) -> tuple[dict[int, str], Counter[str], str]:
    """Play many seeds in several processes, `only` those of such a kind; with `needs` too, until one fails.

    What was found, what was reached, and a digest of all their traces.
    """
    import system.federation  # noqa: F401  # once, for all that are forked

    batches = [(start, min(start + _BATCH, last)) for start in range(first, last, _BATCH)]
    running: dict[int, int] = {}
    found: dict[int, str] = {}
    digests: dict[int, str] = {}
    reached: Counter[str] = Counter()
    while batches or running:
        while batches and len(running) < jobs:
            pid, read = _begin(_batch, *batches.pop(0), folder, needs, only)
            running[pid] = read
        pid, status = os.wait()
        answer = _answer(running.pop(pid), status)
        for seed, problem in answer["found"].items():
            found[int(seed)] = problem
            print(f"seed {seed}: {problem}", file=sys.stderr, flush=True)
        digests.update({int(seed): digest for seed, digest in answer["digests"].items()})
        reached.update(answer["reached"])
        if needs is not None and found:
            batches = []
    every = "".join(digest for _, digest in sorted(digests.items()))
    return found, reached, hashlib.blake2b(every.encode(), digest_size=8).hexdigest()


def _search(bug: str, first: int, most: int, jobs: int, folder: str) -> tuple[int, str] | None:
    """The first seed that fails with this bug."""
    from system.bugs import BUGS, plant

    plant(bug)
    found, _, _ = farm(first, most, jobs, folder, needs=BUGS[bug].needs)
    return min(found.items()) if found else None


def _problem(seed: int, folder: str) -> str | None:
    from system.federation import play

    problem = play(seed, folder)[1]
    return None if problem is None else str(problem)


def hunt(names: list[str], most: int, jobs: int, folder: str, out: Path | None) -> int:
    """How many seeds it takes to find each planted bug; a seed that fails without it does not count."""
    import apsw  # noqa: F401  # once, for all that are forked: whatever no bug is in
    import google.protobuf.descriptor_pool  # noqa: F401
    import greenlet  # noqa: F401
    import grpc.aio  # noqa: F401
    import safetensors.numpy  # noqa: F401

    from system.bugs import BUGS

    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else {}
    survivors = 0
    for name in names:
        before = results.get(name, {"found": True})
        seed = 0 if before["found"] else before["seeds"]  # what was played is not played again
        while (found := _alone(_search, name, seed, most, jobs, folder)) is not None:
            seed = found[0]
            if _alone(_problem, seed, folder) is None:
                break
            seed += 1
        survivors += found is None
        played, said = (most, "") if found is None else (seed + 1, found[1])
        print(f"{name}: {f'not in {most} seeds' if found is None else f'seed {seed}: {said[:110]}'}", flush=True)
        results[name] = {"found": found is not None, "seeds": played, "checker": _checker(said)}
        kept = {bug: results[bug] for bug in BUGS if bug in results}
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{len(names) - survivors} of {len(names)} found")
    return bool(survivors)


def _checker(said: str) -> str:
    """Which of the checkers spoke."""
    head = said.partition(":")[0]
    if head[:1].isupper() and head[1:].isdigit():
        return head
    return re.sub(r"/\S*|[0-9a-f]{12,}|\d+", "…", said)[:70].strip()


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
    parser.add_argument("--only", default="", metavar="REGEX", help="seeds with such a fault or choice, as 'masked'")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reached", action="store_true", help="show how often each rare branch was reached")
    parser.add_argument("--sometimes", action="store_true", help="fail if one of them was never reached")
    parser.add_argument("--bug", action="append", metavar="NAME", help="plant it and play seeds until it is found; all")
    parser.add_argument("--most", type=int, default=10_000, help="seeds for each planted bug")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep there what was found of each")
    parser.add_argument("--left", action="store_true", help="only those that this file does not name as found")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        if options.bug is not None and options.case is None and options.seed is None:
            from system.bugs import BUGS

            names = list(BUGS) if options.bug == ["all"] else options.bug
            known = json.loads(options.results.read_text("utf-8")) if options.left else {}
            names = [name for name in names if not known.get(name, {}).get("found")]
            return hunt(names, options.most, options.jobs, folder, options.results)
        if options.seed is not None or options.case is not None:
            for bug in options.bug or ():
                from system.bugs import plant

                plant(bug)
            return show(
                options.seed or 0, folder, trace=options.trace, picture=options.picture, case=options.case
            )  # fmt: skip
        first, last = (int(part) for part in options.seeds.split(":"))
        began = time.monotonic()
        found, reached, digest = farm(first, last, options.jobs, folder, only=options.only)
    from system.federation import signature

    count, minutes = reached["seeds"], (time.monotonic() - began) / 60
    for what, times in sorted(reached.items()) if options.reached else ():
        print(f"{times:10,d}  {what}")
    for kind, times in Counter(signature(Exception(text)) for text in found.values()).most_common():
        seeds = [seed for seed, text in sorted(found.items()) if signature(Exception(text)) == kind]
        print(f"{times} seeds: {found[seeds[0]]}\n    {', '.join(map(str, seeds[:8]))}")
    missing = never_reached(reached) if options.sometimes else []
    if missing:
        print(f"never reached: {', '.join(missing)}")
    used = os.times()
    busy = (used.user + used.system + used.children_user + used.children_system) / 60
    speed = f"{count / minutes:.0f} a minute, {count / busy:.0f} a minute of one core"
    print(f"{count} seeds in {minutes:.1f} minutes ({speed}), {len(found)} failed, digest {digest}")
    return bool(found or missing)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
