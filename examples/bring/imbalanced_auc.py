"""A rare disease in a table: AUC and recall of the whole test set, as scikit-learn computes them on all predictions."""

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn

import metis

RNG = np.random.default_rng(1990)


def patients(count: int) -> tuple:
    """One in twenty is ill; the measures of each site are a little different."""
    ill = (RNG.random(count) < 0.05).astype(np.int64)
    return (RNG.normal(size=(count, 10)) + 0.7 * ill[:, None]).astype(np.float32), ill


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))


train, test = patients(1200), patients(600)
federation = metis.Federation(
    network=network,
    train=train,
    test=test,
    loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0])),
    metrics={"auc": "auc", "recall": "recall", "average_precision": average_precision_score},
    learners=[
        metis.SimulatedLearner(f"clinic-{k}", part, batch_size=50, speed=metis.Speed(0.02 * (k + 1)))
        for k, part in enumerate(np.array_split(np.arange(1200), 4))
    ],
    solver=metis.AdamW(learning_rate=0.01),
)
run = federation.simulate(metis.semisync_fedavg(slowest_learner_epochs=1), rounds=5)
print(run)

with torch.no_grad():  # the same by hand, from the final model and all predictions at once
    outputs = federation.engine.load(run.community_model)(torch.tensor(test[0]))
    by_hand = roc_auc_score(test[1], torch.softmax(outputs.double(), 1)[:, 1].numpy())
print(f"AUC of scikit-learn on the pooled predictions: {by_hand:.9f}")
assert abs(by_hand - run.final_metric) < 1e-9
