"""LoRA: the base model stays as it is at every site, only the adapters are trained and travel.

With the package peft, `get_peft_model(base, LoraConfig(...))` makes such a network; its names contain `lora_` too.
"""

import numpy as np
import torch
from torch import nn

import metis

RNG, WORDS, RANK = np.random.default_rng(1990), 30, 2
tokens = RNG.integers(0, WORDS, size=(500, 12))
labels = ((tokens < WORDS // 2).mean(1) > 0.5).astype(np.int64)


class Adapted(nn.Module):
    """A linear layer and a change of low rank, which begins at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_down = nn.Parameter(0.1 * torch.randn(RANK, base.in_features))
        self.lora_up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, inputs):
        return self.base(inputs) + inputs @ self.lora_down.T @ self.lora_up.T


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(WORDS, 32), nn.Parameter(torch.randn(12, 32))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow = Adapted(nn.Linear(32, 128)), Adapted(nn.Linear(128, 32))
        self.head = Adapted(nn.Linear(32, 2))

    def forward(self, inputs):
        hidden = self.embedding(inputs) + self.place
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head((hidden + self.narrow(torch.relu(self.wide(hidden)))).mean(1))


torch.manual_seed(7)
pretrained = Transformer()
federation = metis.Federation(
    network=pretrained,
    parameters={"federated": ["*lora_*"]},  # given alone: everything else is frozen
    train=(tokens[:400], labels[:400]),
    test=(tokens[400:], labels[400:]),
    learners=[metis.SimulatedLearner(f"s{k}", np.arange(200) + 200 * k, 20, metis.Speed(0.1)) for k in (0, 1)],
    solver=metis.AdamW(learning_rate=0.02, keep_state=True),
)
run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=2), rounds=4)
adapters = sum(p.numel() for name, p in pretrained.named_parameters() if "lora_" in name)
whole = sum(p.numel() for p in pretrained.parameters())
print(run)
print(f"{4 * adapters:,} bytes travel each way, of {4 * whole:,}")
