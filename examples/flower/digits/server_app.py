"""A Flower ServerApp; its last line puts a policy of Metis in place of the strategy's loop."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import metis.flower
from digits.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    result = FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
    )
    print("final", dict(result.evaluate_metrics_clientapp))


app = metis.flower.ServerApp(app, metis.semisync_fedavg(slowest_learner_epochs=1))
