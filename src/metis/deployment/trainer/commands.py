"""What the parent, a learner or the controller, and the trainer's process say to each other.

The parent starts the process, never waits for it with its own thread, and survives whatever happens in it. They speak
JSON, one object a line: commands on the child's stdin, answers on its stdout. Models are files as in `wire`. What the
site's code prints goes to stderr. The end of stdin is the end of the child.

A command has an `id`, which its answers repeat, and is answered by exactly one line with `done`, `failed` or
`abandoned`. They are done one after the other.

    {"id": 1, "command": "prepare", "settings": {...}, "site": FILE or null, "name": NAME or null, "index": 0,
     "layout": [...] or null, "memory": FOLDER or null, "device": DEVICE or null, "pace": SECONDS or null,
     "privacy": {"settings": {...} or null, "ledger": FOLDER, "witness": FOLDER or null, "data": NAME or null,
                 "run": RUN} or absent}
    {"id": 1, "done": {"examples": 120, "batch_size": 16, "evaluation_examples": 30, "fingerprint": "9f2c...",
                       "layout": [...], "metric": "accuracy", "higher_is_better": true, "seed": 1990}}
        makes network and data, once for each run; a `layout` that the network does not have is a failure. `name`
        null is the controller: no training data, its held-out data to evaluate on. `memory` is where momentum and
        local buffers outlive the process. With `pace` each batch takes at least that long. `privacy` is what the site
        demands, and where its ledger is; of records that are protected, the answer has "private" and "steps_left".

    {"id": 2, "command": "train", "task": 7, "model": FILE, "steps": 240 or null, "seconds": 11.5 or null,
     "rate": 1.0, "batches_per_step": 1, "out": FILE, "seal": false}
    {"id": 2, "progress": {"task": 7, "steps": 31}}                      at most one a second
    {"id": 2, "done": {"task": 7, "steps": 240, "seconds": 10.9, "time_per_batch": 0.045, "loss": 0.31,
                       "sha256": "51ab...", "bytes": 4840, "compression_error": 0.004 or null}}
        trains until the budget ends, `seconds` counted from the arrival of the command; the local model is in `out`,
        or the part of it that is sent, durable. With `seal` it has a "seal" instead of a SHA-256. The failure of a
        training also has {"steps": 12, "seconds": 0.5}.

    {"id": 2, "command": "abandon"}
    {"id": 2, "abandoned": {"task": 7, "steps": 31}}
        ends the training with this id at the next batch; nothing happens if it has ended.

    {"id": 3, "command": "evaluate", "model": FILE}
    {"id": 3, "done": {"metrics": {"loss": 0.4, "accuracy": 0.88}, "examples": 30}}

    {"id": 4, "command": "initial", "seed": 1990 or null, "out": FILE}
    {"id": 4, "done": {"layout": [...], "fingerprint": "9f2c...", "sha256": "77e0...", "bytes": 4840}}
        writes the initial community model; null is the seed of the settings.

    {"id": 5, "command": "save", "model": FILE, "layout": [...], "out": FILE, "metadata": {"version": "9"}}
    {"id": 5, "done": {}}
        writes a model as safetensors under the network's own names; needs no `prepare`.

    {"id": 6, "command": "ping"}
    {"id": 6, "done": {}}

    {"id": 7, "failed": "site.py:12: ValueError: could not convert string to float: 'n/a'", "kind": "site_code",
     "details": "Traceback (most recent call last): ..."}
        the kind, one of `Cause` on the wire, is all that ever leaves the site
"""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any, BinaryIO


class Commands:
    """Commands as they come, read by a thread of its own so that a training can be ended."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], float] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._abandoned: int | None = None
        self._closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in iter(self._stream.readline, b""):
            arrived = time.monotonic()
            try:
                command = json.loads(line)
            except ValueError:
                command = None
            if not isinstance(command, dict):
                break  # such lines do not come from the parent of this child
            if command.get("command") == "abandon":
                with self._changed:
                    self._abandoned = command.get("id")
                    self._changed.notify_all()
            else:
                self._queue.put((command, arrived))
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)

    def next(self) -> tuple[dict[str, Any], float] | None:
        """The next command and when it arrived; None when there will be none."""
        return self._queue.get()

    def unwanted(self, command: int, seconds: float) -> bool:
        """Whether this command was abandoned or the parent is gone; waits up to `seconds` for that to happen."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or self._abandoned == command, max(0.0, seconds))


class Answers:
    """Answers, one line each."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, **answer: Any) -> None:
        self._stream.write(json.dumps(answer, allow_nan=False).encode() + b"\n")
        self._stream.flush()
