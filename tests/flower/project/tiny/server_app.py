from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from tiny.task import Net

app = ServerApp()
results = []


@app.main()
def main(grid, context):
    config = context.run_config
    result = FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        evaluate_config=ConfigRecord({"strict": True}),
        num_rounds=config["num-server-rounds"],
    )
    results.append(result)
