"""A network, a share of the bundled digits, and a training loop that knows nothing of federations."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metis


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.out(F.relu(self.hidden(x)))


def load_data(partition_id, num_partitions, batch_size):
    digits = metis.load_dataset("digits")

    def share(x, y):
        inputs = torch.tensor(x[partition_id::num_partitions]).float().flatten(1) / 16
        return TensorDataset(inputs, torch.tensor(y[partition_id::num_partitions]).long())

    train, test = share(digits.x_train, digits.y_train), share(digits.x_test, digits.y_test)
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def train(net, loader, epochs, lr, seconds_per_batch=0.0):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total, batches = 0.0, 0
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            total, batches = total + loss.item(), batches + 1
            time.sleep(seconds_per_batch)  # a slower machine
    return total / batches


def test(net, loader):
    net.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for inputs, labels in loader:
            outputs = net(inputs)
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            right += (outputs.argmax(1) == labels).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)
