"""Models on disk, sealed and plain in the same run: written, read whole, and mixed in blocks from their files.

    python benchmarks/sealed.py [--quick] [--out FOLDER]

Writing is a blob of the state folder from memory, hashed and given its name, without waiting for the disk; reading is
the whole model; mixing is an average of ten such files, read in blocks. The two kinds take turns; the best of the
repeats counts, because noise of a shared machine only adds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _bench import Report, arguments, best, report

from metis.core.arithmetic import average
from metis.core.model import Layout, Model, TensorSpec
from metis.deployment.controller.durable import _FileRow
from metis.deployment.controller.state import State
from metis.deployment.storage import SealedStorage, Storage, choose
from metis.deployment.wire.models import model_parts, read_model
from metis.kernels import use_all_processors

MODELS = 10


def work(state: State, model: Model) -> dict[str, Callable[[], object]]:
    """What is timed, in a folder of its own."""
    layout = model.layout
    blobs = [state.put_blob(model_parts(model.with_vector(model.vector + np.float32(seed)))) for seed in range(MODELS)]
    rows = [(_FileRow(state.blob_path(blob), layout.size), 1.0) for blob in blobs]
    return {
        "write": lambda: state.put_blob(model_parts(model)),
        "read": lambda: float(read_model(state.blob_path(blobs[0]), layout).vector.sum()),
        "mix": lambda: average(layout.size, rows, float(MODELS)),
    }


def measure(sheet: Report, quick: bool) -> None:
    numbers, repeats = (10**5, 2) if quick else (25 * 10**5, 5)
    layout = Layout((TensorSpec("w", (numbers,)),))
    model = Model(layout, np.random.default_rng(1).standard_normal(numbers, np.float32))
    kinds = {"plain": Storage(), "sealed": SealedStorage(bytes(range(32)))}
    seconds: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for kind, storage in kinds.items():
            choose(storage)
            state = State.open(Path(folder) / kind, "process")
            jobs[kind] = work(state, model)
        for _ in range(repeats):
            for kind, storage in kinds.items():
                choose(storage)
                for name, job in jobs[kind].items():
                    seconds[kind][name] = min(seconds[kind].get(name, 1e9), best(job, 1))
        choose(Storage())
    megabytes = 4 * numbers / 1e6
    size = {"write": megabytes, "read": megabytes, "mix": MODELS * megabytes}
    rows = [["", "plain, MB/s", "sealed, MB/s", "sealed / plain, time"]]
    for name, amount in size.items():
        plain, sealed = seconds["plain"][name], seconds["sealed"][name]
        rows.append([name, f"{amount / plain:.0f}", f"{amount / sealed:.0f}", f"{sealed / plain:.2f}"])
    sheet.table(rows)
    sheet.say(f"Models of {megabytes:g} MB; {MODELS} of them are mixed.")
    sheet.figures = {"seconds": seconds, "megabytes": megabytes}


def main() -> None:
    options = arguments(__doc__).parse_args()
    use_all_processors()  # as the controller does
    with report(options, __doc__) as sheet:
        measure(sheet, options.quick)


if __name__ == "__main__":
    main()
