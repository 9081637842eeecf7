"""A script of NVFlare's Client API; it knows nothing of Metis."""

import argparse

import numpy as np
import nvflare.client as flare
import torch
from model import Net
from torch.utils.data import DataLoader, TensorDataset


def records(site, count=160):
    rng = np.random.default_rng([ord(letter) for letter in site])
    x = rng.normal(size=(count, 8)).astype(np.float32)
    weights = np.random.default_rng(0).normal(size=(8, 3))
    return TensorDataset(torch.from_numpy(x), torch.from_numpy((x @ weights).argmax(1)))


def accuracy(net, loader):
    net.eval()
    with torch.no_grad():
        return float(np.mean([(net(x).argmax(1) == y).float().mean() for x, y in loader]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    flare.init()
    train = DataLoader(records(flare.get_site_name()), batch_size=16, shuffle=True)
    test = DataLoader(records("held out"), batch_size=64)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    while flare.is_running():
        received = flare.receive()
        net.load_state_dict(received.params)
        metrics = {"accuracy": accuracy(net, test)}
        if flare.is_evaluate():
            flare.send(flare.FLModel(metrics=metrics))
            continue
        net.train()
        for _ in range(args.epochs):
            for x, y in train:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
        steps = args.epochs * len(train)
        flare.send(flare.FLModel(params=net.state_dict(), metrics=metrics, meta={"NUM_STEPS_CURRENT_ROUND": steps}))


if __name__ == "__main__":
    main()
