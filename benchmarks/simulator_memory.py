"""Memory of a simulation against the number of learners and the size of the model, with both stores.

    python benchmarks/simulator_memory.py [--quick] [--out FOLDER]

Each federation runs in its own process: bundled digits dealt with repetition to N learners, a network of one hidden
layer, two updates a learner. Resident memory is the peak of the process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _bench import Report, arguments, report

HIDDEN = {128: 9_610, 13_000: 975_010}  # units, and the numbers of the model that they make
SIZES = ((10, 128), (100, 128), (1000, 128), (10, 13_000), (100, 13_000))  # learners, units


def peak_megabytes(learners: int, hidden: int, policy: str, store: str) -> float:
    import metis
    from metis.learning import mlp

    digits = metis.load_dataset("digits")
    inputs = digits.x_train.astype(np.float32) / 16
    rng = np.random.default_rng(1990)
    federation = metis.Federation(
        network=lambda: mlp((8, 8), 10, hidden=(hidden,)),
        train=(inputs, digits.y_train),
        learners=[
            metis.SimulatedLearner(f"learner-{n}", rng.choice(len(inputs), 40, replace=False), 20, metis.Speed(0.1))
            for n in range(learners)
        ],
        solver=metis.MomentumSGD(0.05, 0.75),
    )
    with tempfile.TemporaryDirectory() as folder:
        federation.simulate(
            getattr(metis, policy)(local_epochs=1), update_requests=2 * learners, store=store, out=Path(folder)
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(sheet: Report, quick: bool) -> None:
    ways = [(policy, store) for policy in ("sync_fedavg", "fedrec") for store in ("memory", "disk")]
    rows: list[list[object]] = [["learners", "numbers", *(f"{policy}, {store}, MB" for policy, store in ways)]]
    for learners, hidden in SIZES[:1] if quick else SIZES:
        peaks = {}
        for policy, store in ways[:2] if quick else ways:
            command = [sys.executable, __file__, "--peak", str(learners), str(hidden), policy, store]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[policy, store] = float(done.stdout)
        rows.append([learners, HIDDEN[hidden], *(round(peaks[way]) if way in peaks else "-" for way in ways)])
        sheet.figures[f"{learners}x{HIDDEN[hidden]}"] = {", ".join(way): peak for way, peak in peaks.items()}
    sheet.table(rows)


def main() -> None:
    options = arguments(__doc__).parse_args()
    with report(options, __doc__) as sheet:
        measure(sheet, options.quick)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--peak":
        print(peak_megabytes(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]))
    else:
        main()
