"""The message API."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from tiny.task import Net, load_data, test, train

app = ClientApp()


def prepared(message, context):
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    node = context.node_config
    return net, *load_data(node["partition-id"], node["num-partitions"], context.run_config["data.batch-size"])


@app.train()
def train_(message, context):
    net, loader, _ = prepared(message, context)
    loss = train(net, loader, context.run_config["local-epochs"], message.content["config"]["lr"])
    calls = 1 + (context.state["kept"]["calls"] if "kept" in context.state else 0)
    context.state["kept"] = MetricRecord({"calls": calls})
    numbers = {"train_loss": loss, "num-examples": len(loader.dataset), "calls": calls}
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    net, _, loader = prepared(message, context)
    loss, accuracy = test(net, loader)
    numbers = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)
