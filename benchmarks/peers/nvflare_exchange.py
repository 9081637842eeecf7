"""Seconds of each round of NVFlare's FedAvg with learners that do nothing, in its simulator (client processes, TCP).

With `memory` also the peak of the process that holds most, which is the server's, in MB, and what it held idle.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import simple
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv


class Watch(threading.Thread):
    """The resident memory of this process, idle, and the peak of it or of one that it has started, in MB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.idle = self.largest = psutil.Process().memory_info().rss / 1e6
        self.ended = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self.ended.wait(0.1):
            held = []
            for process in (me, *me.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    held.append(process.memory_info().rss / 1e6)
            self.largest = max(self.largest, *held)


def main() -> None:
    asked, watch = simple.spec(), Watch()
    watch.start()
    checkpoint, moments = Path("initial.npy").resolve(), Path("moments").resolve()
    np.save(checkpoint, np.concatenate(list(simple.layers(asked["megabytes"]).values())))
    os.environ["METIS_BENCHMARK_MOMENTS"] = str(moments)
    recipe = NumpyFedAvgRecipe(
        name="exchange", initial_ckpt=str(checkpoint), min_clients=asked["learners"], num_rounds=asked["rounds"] + 2,
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
    )  # fmt: skip
    recipe.execute(SimEnv(num_clients=asked["learners"], workspace_root=str(Path("workspace").resolve())))
    watch.ended.set()
    rounds = simple.rounds_of([float(line) for line in moments.read_text("utf-8").split()])
    memory = {"idle": watch.idle, "largest": watch.largest}
    simple.answer({"rounds": rounds, **memory} if asked.get("memory") else rounds)


if __name__ == "__main__":
    main()
