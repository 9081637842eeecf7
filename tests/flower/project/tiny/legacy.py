"""The same client as a NumPyClient, with a legacy strategy."""

import torch
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp

from tiny.task import Net, load_data, test, train


def weights(net):
    return [value.cpu().numpy() for value in net.state_dict().values()]


class Client(NumPyClient):
    def __init__(self, context):
        node = context.node_config
        self.net = Net()
        self.loader, self.held_out = load_data(node["partition-id"], node["num-partitions"], 10)

    def set(self, parameters):
        names = self.net.state_dict().keys()
        self.net.load_state_dict({n: torch.tensor(v) for n, v in zip(names, parameters, strict=True)})

    def get_parameters(self, config):
        return weights(self.net)

    def fit(self, parameters, config):
        self.set(parameters)
        loss = train(self.net, self.loader, int(config.get("epochs", 1)), 0.1)
        return weights(self.net), len(self.loader.dataset), {"train_loss": loss}

    def evaluate(self, parameters, config):
        self.set(parameters)
        loss, accuracy = test(self.net, self.held_out)
        return loss, len(self.held_out.dataset), {"accuracy": accuracy}


app = ClientApp(client_fn=lambda context: Client(context).to_client())


def server_fn(context):
    strategy = FedAvg(
        initial_parameters=ndarrays_to_parameters(weights(Net())),
        on_fit_config_fn=lambda server_round: {"epochs": 2},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))


server = ServerApp(server_fn=server_fn)
