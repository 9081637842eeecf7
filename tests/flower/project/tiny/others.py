"""Clients that a loop of torch cannot be found in, that fail, or that answer something else."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def client(change):
    app = ClientApp()

    @app.train()
    def train(message, context):
        arrays = [array.numpy() for array in message.content["arrays"].values()]
        names = list(message.content["arrays"])
        arrays, numbers = change(arrays, dict(message.content["config"]))
        record = ArrayRecord({name: Array(array) for name, array in zip(names, arrays, strict=True)})
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(numbers)}), reply_to=message)

    return app


def raises(arrays, config):
    raise RuntimeError("no scanner today")


plain = client(lambda arrays, config: ([array + 1 for array in arrays], {"num-examples": 7}))
aware = client(
    lambda arrays, config: (
        [array + config["metis-steps"] for array in arrays],
        {"num-examples": 7, "metis-steps": config["metis-steps"]},
    )
)
failing = client(raises)
growing = client(lambda arrays, config: ([np.zeros((9, 9), np.float32) for _ in arrays], {"num-examples": 7}))
silent = client(lambda arrays, config: (arrays, {}))
