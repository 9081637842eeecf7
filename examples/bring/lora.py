"""LoRA by the package peft: the base model stays as it is at every site, only the adapters are trained and travel."""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import metis

RNG, WORDS = np.random.default_rng(1990), 30
tokens = RNG.integers(0, WORDS, size=(500, 12))
labels = ((tokens < WORDS // 2).mean(1) > 0.5).astype(np.int64)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(WORDS, 32), nn.Parameter(torch.randn(12, 32))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.wide, self.narrow, self.head = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 2)

    def forward(self, inputs):
        hidden = self.embedding(inputs) + self.place
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head((hidden + self.narrow(torch.relu(self.wide(hidden)))).mean(1))


torch.manual_seed(7)
pretrained = Transformer()  # yours comes from a file
adapted = get_peft_model(pretrained, LoraConfig(r=2, target_modules=["wide", "narrow", "head"]))
federation = metis.Federation(
    network=adapted,
    parameters={"federated": ["*lora_*"]},  # given alone: everything else is frozen
    train=(tokens[:400], labels[:400]),
    test=(tokens[400:], labels[400:]),
    learners=[metis.SimulatedLearner(f"s{k}", np.arange(200) + 200 * k, 20, metis.Speed(0.1)) for k in (0, 1)],
    solver=metis.AdamW(learning_rate=0.02, keep_state=True),
)
run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=2), rounds=4)
adapters = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
whole = sum(p.numel() for p in adapted.parameters())
print(run)
print(f"{4 * adapters:,} bytes travel each way, of {4 * whole:,}")
