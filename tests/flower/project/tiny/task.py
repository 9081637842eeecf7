"""Two classes in the plane, one linear layer, and a plain training loop."""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.out(self.norm(x))


def load_data(partition_id, num_partitions, batch_size):
    generator = torch.Generator().manual_seed(partition_id)
    labels = torch.arange(40 + 10 * partition_id) % 2
    inputs = torch.randn(len(labels), 2, generator=generator) + 2.0 * labels[:, None]
    data = TensorDataset(inputs, labels)
    return DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size=batch_size)


def train(net, loader, epochs, lr):
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
