"""FedBN: scanners differ in brightness and contrast, so each site keeps its own BatchNorm layers."""

import numpy as np
from torch import nn

import metis

RNG, SITES, EACH = np.random.default_rng(1990), 4, 200
CONTRAST, BRIGHTNESS = (1.0, 4.0, 0.3, 2.0), (0.0, 5.0, -3.0, 9.0)


def scans(site: int) -> tuple:
    signal = RNG.normal(size=(EACH, 8))
    labels = (signal[:, :4].sum(1) > 0).astype(np.int64)
    return (CONTRAST[site] * signal + BRIGHTNESS[site]).astype(np.float32), labels


def network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


parts = [scans(site) for site in range(SITES)]
data = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def simulate(parameters: dict | None) -> metis.Run:
    federation = metis.Federation(
        network=network,
        parameters=parameters,
        train=data,
        test=data,
        learners=[
            metis.SimulatedLearner(
                f"scanner-{site}",
                np.arange(site * EACH, site * EACH + 150),
                batch_size=25,
                speed=metis.Speed(0.05 * (site + 1)),
                test=np.arange(site * EACH + 150, (site + 1) * EACH),  # held out in each site
            )
            for site in range(SITES)
        ],
        solver=metis.MomentumSGD(learning_rate=0.05, momentum=0.9),
    )
    return federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=1), rounds=6)


averaged, fedbn = simulate(None), simulate({"local": ["0.*", "2.*"]})
print("all layers averaged:", averaged)
print("FedBN:              ", fedbn)
