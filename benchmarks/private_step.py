"""How long a step of DP-SGD takes, compared with a plain one: ghost clipping, explicit gradients, and Opacus.

python benchmarks/private_step.py [--json]
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _bench import arguments, report
from torch import nn

from metis.core.solvers import VanillaSGD
from metis.learning.private import PrivateStep
from metis.learning.torch.engine import TorchEngine
from metis.privacy.chance import SystemChance

BATCH, STEPS, REPEATS = 64, 4, 5


def cnn() -> nn.Module:
    """Two convolutions with GroupNorm and two linear layers, for images of 28 x 28 pixels: 156,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 90), nn.ReLU(), nn.Linear(90, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """Two hidden layers for the same images: 242,000 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def seconds(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Of one step, by way: the fastest of several measurements in turn, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, train in ways.items():
            began = time.perf_counter()
            train()
            if repeat:
                times[name].append((time.perf_counter() - began) / STEPS)
    return {name: min(found) for name, found in times.items()}


def measure(network: Callable[[], nn.Module], peers: bool) -> dict[str, float]:
    """Seconds of a step, by how it is made."""
    rng = np.random.default_rng(1)
    batch = (
        torch.from_numpy(rng.normal(size=(BATCH, 1, 28, 28)).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 10, BATCH)),
    )
    solver = VanillaSGD(0.1)

    def plain(engine: TorchEngine) -> Callable[[], Any]:
        model = engine.initial_model(1)
        return lambda: engine.train(model, itertools.repeat(batch, STEPS), solver)

    def private(engine: TorchEngine) -> Callable[[], Any]:
        model, chance = engine.initial_model(1), SystemChance()
        return lambda: engine.train(
            model, (PrivateStep(iter([batch]), 1.0, 1.0, 1.0, BATCH, chance) for _ in range(STEPS)), solver
        )

    explicit = TorchEngine(network)
    explicit._private._ghost = False
    ways = {
        "plain": plain(TorchEngine(network)),
        "ghost": private(TorchEngine(network)),
        "explicit": private(explicit),
    }
    try:
        import opacus
    except ImportError:
        peers = False
    if not peers:
        return seconds(ways)
    ways |= {
        name: _opacus(opacus, network, batch, mode) for name, mode in (("opacus", "hooks"), ("opacus ghost", "ghost"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return seconds(ways)


def _opacus(opacus: Any, network: Callable[[], nn.Module], batch: Any, mode: str) -> Callable[[], Any]:
    module = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=BATCH)
    made = opacus.PrivacyEngine().make_private(
        module=module, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode=mode, **({"criterion": criterion} if mode == "ghost" else {}),
    )  # fmt: skip
    module, optimizer = made[0], made[1]
    loss_of = made[2] if mode == "ghost" else criterion

    def train() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(module(batch[0]), batch[1]).backward()
            optimizer.step()

    return train


def main() -> None:
    global STEPS, REPEATS
    options = arguments(__doc__).parse_args()
    if options.quick:
        STEPS, REPEATS = 1, 1
    torch.set_num_threads(1)
    with report(options, __doc__) as made:
        rows: list[list[str]] = [["network", "step", "ms", "times plain"]]
        for name, network in (("cnn", cnn), ("mlp", mlp)):
            found = measure(network, peers=not options.no_peers)
            made.figures[name] = found
            rows += [[name, way, f"{1000 * time:.2f}", f"{time / found['plain']:.2f}"] for way, time in found.items()]
        made.table(rows)
        ratio = made.figures["cnn"]["ghost"] / made.figures["cnn"]["plain"]
        made.goal("a private step of a CNN, over a plain one", "at most 2.2", f"{ratio:.2f}", ratio <= 2.2)
        made.say(
            "The noise comes from the operating system and costs the same for any batch: it is most of the MLP's step."
        )


if __name__ == "__main__":
    main()
