"""A controller in miniature, to be killed: receives updates, publishes versions, takes snapshots, collects.

    python crash_driver.py FOLDER UPDATES [DURABILITY]

Goes on from what FOLDER holds until that many updates are journaled. Prints `ACK number sha256` after each durable
append and `DONE` at the end. Exit codes as the real one: 2 if the folder cannot be opened, 74 if the disk failed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from metis.deployment.controller.state import Durability, State
from metis.errors import DiskFull, StateError
from metis.runs.storage import save_arrays  # noqa: F401  (so that no module is opened after the folder was)

LEARNERS = 3
SNAPSHOT_EVERY = 3


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def local_model(number: int) -> bytes:
    """What the learner hands in for this task."""
    return f"local model {number} ".encode() * 40


def community_model(number: int) -> bytes:
    """Version `number`, a function of that many first updates."""
    if number == 1:
        return local_model(1)  # of one learner: the same bytes, so the same file
    return b"".join(hashlib.sha256(local_model(n)).digest() for n in range(1, number + 1))


def receive(state: State, number: int) -> None:
    model, record = local_model(number), {"event": "update_request", "task": number}
    blob = hashlib.sha256(model).hexdigest()
    if number % 2:
        with state.incoming() as incoming:
            incoming.write(model[:100])
            incoming.write(model[100:])
            incoming.commit(len(model), blob)
        state.append(float(number), record, update=number, blob=blob)
    else:  # with its content in the journal
        with state.together():
            state.append(float(number), record, update=number, blob=blob, content=model)
    say(f"ACK {number} {blob}")


def publish(state: State, number: int) -> None:
    blob = state.put_blob([memoryview(community_model(number))], durable=False)  # it can be computed again
    state.append(float(number), {"published": number, "sha256": blob})


def latest(state: State) -> dict[str, str]:
    """Every learner's last local model, and the last community model."""
    blobs: dict[str, str] = {}
    for entry in state.entries():
        if entry.update is not None and entry.blob is not None:
            blobs[str(entry.update % LEARNERS)] = entry.blob
        elif "published" in entry.record:
            blobs["community"] = entry.record["sha256"]
    return blobs


def snapshot(state: State) -> None:
    needed = latest(state)
    state.write_snapshot(state.last_seq(), {"sum": np.arange(20.0)}, {"needed": needed}, set(needed.values()))
    state.collect([])


def step(state: State, number: int) -> None:
    """Whatever of this update is not done yet: a full disk may have stopped it anywhere."""
    if state.find(number) is None:
        receive(state, number)
    if not any(entry.record.get("published") == number for entry in state.entries()):
        publish(state, number)
    if number % SNAPSHOT_EVERY == 0:
        snapshot(state)


def main(folder: Path, updates: int, durability: Durability = "power") -> int:
    try:
        state = State.open(folder, durability)
    except StateError as problem:
        os.write(2, f"error: {problem}\n".encode())
        return 2
    say(f"OPEN {state.epoch}")
    number = 0
    while number < updates:
        try:
            if state.facts() is None:
                state.begin({"updates": updates})
            step(state, number + 1)
        except DiskFull:
            say("FULL")
        else:
            number += 1
    state.close()
    say("DONE")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))  # type: ignore[arg-type]
