"""Start from a pretrained network: an instance, or a function that returns it, starts every policy alike."""

import numpy as np
import torch
from torch import nn

import metis

RNG = np.random.default_rng(1990)
x = RNG.normal(size=(800, 12)).astype(np.float32)
y = (x[:, :4].sum(1) > 0).astype(np.int64)

torch.manual_seed(1)
pretrained = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(pretrained.parameters(), lr=0.01)
for _ in range(30):  # on the data of one site, before the federation begins
    optimizer.zero_grad()
    nn.functional.cross_entropy(pretrained(torch.tensor(x[:100])), torch.tensor(y[:100])).backward()
    optimizer.step()


def federation(network) -> metis.Federation:
    return metis.Federation(
        network=network,
        train=(x[:600], y[:600]),
        test=(x[600:], y[600:]),
        learners=[
            metis.SimulatedLearner(f"site-{k}", part, batch_size=20, speed=metis.Speed(0.02 * (k + 1)))
            for k, part in enumerate(np.array_split(np.arange(600), 3))
        ],
        solver=metis.VanillaSGD(learning_rate=0.05),
    )


policies = [metis.sync_fedavg(local_epochs=1), metis.semisync_fedavg(slowest_learner_epochs=1), metis.fedrec(1)]
shas, starts = set(), []
for network in (pretrained, lambda: pretrained):
    ready = federation(network)
    shas.add(ready.initial_model.sha256())
    starts += [ready.simulate(policy, seconds=5).metric_values[0] for policy in policies]
print(f"the start of all {len(starts)} runs: accuracy {starts[0]:.3f}, {len(shas)} initial model")
