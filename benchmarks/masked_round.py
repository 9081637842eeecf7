"""A masked round against a plain one: real learners and a real controller, each in processes of their own, with mTLS.

    python benchmarks/masked_round.py [--megabytes 100] [--learners 4] [--rounds 5] [--quick] [--out FOLDER]

Training is the same for both: every number moves a little, and then the learner rests for as long as the table says, as
one does whose processors are not this machine's. Plain and masked federations take turns, and the shortest round of
each counts, because noise of a shared machine only adds. All learners share this machine: what sites do in parallel
on machines of their own is done here one after the other, so that the ratio without training is an upper bound.
Processor seconds are those of all processes together, a round, without what starting them takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _bench import Report, arguments, report
from _federation import ControllerUnderTest, Spec, consortium

from metis.core.events import CommunityPublished
from metis.core.layers import SecureSum
from metis.core.model import Layout, Model
from metis.core.policies import sync_fedavg
from metis.deployment.learner.process import LearnerProcess
from metis.deployment.learner.site_policy import PolicyFile
from metis.deployment.route import Route
from metis.deployment.security.identity import channel_credentials, load_kit
from metis.net import host_and_port
from metis.runs.trace import read_trace

MASKED, REST = "METIS_BENCHMARK_MASKED", "METIS_BENCHMARK_REST"
HANG = 600.0  # seconds


# --- a learner ----------------------------------------------------------------------------------


class _Learner:
    privacy = None
    indices, batch_size = range(100), 10

    def train_while(
        self, engine: Any, community_model: Model, task_number: int, budget: Any, clock: Any, memory: Any,
        at_boundary: Any, agree: Any, rate: float,
    ) -> SimpleNamespace:  # fmt: skip
        started = clock()
        at_boundary(0)
        local = community_model.with_vector(community_model.vector + np.float32(1e-3))
        time.sleep(float(os.environ[REST]))
        at_boundary(budget.steps)
        seconds = max(clock() - started, 1e-5)
        return SimpleNamespace(
            model=local, payload=b"", steps=budget.steps, loss=0.5, memory={},
            batch_times=(seconds / budget.steps,) * budget.steps, seconds=seconds, notes={},
        )  # fmt: skip


def _build(command: Mapping[str, Any]) -> Any:
    policy = sync_fedavg(1)
    return SimpleNamespace(
        engine=SimpleNamespace(), policy=policy.with_layers(SecureSum()) if os.environ[MASKED] == "1" else policy,
        layout=Layout.from_json(command["layout"]), learner=_Learner(), evaluation=None, metric="loss",
        higher_is_better=False, seed=1, validation=None,
    )  # fmt: skip


def _learner(address: str, kit: Path, work: Path) -> int:
    process = LearnerProcess(
        Route(*host_and_port(address)),
        work=work,
        child=[sys.executable, __file__, "--trainer"],
        report=lambda kind, text: print(kind, text, file=sys.stderr) if kind in ("warning", "error") else None,
        credentials=lambda: channel_credentials(load_kit(kit)),
        kit=kit,
        policy=PolicyFile(work.parent / "site-policy.toml"),
    )
    return asyncio.run(process.run())


# --- a federation -------------------------------------------------------------------------------


def federation(megabytes: float, names: list[str], rounds: int, rest: float, masked: bool) -> tuple[list[float], float]:
    """Seconds of every round but the first, and processor seconds of all processes."""
    main, kits = consortium(names)
    environment = {**os.environ, MASKED: str(int(masked)), REST: str(rest)}
    before = os.times()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        pinned = f"peers = {json.dumps(names)}\n" if masked else ""  # a site with peers takes part in nothing else
        (home / "site-policy.toml").write_text(f"{pinned}report_metrics = false\n")
        spec = Spec(
            str(home / "state"), megabytes, len(names), rounds, durability="power", kit=str(main), masked=masked,
            linger=HANG,
        )  # fmt: skip
        with ControllerUnderTest(spec) as controller:
            learners = [
                subprocess.Popen(
                    [sys.executable, __file__, "--learner", controller.address, str(kits[name]), str(home / name)],
                    env=environment,
                )
                for name in names
            ]
            codes = [learner.wait(HANG) for learner in learners]
        assert not any(codes), f"learners ended with {codes}"
        moments = [
            at
            for at, item in read_trace(home / "state" / "run" / "events.jsonl")
            if isinstance(item, CommunityPublished)
        ]
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return [end - begin for begin, end in pairwise(moments)], spent


def compare(sheet: Report, megabytes: float, learners: int, rounds: int, rest: float, repeats: int) -> float:
    """Masked over plain, by the shortest round of each."""
    names = [f"site-{n:02d}" for n in range(learners)]
    times: dict[bool, list[float]] = {False: [], True: []}
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for masked in (False, True):
            found, processors = federation(megabytes, names, rounds, rest, masked)
            start = federation(0.004, names, 1, 0.0, masked)[1]
            times[masked] += found
            spent[masked].append((processors - start) / rounds)
    best = {masked: min(found) for masked, found in times.items()}
    work = {masked: min(found) for masked, found in spent.items()}
    sheet.say(f"{learners} learners, {megabytes:g} MB, {rest:g} s of rest a task:")
    sheet.table(
        [
            ["", "plain", "masked", "ratio"],
            ["shortest round, s", best[False], best[True], best[True] / best[False]],
            ["processor seconds of all, a round", work[False], work[True], work[True] / work[False]],
        ]
    )
    sheet.figures[f"rest {rest:g}"] = {
        ("masked" if masked else "plain"): {"rounds": times[masked], "processor": spent[masked]} for masked in times
    }
    return best[True] / best[False]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rest", type=float, nargs="*", default=[0.0, 10.0], help="seconds of a task")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.rounds, options.repeats, options.rest = 0.4, 2, 1, [0.0]
    with report(options, __doc__) as sheet:
        for rest in options.rest:
            ratio = compare(sheet, options.megabytes, options.learners, options.rounds, rest, options.repeats)
            sheet.goal(
                f"a masked round of {options.megabytes:g} MB, tasks of {rest:g} s", "at most 1.3 of a plain one",
                f"{ratio:.2f}", ratio <= 1.3, 1.3 / ratio,
            )  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--learner", address, kit, work]:
            sys.exit(_learner(address, Path(kit), Path(work)))
        case ["--trainer"]:
            from metis.deployment.trainer import process as trainer

            trainer.main(_build)
        case _:
            main()
