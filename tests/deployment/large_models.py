"""A controller's state with large models under a limit of its memory: `python large_models.py FOLDER POLICY`.

Two learners hand in models of 72 MB; then it is restarted from its snapshot. What may be allocated besides files is
half of such a model: a local model or a sum in ordinary memory ends it with a MemoryError. What is resident, pages of
files too, never grows by as much as a sum is (two models).
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from metis.core import policies
from metis.core.arithmetic import average
from metis.core.controller import Controller
from metis.core.events import LearnerJoined, UpdateRequest
from metis.core.layers import FedNova
from metis.core.layers.server_optimizers import FedAdam
from metis.core.mixing import ModelStore
from metis.core.model import Layout, Model, TensorSpec
from metis.deployment.controller.durable import DurableController
from metis.deployment.controller.state import State
from metis.deployment.wire.models import model_bytes, read_model
from metis.kernels import use_all_processors
from metis.system import keep_what_is_loaded

LAYOUT = Layout((TensorSpec("w", (18_000_000,)),))
PIECE = np.linspace(-1, 1, 250_000, dtype=np.float32)  # of which a model has 72
POLICIES = {
    "sync": policies.sync_fedavg(1),
    "semisync": policies.semisync(),
    "fedrec": policies.fedrec(1),
    "fedasync": policies.fedasync(1),
    "fedbuff": policies.fedbuff(1, buffer_size=2),
    "sync-nova-adam": policies.sync_fedavg(1).with_layers(FedNova()).with_layers(FedAdam()),
}


def parts(number: int) -> Iterator[memoryview]:
    for _ in range(0, model_bytes(LAYOUT), PIECE.nbytes):
        yield memoryview(PIECE * np.float32(number)).cast("B")


def memory(what: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) * 1024


def limit_memory(more: float) -> None:
    """Nothing can be allocated beyond what is in use now and so many bytes; files that are mapped do not count."""
    used = memory("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(more), used + int(more)))


def main(folder: Path, name: str) -> None:
    def make(model: Model, store: ModelStore) -> Controller:
        return Controller(POLICIES[name], model, learners_expected=2, store=store, models_checked=True)

    use_all_processors(in_service=True, scratch=folder)
    keep_what_is_loaded()
    average(10**6, [(np.ones(10**6, np.float32), 1.0)] * 3, 3.0)  # now there are threads
    state = State.open(folder, "process")
    initial = read_model(state.blob_path(state.put_blob(parts(0))), LAYOUT)
    limit_memory(0.5 * model_bytes(LAYOUT))
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    resident = memory("VmRSS")
    durable = DurableController(make, initial, state, lambda now, item: None, replay_at_most=3)
    now = 0.0
    for learner in ("anna", "ben"):
        durable.apply(durable.journal(LearnerJoined(learner, 100, 10), now))
    for number in range(1, 8):
        now += 1
        learner = ("anna", "ben")[number % 2]
        task = durable.open_task(learner)
        assert task is not None
        update = UpdateRequest(learner, task.number, 1, 0.5, 0.5, Model.empty(), 0.1)
        durable.apply(durable.journal(update, now, state.put_blob(parts(number))))
    before = durable.controller.community.model.sha256()
    state.close()
    del durable
    with State.open(folder, "process") as state:
        durable = DurableController(make, initial, state, lambda now, item: None, replay_at_most=3)
        assert durable.controller.community.model.sha256() == before
        assert durable.controller.community.stamp.version >= 3
    grown = (memory("VmHWM") - resident) / model_bytes(LAYOUT)
    assert grown < 1.5, f"{grown:.2f} models were resident"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
