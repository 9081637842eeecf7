"""A LightningModule as a site: its own training_step computes the loss; the solver of the federation's file steps."""

import numpy as np
import torch
from pytorch_lightning import LightningModule


class Ward(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


network = Ward


def step(module, batch):
    return module.training_step(batch, 0), module(batch[0]), batch[1]


def training_data(site):
    rng = np.random.default_rng(len(site))
    x = rng.normal(size=(120, 8)).astype(np.float32)
    return x, (x[:, :3].sum(1) > 0).astype(np.int64)


def evaluation_data(site):
    return training_data(site + " held out")
