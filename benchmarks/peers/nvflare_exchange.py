"""Seconds of each round of NVFlare's FedAvg with learners that do nothing, in its simulator (client processes, TCP)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import simple
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv


def main() -> None:
    asked = simple.spec()
    checkpoint, moments = Path("initial.npy").resolve(), Path("moments").resolve()
    np.save(checkpoint, np.concatenate(list(simple.layers(asked["megabytes"]).values())))
    os.environ["METIS_BENCHMARK_MOMENTS"] = str(moments)
    recipe = NumpyFedAvgRecipe(
        name="exchange", initial_ckpt=str(checkpoint), min_clients=1, num_rounds=asked["rounds"] + 2,
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
    )  # fmt: skip
    recipe.execute(SimEnv(num_clients=1, workspace_root=str(Path("workspace").resolve())))
    simple.answer(simple.rounds_of([float(line) for line in moments.read_text("utf-8").split()]))


if __name__ == "__main__":
    main()
