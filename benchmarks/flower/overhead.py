"""What the bridge costs in a round: the model into a Flower message, the client that only echoes it, and back.

    python benchmarks/flower/overhead.py

For a model of 100 MB and for a small one, in one run, in seconds of processor time; next to it Flower's own encoding
and decoding of the same arrays, which every message in a Flower deployment pays on both sides.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    numbers = MetricRecord({"num-examples": 100, "loss": 0.5})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": numbers}), reply_to=message)
"""


def timed(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def measured(label: str, tensors: int, size: int, repeats: int, folder: Path) -> dict[str, Any]:
    from flwr.app import Array, ArrayRecord, RecordDict
    from safetensors.numpy import save_file

    from metis.core.events import Budget
    from metis.core.solvers import VanillaSGD
    from metis.flower.engine import FlowerEngine, FlowerExamples, client_of
    from metis.flower.project import FlowerSource
    from metis.flower.records import state_bytes, state_of
    from metis.learning.engine import Allotted, EngineJob

    rng = np.random.default_rng(0)
    arrays = {f"w{index}": rng.normal(size=size).astype(np.float32) for index in range(tensors)}
    start = folder / f"{tensors}.safetensors"
    save_file(arrays, start)
    source = FlowerSource(str(folder / "echo.py"), ("a",), start=str(start))
    engine = FlowerEngine(EngineJob(network=lambda: client_of(source.spec)))
    model, examples = engine.initial_model(0), FlowerExamples(source.spec, "a")

    def bridge() -> None:
        turn = examples.batch(np.arange(1))
        engine.train(model, Allotted(iter([turn]), Budget(1)), VanillaSGD(0.1))

    def content() -> RecordDict:
        return RecordDict({"arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()})})

    sent = state_bytes(content())
    return {
        "model": label,
        "bridge": timed(bridge, repeats),
        "flower_encodes": timed(lambda: state_bytes(content()), repeats),
        "flower_decodes": timed(lambda: [one.numpy() for one in state_of(sent)["arrays"].values()], repeats),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "echo.py").write_text(CLIENT, encoding="utf-8")
        for label, tensors, size, repeats in (("100 MB", 100, 250_000, 5), ("40 kB", 4, 2_500, 50)):
            row = measured(label, tensors, size, repeats, folder)
            print(json.dumps({key: value if isinstance(value, str) else round(value, 6) for key, value in row.items()}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
