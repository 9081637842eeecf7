"""A small U-Net that segments bright discs, judged by the Dice coefficient of all pixels of the test set."""

import numpy as np
import torch
from torch import nn

import metis

SIDE, RNG = 16, np.random.default_rng(1990)


def disc() -> tuple:
    """An image and its mask."""
    y, x = np.mgrid[:SIDE, :SIDE]
    row, column, radius = RNG.uniform(4, SIDE - 4), RNG.uniform(4, SIDE - 4), RNG.uniform(2, 4)
    mask = (y - row) ** 2 + (x - column) ** 2 < radius**2
    image = 1.5 * mask + RNG.normal(size=mask.shape)
    return torch.tensor(image, dtype=torch.float32)[None], torch.tensor(mask)[None].float()


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = block(1, 8), block(8, 16), block(24, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images):
        fine = self.down(images)
        coarse = self.middle(nn.functional.max_pool2d(fine, 2))
        return self.head(self.up(torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2)], 1)))


def dice_and_entropy(outputs, targets):
    found = torch.sigmoid(outputs)
    overlap = 2 * (found * targets).sum() / (found.sum() + targets.sum() + 1)
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets) + 1 - overlap


federation = metis.Federation(
    network=UNet,
    train=[disc() for _ in range(120)],
    test=[disc() for _ in range(40)],
    loss=dice_and_entropy,
    metrics=["dice", "precision", "recall"],
    learners=[
        metis.SimulatedLearner(f"site-{k}", part, batch_size=10, speed=metis.Speed(0.1 * (k + 1)))
        for k, part in enumerate(np.array_split(np.arange(120), 2))
    ],
    solver=metis.AdamW(learning_rate=0.01, keep_state=True),
)
run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=2), rounds=5)
print(run)
