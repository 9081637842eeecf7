"""A Flower ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits.task import Net, load_data, test, train

app = ClientApp()


def prepared(message: Message, context: Context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    node, batch_size = context.node_config, context.run_config["batch-size"]
    return net, *load_data(node["partition-id"], node["num-partitions"], batch_size)


@app.train()
def train_(message: Message, context: Context) -> Message:
    net, loader, _ = prepared(message, context)
    slow = float(context.node_config.get("seconds-per-batch", 0.0))
    loss = train(net, loader, context.run_config["local-epochs"], message.content["config"]["lr"], slow)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net, _, loader = prepared(message, context)
    loss, accuracy = test(net, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
