"""Personalised heads (FedPer): hospitals that code a finding in opposite ways share an encoder, not the last layer.

Or they share a whole model and each keeps one of its own beside it (Ditto, APFL).
"""

import numpy as np
from torch import nn

import metis

RNG = np.random.default_rng(1990)
x = RNG.normal(size=(600, 10)).astype(np.float32)
y = (x[:, :3].sum(1) > 0).astype(np.int64)
y[300:] = 1 - y[300:]  # the second hospital says 0 where the first one says 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.head = nn.Linear(32, 2)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def simulate(**kept) -> metis.Run:
    federation = metis.Federation(
        network=Net,
        train=(x, y),
        test=(x, y),
        learners=[
            metis.SimulatedLearner(name, own[:240], 20, metis.Speed(speed), test=own[240:])
            for name, own, speed in (("north", np.arange(300), 0.02), ("south", np.arange(300, 600), 0.1))
        ],
        solver=metis.AdamW(learning_rate=0.01, keep_state=True),
        **kept,
    )
    return federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=1), rounds=8)


shared, personal = simulate(), simulate(parameters={"local": ["head.*"]})
ditto, apfl = simulate(personal=metis.Ditto(pull=0.01)), simulate(personal=metis.APFL(share=0.9))
print("one head for both:", shared)
print("a head for each:  ", personal)
print("a model for each: ", ditto)
print("a mixture:        ", apfl)
print(f"bytes of a model: {shared.setting.model_bytes:,} and {personal.setting.model_bytes:,}")
