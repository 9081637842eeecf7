"""All benchmarks, one after the other, and what they found as one page: RESULTS.md.

    python benchmarks [NAME ...] [--quick] [--no-peers] [--collect]

Each benchmark also runs alone: python benchmarks/NAME.py --help. With --quick everything is tiny, two at a time and
without other systems; it is checked that each has measured what it promises, and the page goes to
.cache/benchmarks/quick. --collect only writes the page again from the results that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _history
from _bench import HERE, QUICK_RESULTS, RESULTS, ROOT, markdown
from _checks import problems
from _peers import NAMES, version_of

BENCHMARKS = (
    "mixing", "cached_update", "simulator_overhead", "simulator_peers", "round_overhead", "wire", "wire_learners",
    "time_to_accuracy", "idle_time", "controller_memory", "simulator_memory", "scale", "load", "soak", "private_step",
    "dashboard", "precision", "secure_sum", "masked_round", "sealed", "large_model", "slow_line", "startup",
)  # fmt: skip
SHORTER = {  # where all are measured, which should take half an hour; by their names they take their time
    "soak": ("--seconds", "60"),
    "precision": ("--steps", "200", "--seeds", "1"),
    "dashboard": ("--seconds", "20", "--repeats", "1", "--rounds", "30"),
    "time_to_accuracy": ("--seconds", "45"),
    "idle_time": ("--rounds", "5"),
    "large_model": ("--rounds", "1", "--learners", "2"),
    "masked_round": ("--rounds", "3", "--repeats", "1", "--rest", "0"),
    "simulator_overhead": ("--repeats", "2"),
    "simulator_peers": ("--sizes", "small-10", "small-100", "small-1000"),
    "scale": ("--repeats", "1"),
    "secure_sum": ("--no-peers",),
    "wire": ("--repeats", "6", "--tasks", "100"),
    "slow_line": ("--rate", "60"),
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ}


def page(folder: Path) -> str:
    """RESULTS.md from what lies in the folder."""
    found = [json.loads((folder / f"{name}.json").read_text("utf-8")) for name in BENCHMARKS
             if (folder / f"{name}.json").exists()]  # fmt: skip
    if not found:
        return "# Results\n\nNothing was measured.\n"
    machine: dict[str, str] = found[-1]["machine"]
    goals: list[list[Any]] = [["what", "goal", "measured", ""]]
    for result in found:
        goals += [[g["what"], g["goal"], g["measured"], "met" if g["met"] else "**not met**"] for g in result["goals"]]
    missing = [name for name in BENCHMARKS if name not in {result["name"] for result in found}]
    parts = [
        "# Results",
        "Written by `make bench`; [README.md](README.md) says what is measured and how to read it.",
        markdown([["machine", ""], *([key, value] for key, value in machine.items())]),
        f"Peers, each in its own environment: {', '.join(map(version_of, NAMES))}.",
        "## Goals",
        markdown(goals),
    ]
    if folder == RESULTS and _history.read():
        _history.draw()
        parts.append(f"![Which part of each goal was reached, over the runs]({_history.PICTURE.relative_to(HERE)})")
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.")
    for result in found:
        parts += [
            f"## {result['title']}",
            f"`{result['command']}`, {result['date']}, {result['seconds']:.0f} s. Load of the machine (of 1 minute) "
            f"{result['load_before']} before, {result['load_after']} after; niceness {result.get('niceness', '?')}.",
            (folder / f"{result['name']}.md").read_text("utf-8").strip(),
        ]
    return "\n\n".join(parts) + "\n"


def measure(name: str, no_peers: bool, settings: Sequence[str] = ()) -> bool:
    """Alone on the machine; whether it came to its end."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py"), *(["--no-peers"] if no_peers else []), *settings]
    code = subprocess.run(command, env=ENVIRONMENT, check=False).returncode
    print(f"== {name}: {'FAILED' if code else 'done'} in {time.monotonic() - began:.0f} s\n", flush=True)
    return code == 0


def try_out(name: str) -> bool:
    """Tiny, beside another one; whether it came to its end and measured what it promises."""
    began = time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py"), "--quick", "--no-peers"]
    (QUICK_RESULTS / f"{name}.json").unlink(missing_ok=True)
    done = subprocess.run(
        command, env=ENVIRONMENT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wrong = [f"ended with code {done.returncode}:\n{done.stdout}"] if done.returncode else problems(name, QUICK_RESULTS)
    print(f"== {name}: {'; '.join(wrong) or 'as promised'}, {time.monotonic() - began:.0f} s", flush=True)
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--no-peers", action="store_true", help="leave other systems out")
    parser.add_argument("--collect", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHMARKS:
            parser.error(f"there is no benchmark '{name}'; there are: {', '.join(BENCHMARKS)}")
    folder = QUICK_RESULTS if options.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    names = [] if options.collect else options.names or BENCHMARKS
    if options.quick:
        with ThreadPoolExecutor(2) as pool:
            done = dict(zip(names, pool.map(try_out, names), strict=True))
    else:
        began = time.monotonic()
        shorter = {} if options.names else SHORTER
        done = {name: measure(name, options.no_peers, shorter.get(name, ())) for name in names}
        print(f"== all: {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
        if names:
            _history.add([json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in names if done[name]])
    failed = [name for name, fine in done.items() if not fine]
    where = HERE / "RESULTS.md" if folder == RESULTS else folder / "RESULTS.md"
    where.write_text(page(folder), "utf-8")
    print(f"written: {where.relative_to(ROOT)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
