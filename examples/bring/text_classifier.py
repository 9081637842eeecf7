"""A transformer that classifies texts of different lengths: padding in collate, AdamW, no decay for biases."""

import numpy as np
import torch
from torch import nn

import metis

WORDS, LEARNERS, RNG = 40, 3, np.random.default_rng(1990)


def sentence() -> dict:
    """The label is whether the first half of the vocabulary prevails."""
    tokens = RNG.integers(1, WORDS, size=RNG.integers(5, 15))
    return {"tokens": torch.tensor(tokens), "label": int((tokens < WORDS // 2).mean() > 0.5)}


def pad(items: list) -> dict:
    tokens = nn.utils.rnn.pad_sequence([item["tokens"] for item in items], batch_first=True)
    return {"tokens": tokens, "mask": tokens == 0, "label": torch.tensor([item["label"] for item in items])}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
        self.head = nn.Linear(32, 2)

    def forward(self, tokens, mask):
        hidden = self.layer(self.embedding(tokens), src_key_padding_mask=mask)
        return self.head(hidden.masked_fill(mask.unsqueeze(-1), 0).sum(1) / (~mask).sum(1, keepdim=True))


federation = metis.Federation(
    network=Classifier,
    train=[sentence() for _ in range(600)],
    test=[sentence() for _ in range(200)],
    collate=pad,
    metrics=["accuracy", "f1"],
    learners=[
        metis.SimulatedLearner(f"site-{k}", part, batch_size=20, speed=metis.Speed(0.05 * (k + 1)))
        for k, part in enumerate(np.array_split(np.arange(600), LEARNERS))
    ],
    solver=metis.TorchOptimizer(
        torch.optim.AdamW,
        lr=0.003,
        weight_decay=0.05,
        groups=[{"parameters": ["*.bias", "*norm*"], "weight_decay": 0.0}],
        keep_state=True,
    ),
    clip_norm=1.0,
)
run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=1), rounds=6)
print(run)
