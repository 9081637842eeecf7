"""Fill a small disk and go on when there is room again; run by test_state on a tmpfs of its own.

    python full_disk.py FOLDER BALLAST

BALLAST is a file on the same disk; removing it makes room. Prints one line of JSON: what was acknowledged and when.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from metis.deployment.controller.state import State
from metis.errors import DiskFull, StateError


def until_full(work: Callable[[int], None], first: int, most: int = 5000) -> int:
    """How often it worked before there was no room."""
    for number in range(first, first + most):
        try:
            work(number)
        except DiskFull:
            return number - first
    raise AssertionError("the disk does not get full")


def main(folder: Path, ballast: Path) -> None:
    state = State.open(folder)
    state.begin({})
    acknowledged: dict[int, str | None] = {}

    def update(number: int) -> None:
        with state.incoming() as incoming:
            incoming.write(f"model {number} ".encode() * 500)
            blob = incoming.commit(incoming.bytes, incoming.checksum)
        state.append(float(number), {"task": number}, update=number, blob=blob)
        acknowledged[number] = blob

    def event(number: int) -> None:
        state.append(float(number), {"text": "x" * 500}, update=number)
        acknowledged[number] = None

    def snapshot(number: int) -> None:
        state.write_snapshot(state.last_seq(), {"w": np.arange(3000.0) + number}, {"number": number})

    counts = {"updates": until_full(update, 1), "events": until_full(event, 10_001)}
    counts["snapshots"] = until_full(snapshot, 1)
    left = sorted(path.name for path in (folder / "blobs").glob("tmp.*"))
    left += [p.name for p in (folder / "snapshots").iterdir() if p.name not in {s.arrays for s in state.snapshots()}]
    read_while_full = len(list(state.entries()))
    state.close()
    try:
        State.open(folder).close()
    except StateError as problem:
        refusal = str(problem)
    else:
        refusal = ""
    ballast.unlink()
    state = State.open(folder)
    update(20_001)
    event(20_002)
    snapshot(20_003)
    last = state.last_seq()
    state.close()
    with State.open(folder) as again:
        kept = {entry.update: entry.blob for entry in again.entries()}
        whole = all(again.verify_blob(blob) for blob in kept.values() if blob is not None)
        result = {
            **counts,
            "left": left,
            "read_while_full": read_while_full,
            "refusal": refusal,
            "last": [last, again.last_seq()],
            "lost": sum(kept.get(number, "") != blob for number, blob in acknowledged.items()),
            "whole": whole,
            "snapshot": again.snapshots()[0].facts["number"],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
