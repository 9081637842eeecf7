"""A consortium that no run of 20 rounds had ever survived, played with real processes on one machine.

    make consortium
    python examples/consortium/processes.py runs/consortium --seeds 20 --resume

Eight learners with certificates, one of them with twenty times the batches of the others, dial a controller over lines
that are cut for six minutes at random and reset every day; every time is divided by 1,440. Each seed is run three
times: waiting for everybody (Sync), semi-synchronously with a lambda that was chosen for it, and without a parameter.
Results are appended to results.json, a line a run; with --resume only what is missing there is run. At the end: the
table, and timelines.svg of the last seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from case import FAULTS, GROUPS, HOUR, PACES, POLICIES, SHORTER, TARGET, median, table
from lines import Lines

HERE = Path(__file__).resolve().parent
METIS = [sys.executable, "-m", "metis.cli.app"]
LONGEST = 1800.0  # seconds that a run may take on a machine that is busy with something else


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


def metis(*words: object) -> None:
    """Run one command to its end; its own words say what went wrong."""
    done = subprocess.run([*METIS, *map(str, words)], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def make_kits(folder: Path, sites: Sequence[str]) -> Path:
    """Certificates for the controller and all sites, once."""
    kits = folder / "kits"
    if not (kits / "done").exists():
        shutil.rmtree(kits, ignore_errors=True)
        metis("certificates", "init", kits / "ca", "--name", "Consortium")
        issue = ("certificates", "issue")
        metis(
            *issue, "main", "--ca", kits / "ca", "--role", "controller", "--host", "localhost", "--out", kits / "main"
        )
        for site in sites:
            metis(*issue, site, "--ca", kits / "ca", "--role", "learner", "--out", kits / site)
        (kits / "done").touch()
    return kits


# --- one run --------------------------------------------------------------------------------------


@contextmanager
def started(folder: Path, log: str, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{log}.log").open("ab") as file:
        process = subprocess.Popen([*METIS, *map(str, words)], stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for(happened: Any, processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    """Until this is true; a process that ends before is an error."""
    until = time.monotonic() + LONGEST
    while not happened():
        for name, process in processes.items():
            if process.poll() is not None:
                raise RuntimeError(f"{name} has ended early: {(folder / f'{name}.log').read_text()[-800:]}")
        if time.monotonic() > until:
            raise RuntimeError(f"nothing came of it within {LONGEST:.0f} s; the logs are in {folder}")
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as probe:
        return int(probe.getsockname()[1])


def run(folder: Path, kits: Path, policy: str, seed: int, rounds: int, sites: Sequence[str]) -> dict[str, Any]:
    """One federation from its start to the results."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port, state = free_port(), folder / "state"
    words: list[object] = ["controller", HERE / "federation.toml", "--policy", policy, "--state", state]
    words += ["--identity", kits / "main", "--listen", f"localhost:{port}", "--json"]
    words += ["--set", f"seed={seed}", "--set", f"stop.rounds={rounds}"]
    for group, names in enumerate(GROUPS):
        words += ["--set", f"learners.{group}.names={json.dumps([name for name in names if name in sites])}"]
    with Lines(sites, ("localhost", port), FAULTS, seed) as lines:
        with started(folder, "controller", *words) as controller:
            wait_for((state / "controller.json").exists, {"controller": controller}, folder)
            learners = {}
            for site in sites:
                learner = ["learner", "--controller", f"localhost:{lines.ports[site]}", "--identity", kits / site]
                learner += ["--site", HERE / "site.py", "--work", folder / site, "--pace", PACES[site], "--json"]
                learners[site] = started(folder, site, *learner)
            processes = {site: learner.__enter__() for site, learner in learners.items()}
            try:
                wait_for(lambda: "send_task" in _text(state / "run/events.jsonl"), {"controller": controller}, folder)
                lines.begin()
                wait_for(lambda: controller.poll() is not None, {}, folder)
                lines.end()
                ended = [_ended(process) for process in processes.values()]
            finally:
                for learner in learners.values():
                    learner.__exit__(None, None, None)
            if controller.returncode:
                raise RuntimeError(f"the controller has ended with {controller.returncode}; logs are in {folder}")
        return {
            "seed": seed,
            "policy": policy,
            "sites": len(sites),
            "ended": sum(ended),
            **measured(folder, lines, sites),
        }


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a learner has the final model; one that did not hear of the end goes on dialling."""
    try:
        return process.wait(60) == 0
    except subprocess.TimeoutExpired:
        return False


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


# --- results ----------------------------------------------------------------------------------------


def measured(folder: Path, lines: Lines, sites: Sequence[str]) -> dict[str, Any]:
    """What the controller recorded, and whether it is what the learners were promised."""
    from metis import Run

    result = Run.load(folder / "state" / "run")
    live = sum(result.costs.parallel_time - each.away for each in result.costs.by_learner.values())
    reached = result.costs_at_target
    return {
        "rounds": result.rounds,
        "seconds": result.costs.parallel_time,
        "to_target": None if reached is None else reached.parallel_time,
        "accuracy": result.final_metric,
        "idle": result.costs.idle_time / live,
        "transfer": result.costs.transfer_time / live,
        "away": 1 - live / (result.costs.parallel_time * len(result.costs.by_learner)),
        "steps": result.costs.steps,
        "cuts": lines.cuts,
        "resets": lines.resets,
        **promises(folder, sites),
    }


def promises(folder: Path, sites: Sequence[str]) -> dict[str, int]:
    """Updates that were acknowledged to a learner, by its own log, against those in the controller's journal."""
    acknowledged: list[tuple[str, int]] = []
    late = 0
    for site in sites:
        for line in (folder / f"{site}.log").read_text(encoding="utf-8").splitlines():
            said = json.loads(line) if line.startswith("{") else {}
            number = str(said.get("text", "")).partition("task ")[2].partition(":")[0]
            if said.get("kind") == "handed_in":
                acknowledged.append((site, int(number)))
            late += said.get("kind") == "refused" and "late" in said["text"]
    with sqlite3.connect(f"file:{folder / 'state' / 'controller.db'}?mode=ro", uri=True) as database:
        records = [json.loads(record) for (record,) in database.execute("SELECT record FROM journal")]
    journaled = [(record["learner"], record["task"]) for record in records if record.get("event") == "update_request"]
    counted = [
        (action["learner"], action["task"])
        for action in map(json.loads, _text(folder / "state/run/events.jsonl").splitlines())
        if action.get("action") == "update_committed"
    ]
    return {
        "acknowledged": len(acknowledged),
        "lost": len(set(acknowledged) - set(journaled)),
        "doubled": len(journaled) - len(set(journaled)) + len(counted) - len(set(counted)),
        "late": late,
    }


