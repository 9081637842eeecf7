"""What a script of NVFlare's Client API costs a task besides its training: one that returns what it receives.

    python benchmarks/nvflare/overhead.py

For a small model and for one of 100 MB, in one run: the script through the bridge, next to a copy of the model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import metis
from metis.learning import Learner
from metis.learning.engine import EngineJob
from metis.nvflare.engine import NVFlareEngine, NVFlareExamples, client_of
from metis.nvflare.source import NVFlareSource

SCRIPT = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    received = flare.receive()
    flare.send(flare.FLModel(params=received.params, metrics={"loss": 0.0}, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""


def measure(numbers: int, repeats: int = 7) -> tuple[float, float]:
    """Median seconds of a task, and of a copy of the model."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "train.py").write_text(SCRIPT, "utf-8")
        made = f"import torch\n\n\ndef start():\n    return {{'w': torch.zeros({numbers})}}\n"
        (folder / "start.py").write_text(made, "utf-8")
        spec = NVFlareSource(str(folder / "train.py"), network="start.py:start", learners=("site-1",)).spec
        engine = NVFlareEngine(EngineJob(network=lambda: client_of(spec)))
        examples = NVFlareExamples(spec, "site-1")
        learner = Learner("site-1", 0, examples, np.arange(len(examples)), 1, metis.VanillaSGD(0.1))
        model = engine.initial_model(0)
        tasks, copies = [], []
        for number in range(repeats):
            started = time.perf_counter()
            learner.train(engine, model, number, 1)
            between = time.perf_counter()
            model.vector.copy()
            tasks.append(between - started)
            copies.append(time.perf_counter() - between)
    return statistics.median(tasks), statistics.median(copies)


if __name__ == "__main__":
    for numbers in (10_000, 25_000_000):
        task, copy = measure(numbers)
        print(f"{4 * numbers / 1e6:g} MB: a task {1e3 * task:.1f} ms, a copy of the model {1e3 * copy:.2f} ms")
