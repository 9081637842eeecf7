"""What a learner keeps between tasks, in memory and on disk."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from metis.deployment.storage import storage
from metis.errors import DataError

if TYPE_CHECKING:
    from metis.core.layers import Memory


class Memories:
    """What a learner keeps between tasks, after each of the last two.

    Two, so that a task that is given again starts from the memory that it started from the first time.
    """

    def __init__(self, folder: Path | None, *, writes: bool = True) -> None:
        self._folder = folder if writes else None
        self._kept: dict[int, Memory] = {}  # by task
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            found = re.fullmatch(r"task-(\d+)\.safetensors", path.name)
            if found is None:
                continue
            try:
                self._kept[int(found.group(1))] = storage().load_arrays(path)[0]
            except DataError as problem:  # cut off by a loss of power
                sys.stderr.write(f"{problem}; the learner starts without it\n")

    def before(self, task: int) -> Memory | None:
        earlier = [number for number in self._kept if number < task]
        return self._kept[max(earlier)] if earlier else None

    def latest(self) -> Memory | None:
        return self._kept[max(self._kept)] if self._kept else None

    def keep(self, task: int, memory: Memory) -> None:
        if not memory:
            return
        self._kept[task] = memory
        stale = sorted(self._kept)[:-2]
        for number in stale:
            del self._kept[number]
        if self._folder is None:
            return
        try:
            storage().save_arrays(self._folder / f"task-{task}.safetensors", memory, {})
            for number in stale:
                (self._folder / f"task-{number}.safetensors").unlink(missing_ok=True)
        except (OSError, SafetensorError) as problem:  # the local model is what matters; this is still in memory
            sys.stderr.write(f"the learner's memory cannot be written to {self._folder}: {problem}\n")