def shown(results: Sequence[dict[str, Any]]) -> str:
    """A row a policy, over all seeds: medians, sums of what must be 0, and the worst share of idle time."""
    rows = []
    for policy, label in POLICIES.items():
        runs = [result for result in results if result["policy"] == policy]
        if not runs:
            continue
        done = sum(result["rounds"] >= result["wanted"] for result in runs)
        reached = [result["to_target"] for result in runs if result["to_target"] is not None]
        rows.append(
            [
                label,
                f"{done} of {len(runs)}",
                f"{median([result['seconds'] for result in runs]) / HOUR:.1f} h",
                f"{median(reached) / HOUR:.1f} h ({len(reached)} of {len(runs)})" if reached else "-",
                f"{median([result['idle'] for result in runs]):.1%}, at most {max(r['idle'] for r in runs):.1%}",
                str(sum(result["cuts"] for result in runs)),
                str(sum(result["resets"] for result in runs)),
                str(sum(result["acknowledged"] for result in runs)),
                f"{sum(result['lost'] for result in runs)} / {sum(result['doubled'] for result in runs)}",
                str(sum(result["late"] for result in runs)),
                f"{sum(result['ended'] for result in runs)} of {sum(result['sites'] for result in runs)}",
            ]
        )
    head = [
        "policy", "runs complete", "time", f"to accuracy {TARGET}", "idle", "cuts", "resets", "acknowledged",
        "lost / doubled", "late", "final model at",
    ]  # fmt: skip
    return table(head, rows)


def draw(folder: Path) -> None:
    from metis import Run
    from metis.reporting.figures import draw_timelines

    runs = [Run.load(folder / policy / "state" / "run") for policy in POLICIES if (folder / policy).is_dir()]
    draw_timelines(runs, folder.parent / "timelines.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description="Eight hospitals as processes, over lines that are cut.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("runs/consortium"))
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--policy", choices=[*POLICIES], action="append", help="only this one; may be repeated")
    parser.add_argument("--small", action="store_true", help="one site of each kind, instead of eight")
    parser.add_argument("--resume", action="store_true", help="keep the results of earlier runs")
    chosen = parser.parse_args()
    out: Path = chosen.out
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out.mkdir(parents=True, exist_ok=True)
    ledger = out / "results.json"
    if not chosen.resume:
        ledger.unlink(missing_ok=True)
    sites = [names[0] for names in GROUPS] if chosen.small else list(PACES)
    kits = make_kits(out, sites)
    results = [json.loads(line) for line in _text(ledger).splitlines()]
    known = {(result["seed"], result["policy"]) for result in results}
    last: Path | None = None
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        for policy in chosen.policy or POLICIES:
            if (seed, policy) in known:
                continue
            folder = out / f"seed-{seed}" / policy
            rounds = chosen.rounds * SHORTER.get(policy, 1)
            say(f"seed {seed}, {POLICIES[policy]}: {len(sites)} learners, {rounds} rounds")
            result = {**run(folder, kits, policy, seed, rounds, sites), "wanted": rounds}
            with ledger.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            results.append(result)
            last = folder.parent
            took = f"{result['rounds']} rounds in {result['seconds']:.1f} s"
            say(f"{took}, {result['cuts']} cuts, idle {result['idle']:.1%}, accuracy {result['accuracy']:.3f}")
    if last is not None:
        draw(last)
    print(shown(results))
    if any(r["rounds"] < r["wanted"] or r["lost"] or r["doubled"] for r in results):
        sys.exit("a run is not complete, or an acknowledged update is lost or counted twice")


if __name__ == "__main__":
    main()
