"""Seconds of each round in pfl's simulation: FedAvg, all users in every cohort, one process or two by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types

import simple
import task
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Moments(TrainingProcessCallback):
    def __init__(self) -> None:
        self.moments = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.moments.append(time.perf_counter())
        return False, Metrics()


def loss(network, inputs, targets, eval=False):
    network.train(not eval)
    return torch.nn.functional.cross_entropy(network(inputs), targets)


def metrics(network, inputs, targets, eval=True):
    return {}


def main() -> None:
    asked = simple.spec()
    torch.set_num_threads(1)
    inputs, targets = simple.examples(task.SHAPES[asked["network"]])
    users = {
        n: [torch.from_numpy(inputs[part]), torch.from_numpy(targets[part])]
        for n, part in enumerate(simple.parts(asked["learners"], asked["examples"]))
    }
    dataset = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
    network = task.initial(asked["network"])
    network.loss, network.metrics = types.MethodType(loss, network), types.MethodType(metrics, network)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    watch = Moments()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=asked["rounds"] + 1, evaluation_frequency=10**9,
            train_cohort_size=asked["learners"], val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=None, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=asked["learning_rate"], local_num_epochs=1, local_batch_size=asked["batch_size"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[watch],
    )  # fmt: skip
    if int(os.environ.get("RANK", "0")) == 0:
        simple.answer(simple.rounds_of(watch.moments))


if __name__ == "__main__":
    if simple.spec()["processes"] == 1 or "RANK" in os.environ:
        main()
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launch, *sys.argv], check=True)
