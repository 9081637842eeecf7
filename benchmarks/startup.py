"""What a command costs before it does anything: processor time of `metis --help` and of a short simulation.

    python benchmarks/startup.py [--repeats 5] [--quick] [--out FOLDER]

The simulation is that of `metis init`, for five seconds of virtual time; its training takes a tenth of a second. What
`import torch` alone takes is measured beside it. Processor time of the process, user and system together; the least of
the repeats, because load from outside can only add.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from _bench import Report, arguments, report

# An installation has its modules compiled; here the first run compiles them.
_AS_INSTALLED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
GOALS = {"metis --help": 0.3, "metis simulate": 2.0}  # seconds


def processor_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env=_AS_INSTALLED)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(sheet: Report, repeats: int, folder: Path) -> None:
    file = str(folder / "experiment.toml")
    metis = ("-m", "metis")
    subprocess.run([sys.executable, *metis, "init", file], check=True, capture_output=True)
    commands = {
        "python": ("-c", ""),
        "import torch": ("-c", "import torch"),
        "metis --help": (*metis, "--help"),
        "metis simulate": (
            *metis,
            "simulate",
            file,
            "--set",
            "stop.seconds=5",
            "--out",
            str(folder / "run"),
            "--force",
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):  # in turns: the machine changes from minute to minute
        for name, command in commands.items():
            times[name].append(processor_seconds(*command))
    sheet.figures["seconds"] = times
    sheet.table([["command", "processor time, s"], *([name, min(found)] for name, found in times.items())])
    for name, goal in GOALS.items():
        least = min(times[name])
        sheet.goal(f"processor time of `{name}`", f"at most {goal:g} s", f"{least:.2f} s", least <= goal, goal / least)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with report(options, __doc__) as sheet, tempfile.TemporaryDirectory() as folder:
        measure(sheet, 1 if options.quick else options.repeats, Path(folder))


if __name__ == "__main__":
    main()
