"""One to a hundred learners exchange models with a controller at the same time.

    python benchmarks/wire_learners.py [--megabytes 4] [--rounds 5] [--quick] [--out FOLDER]

Synchronous rounds of light learners that make their models up, all in one process beside the controller's, so that a
round is the exchange and little else: every learner downloads the community model and uploads its own. MB/s count both
ways of all learners together. With models of 4 kB also a thousand learners. The first round warms up; the median of the
others counts.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from _bench import Report, arguments, median, report
from _federation import ControllerUnderTest, LightLearner, Spec, consortium
from wire import round_times

from metis.deployment.security.identity import load_kit
from metis.runs.trace import read_trace

LEARNERS = (1, 3, 10, 30, 100)
MANY = 1000  # with tiny models


def exchange(learners: int, megabytes: float, rounds: int, tls: bool) -> float:
    """Seconds of a round."""
    names = [f"learner-{n}" for n in range(learners)]
    main, kits = consortium(names)
    with tempfile.TemporaryDirectory() as folder:
        spec = Spec(folder, megabytes, learners, rounds + 1, kit=str(main) if tls else None)
        with ControllerUnderTest(spec) as controller:

            async def learn() -> None:
                light = [
                    LightLearner(name, controller.address, spec.layout, load_kit(kits[name]) if tls else None)
                    for name in names
                ]
                await asyncio.gather(*(learner.run() for learner in light))
                assert not any(learner.failures or learner.refused for learner in light)

            asyncio.run(learn())
        return median(round_times(list(read_trace(Path(folder) / "run" / "events.jsonl"))))


def measure(sheet: Report, options: Any) -> None:
    numbers, megabytes, rounds = ((1, 3), 0.5, 2) if options.quick else (LEARNERS, options.megabytes, options.rounds)
    rows: list[list[Any]] = [
        ["learners", "plain, s a round", "plain, MB/s", "mTLS, s a round", "mTLS, MB/s", "4 kB, plain, s a round"]
    ]
    for learners in numbers:
        large = {tls: exchange(learners, megabytes, rounds, tls) for tls in (False, True)}
        tiny = exchange(learners, 0.004, 4 * rounds, False)  # they are short
        speed = {tls: round(2 * learners * megabytes / seconds) for tls, seconds in large.items()}
        rows.append([str(learners), large[False], speed[False], large[True], speed[True], tiny])
        sheet.figures[str(learners)] = {"plain": large[False], "mTLS": large[True], "tiny": tiny}
    if not options.quick:
        tiny = exchange(MANY, 0.004, rounds, False)
        rows.append([f"{MANY:,}", "", "", "", "", tiny])
        sheet.figures[str(MANY)] = {"tiny": tiny}
        for learners, goal in ((100, 0.15), (MANY, 1.5)):
            seconds = sheet.figures[str(learners)]["tiny"]
            sheet.goal(
                f"a round of {learners:,} learners, 4 kB", f"at most {goal:g} s", f"{seconds:.2g} s", seconds <= goal,
                goal / seconds,
            )  # fmt: skip
    sheet.say(f"Models of {megabytes:g} MB.")
    sheet.table(rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, options)


if __name__ == "__main__":
    main()
