"""A large model for real: rounds of 1 GB with four learners, and 50 learners of 100 MB under a memory limit of 1 GB.

    python benchmarks/large_model.py [--megabytes 1000] [--learners 4] [--rounds 3] [--quick] [--no-peers]

A controller process with its state folder on the disk, and learners in another process that speak the wire and make
their models up block by block. MB/s of a learner count the model down and up in the time of a round. The peak is what
the controller has above an idle one, in models: anonymous memory alone, and everything that is resident, which includes
pages of files that the system can drop. The limit is one of the kernel (a memory control group); where none can be
made, that part is left out. NVFlare's simulator exchanges the same model with as many clients; its memory is that of
its largest process, the server's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _bench import Report, arguments, median, report
from _peers import Unavailable, ask, version_of
from controller_memory import exchange

GOALS = {"sync_fedavg": 1.2, "fedrec": 1.5}  # models above idle
LIMIT = 10**9  # bytes


@contextlib.contextmanager
def limited(limit: int) -> Iterator[str | None]:
    """The folder of a control group whose processes get no more memory than this; None if none can be made."""
    home = Path("/sys/fs/cgroup")
    parent, setting = (home / "memory", "memory.limit_in_bytes") if (home / "memory").is_dir() else (home, "memory.max")
    folder = parent / f"metis-benchmark-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / setting).write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield str(folder)
    finally:
        folder.rmdir()


def measure(sheet: Report, options: Any) -> None:
    size, learners = (4.0, 2) if options.quick else (options.megabytes, options.learners)
    rows = [["policy", "seconds a round", "MB/s a learner", "anonymous, models", "resident, models", "idle, MB"]]
    sheet.figures = {"megabytes": size, "learners": learners, "policies": {}}
    for policy, goal in GOALS.items():
        versions = options.rounds * (learners if policy == "fedrec" else 1) + 1
        found = exchange(learners, size, versions, policy)
        began = [row["began"] for row in found["rounds"]]
        step = learners if policy == "fedrec" else 1
        seconds = median([later - earlier for earlier, later in zip(began, began[step:], strict=False)])
        above = found["above"]
        idle = round(found["idle"]["rss"])
        rows.append([policy, seconds, 2 * size / seconds, above["anonymous"], above["rss"], idle])
        sheet.figures["policies"][policy] = {"seconds": seconds, **found}
        sheet.goal(
            f"{policy}, {learners} learners x {size:g} MB: memory of the controller", f"under {goal} models above idle",
            f"{above['rss']:.2f} models, {above['anonymous']:.2f} of them anonymous", above["rss"] < goal or size < 100,
            goal / above["rss"] if above["rss"] > 0 else None,
        )  # fmt: skip
    if not options.no_peers:
        against_nvflare(sheet, rows, size, learners, options.rounds)
    sheet.table(rows)
    with limited(LIMIT) as cgroup:
        if cgroup is None:
            sheet.say("No control group could be made, so no memory limit was tried.")
            return
        many, each = (3, 4.0) if options.quick else (50, 100.0)
        found = exchange(many, each, 2, "sync_fedavg", cgroup)
        sheet.figures["limited"] = found
        sheet.goal(
            f"{many} learners x {each:g} MB under a memory limit of {LIMIT / 1e9:g} GB", "rounds go on",
            f"{len(found['rounds'])} models published, peak of anonymous memory {found['peak']['anonymous']:.0f} MB",
            len(found["rounds"]) >= 2,
        )  # fmt: skip


def against_nvflare(sheet: Report, rows: list[list[Any]], size: float, learners: int, rounds: int) -> None:
    """One more row; with two learners if it cannot do with as many as Metis."""
    for count in dict.fromkeys((learners, 2)):
        asked = {"learners": count, "megabytes": size, "rounds": rounds, "memory": True}
        try:
            found = ask("nvflare", "nvflare_exchange", asked, timeout=900)
        except Unavailable as problem:
            reason = str(problem).partition(". ")[0]  # the rest is about folders of this machine
            sheet.say(f"NVFlare with {count} learners x {size:g} MB: {reason}.")
            continue
        sheet.figures["nvflare"] = {"learners": count, **found}
        seconds, above = median(found["rounds"]), (found["largest"] - found["idle"]) / size
        name = f"{version_of('nvflare')}, {count} learners"
        rows.append([name, seconds, 2 * size / seconds, "", above, round(found["idle"])])
        return


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, options)


if __name__ == "__main__":
    main()
