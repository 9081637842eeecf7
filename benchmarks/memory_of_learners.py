"""Memory of a simulation against the number of learners, with the disk store.

    python benchmarks/memory_of_learners.py

Each federation runs in its own process: bundled digits dealt with repetition to N learners, a small network,
two synchronous rounds and one asynchronous pass. Resident memory is the peak of the process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SIZES = (10, 100, 1000)


def peak_megabytes(learners: int, policy: str) -> float:
    import metis
    from metis.learning import mlp

    digits = metis.load_dataset("digits")
    inputs = digits.x_train.astype(np.float32) / 16
    rng = np.random.default_rng(1990)
    federation = metis.Federation(
        network=lambda: mlp((8, 8), 10, hidden=(128,)),
        train=(inputs, digits.y_train),
        learners=[
            metis.SimulatedLearner(f"learner-{n}", rng.choice(len(inputs), 40, replace=False), 20, metis.Speed(0.1))
            for n in range(learners)
        ],
        solver=metis.MomentumSGD(0.05, 0.75),
    )
    with tempfile.TemporaryDirectory() as folder:
        federation.simulate(
            getattr(metis, policy)(local_epochs=1), update_requests=2 * learners, store="disk", out=Path(folder)
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    if len(sys.argv) == 3:
        print(peak_megabytes(int(sys.argv[1]), sys.argv[2]))
        return
    print("policy        learners  peak RSS, MB")
    for policy in ("sync_fedavg", "fedrec"):
        for learners in SIZES:
            command = [sys.executable, __file__, str(learners), policy]
            peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"{policy:12}  {learners:8}  {peak:8.0f}")


if __name__ == "__main__":
    main()
