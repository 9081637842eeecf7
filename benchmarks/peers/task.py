"""The training that every system is given: the same networks, batches and steps. Needs torch and numpy only."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn


def small() -> nn.Module:
    """64-32-10: 2,410 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def medium() -> nn.Module:
    """pfl's CIFAR-10 network: two convolutions and two linear layers, 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


NETWORKS = {"small": small, "medium": medium}
SHAPES = {"small": (64,), "medium": (3, 32, 32)}


def initial(network: str) -> nn.Module:
    torch.manual_seed(1990)
    return NETWORKS[network]()


def train(
    network: nn.Module, inputs: Tensor, targets: Tensor, *, batch_size: int, epochs: int, learning_rate: float,
    momentum: float = 0.0, pace: float = 0.0, rng: np.random.Generator | None = None,
) -> float:  # fmt: skip
    """Plain SGD over shuffled batches, as one writes it by hand; a batch takes at least `pace` seconds."""
    rng = rng or np.random.default_rng()
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=momentum)
    loss_of, total = nn.CrossEntropyLoss(), 0.0
    network.train()
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(targets)))
        for batch in order.split(batch_size):
            began = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(network(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            total += loss.item()
            time.sleep(max(0.0, pace - (time.perf_counter() - began)))
    return total


@torch.inference_mode()
def accuracy(network: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    network.eval()
    return float((network(inputs).argmax(1) == targets).float().mean())
