"""A thousand learners join at once with mTLS, hand in 1 MB each, and do both again after the controller was killed.

    python benchmarks/load.py [--learners 1000] [--megabytes 1] [--swarms 3] [--durability process] [--quick]
                              [--out FOLDER]

The controller is one process, the learners are light ones in a few others, each with its own certificate and its own
connection. All dial at the same moment. When all have handed in the controller gets SIGKILL and is started again with
the same command; the learners come back by themselves with the back-off of the real learner. A join is from dialling
to the Welcome, a hand-in from its first byte to the receipt; memory is the controller's.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _bench import Report, arguments, percentile, report
from _federation import ControllerUnderTest, LightLearner, Spec, consortium, layout_of, memory_of

from metis.deployment.security.identity import load_kit


class Swarm:
    """Some of the learners in a process of their own, which follows the orders that it reads line by line."""

    def __init__(self, address: str, megabytes: float, kits: list[Path]) -> None:
        command = [sys.executable, __file__, "--swarm", address, str(megabytes), *map(str, kits)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def order(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline() or '"the swarm has died"')

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


async def swarm(address: str, megabytes: float, kits: list[Path]) -> None:
    """Wait for an order, let all learners do it, say so."""
    learners = [LightLearner(kit.name, address, layout_of(megabytes), load_kit(kit)) for kit in kits]
    running: list[asyncio.Task[None]] = []
    for learner in learners:
        learner.one_at_a_time = True
        learner.may_work.clear()

    async def all_have(count: int, what: str) -> None:
        while any(len(getattr(learner, what)) < count and not learner.failures for learner in learners):
            await asyncio.sleep(0.02)

    def say(value: Any) -> None:
        print(json.dumps(value), flush=True)

    say("ready")
    while order := (await asyncio.to_thread(sys.stdin.readline)).strip():
        word, _, count = order.partition(" ")
        if word == "join":
            running = running or [asyncio.create_task(learner.run()) for learner in learners]
            await all_have(int(count), "joins")
        elif word == "hand_in":
            for learner in learners:
                learner.may_work.set()
            await all_have(int(count), "hand_ins")
        say(
            {
                "joins": [learner.joins[int(count) - 1 :] for learner in learners],
                "hand_ins": [learner.hand_ins[int(count) - 1 :] for learner in learners],
                "failures": [text for learner in learners for text in (*learner.failures, *learner.refused)],
                "attempts": sum(learner.attempts for learner in learners),
            }
        )


def all_do(swarms: list[Swarm], order: str) -> list[dict[str, Any]]:
    for each in swarms:
        each.order(order)
    return [each.answer() for each in swarms]


def measure(controller: ControllerUnderTest, swarms: list[Swarm], again: bool) -> dict[str, Any]:
    """One time: join, hand in."""
    count = 2 if again else 1
    began = time.monotonic()
    joined = all_do(swarms, f"join {count}")
    all_joined, there = time.monotonic() - began, memory_of(controller.pid)
    began = time.monotonic()
    handed = all_do(swarms, f"hand_in {count}")
    all_handed, after = time.monotonic() - began, memory_of(controller.pid)
    joins = [learner[0][1] for answer in joined for learner in answer["joins"] if learner]
    hand_ins = [learner[0][1] for answer in handed for learner in answer["hand_ins"] if learner]
    return {
        "joined": len(joins),
        "join_p50": percentile(joins, 0.5),
        "join_p99": percentile(joins, 0.99),
        "all_joined_seconds": all_joined,
        "handed_in": len(hand_ins),
        "hand_in_p50": percentile(hand_ins, 0.5),
        "hand_in_p99": percentile(hand_ins, 0.99),
        "all_handed_in_seconds": all_handed,
        "failures": [text for answer in handed for text in answer["failures"]],
        "attempts": sum(answer["attempts"] for answer in handed),
        "rss_joined": there["rss"],
        "rss_handed_in": after["rss"],
        "peak": after["peak"],
    }


def run(sheet: Report, options: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began = time.monotonic()
    kit, kits = consortium([f"learner-{n}" for n in range(options.learners)])
    print(f"{options.learners} certificates in {time.monotonic() - began:.1f} s")
    folders = list(kits.values())
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(folder, options.megabytes, options.learners, 1000, durability=options.durability, kit=str(kit))
        with ControllerUnderTest(spec) as controller:
            idle = memory_of(controller.pid)
            swarms = [
                Swarm(controller.address, options.megabytes, folders[n :: options.swarms])
                for n in range(options.swarms)
            ]
            try:
                for each in swarms:
                    assert each.answer() == "ready"
                first = measure(controller, swarms, again=False)
                controller.kill()
                restart = controller.start()
                second = measure(controller, swarms, again=True)
                second["all_back_seconds"] = second["all_joined_seconds"] + restart
            finally:
                for each in swarms:
                    each.end()
    rows: list[list[Any]] = [["", "at once", "after SIGKILL"]]
    for text, name in (
        ("learners that joined", "joined"),
        ("join, p50, s", "join_p50"),
        ("join, p99, s", "join_p99"),
        ("all joined after, s", "all_joined_seconds"),
        ("learners that handed in", "handed_in"),
        ("hand-in, p50, s", "hand_in_p50"),
        ("hand-in, p99, s", "hand_in_p99"),
        ("all handed in after, s", "all_handed_in_seconds"),
        ("RSS with all joined, MB", "rss_joined"),
        ("RSS after the hand-in, MB", "rss_handed_in"),
        ("peak RSS, MB", "peak"),
    ):
        rows.append([text, first[name], second[name]])
    rows.append(["failures", len(first["failures"]), len(second["failures"])])
    rows.append(["kB of RSS a learner, joined", *((t["rss_joined"] - idle["rss"]) * 1e3 / options.learners for t in
                                                  (first, second))])  # fmt: skip
    rows.append(["kB of RSS a learner, peak", *((t["peak"] - idle["rss"]) * 1e3 / options.learners for t in
                                                (first, second))])  # fmt: skip
    sheet.table(rows)
    sheet.figures = {"idle": idle, "first": first, "second": second, "restart_seconds": restart}
    sheet.say(f"Idle controller {idle['rss']:.0f} MB; restarted and listening after {restart:.2f} s.")
    failures = [*first["failures"], *second["failures"]]
    for text in failures[:5]:
        sheet.say(f"Failure: {text}")
    sheet.goal(
        f"{options.learners:,} learners with mTLS join at once, hand in, and do so again after a SIGKILL",
        "no failure", f"{len(failures)} failures", not failures and second["handed_in"] == options.learners,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--learners", type=int, default=1000)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--swarms", type=int, default=3, help="processes of learners")
    parser.add_argument("--durability", choices=["process", "power"], default="process")
    options = parser.parse_args()
    if options.quick:
        options.learners, options.megabytes, options.swarms = 12, 0.1, 2
    with report(options, __doc__) as sheet:
        run(sheet, options)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--swarm":
        asyncio.run(swarm(sys.argv[2], float(sys.argv[3]), [Path(kit) for kit in sys.argv[4:]]))
    else:
        main()
