"""The study's real deployment: controller and learners as processes, paced, over this machine's loopback with mTLS.

    python experiments/no-tuning/deployment.py FOLDER [--seeds N]      # results are added to deployment.jsonl

Two cases of the eight hospitals of examples/consortium, whose processes it uses, without faults on the lines:

- `hospitals`: their times divided by 1,440; one of them needs 7.5 s for an epoch, the others about a second.
- `milliseconds`: batches of 2 and 4 ms, so that an exchange takes longer than many batches.

What counts is the time to accuracy 0.85 by the controller's clock and how much of the learners' time is training, in
`milliseconds` over 20 seconds, after which the target is long reached. Beside it the load of the machine, the mean of
the latest minute at the end of a run: the processes share its processors with whatever else runs there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASE = HERE.parents[1] / "examples" / "consortium"
sys.path.insert(0, str(CASE))

import processes  # noqa: E402
from case import Faults  # noqa: E402

import metis  # noqa: E402

RESULTS = HERE / "deployment.jsonl"
QUIET = Faults(between=1e9, cut=0.01, reset=1e9)
CASES = {
    "hospitals": processes.PACES,
    "milliseconds": {name: 0.002 if name == "large" else 0.004 for name in processes.PACES},
}
POLICIES = {
    "semisync": 'name = "semisync"',
    "sync 1": 'name = "sync_fedavg"\nlocal_epochs = 1',
    "sync 4": 'name = "sync_fedavg"\nlocal_epochs = 4',
    **{
        f"lambda {size:g}, momentum": f'name = "semisync_fedavg"\nslowest_learner_epochs = {size}\n'
        "server = { optimizer = 'momentum', momentum = 0.5 }"
        for size in (0.05, 0.25, 1.0, 4.0)
    },
    "fedbuff": 'name = "fedbuff"\nlocal_epochs = 1',
}


def federation(folder: Path, case: str, policy: str) -> None:
    """The file of the example with one policy, and a stop at the target or after 20 seconds."""
    text = (CASE / "federation.toml").read_text("utf-8")
    head, _, rest = text.partition("[[policy]]")
    end = rest[rest.index("[stop]") :]
    stop = "seconds = 20" if case == "milliseconds" else "seconds = 300\nat_target = true"
    end = re.sub(r"rounds = 20", stop, end)
    (folder / "federation.toml").write_text(f"{head}[[policy]]\n{POLICIES[policy]}\n\n{end}", "utf-8")
    shutil.copy(CASE / "site.py", folder)


def run(out: Path, case: str, policy: str, seed: int) -> dict[str, Any]:
    folder = out / case / policy.replace(" ", "-").replace(",", "") / str(seed)
    files = folder / "files"
    shutil.rmtree(folder, ignore_errors=True)
    files.mkdir(parents=True)
    federation(files, case, policy)
    processes.HERE, processes.FAULTS, processes.PACES = files, QUIET, CASES[case]
    kits = processes.make_kits(out, list(CASES[case]))
    name = POLICIES[policy].split('"')[1]
    processes.run(folder / "run", kits, name, seed, 10_000, list(CASES[case]))
    done = metis.Run.load(folder / "run" / "state" / "run")
    reached, costs = done.costs_at_target, done.costs
    live = costs.parallel_time * len(costs.by_learner)
    return {
        "case": case,
        "contender": policy,
        "seed": seed,
        "seconds": round((reached or costs).parallel_time, 3),
        "given_up": reached is None,
        "requests": (reached or costs).update_requests,
        "training": round(costs.cumulative_time / live, 3),
        "transfer": round(costs.transfer_time / live, 3),
        "idle": round(costs.idle_time / live, 3),
        "models": done.rounds,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen.out.mkdir(parents=True, exist_ok=True)
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    known = {(row["case"], row["contender"], row["seed"]) for row in map(json.loads, lines)}
    for seed in range(1, chosen.seeds + 1):
        for case in chosen.case or CASES:
            for policy in chosen.policy or POLICIES:
                if (case, policy, seed) in known:
                    continue
                row = run(chosen.out, case, policy, seed)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
