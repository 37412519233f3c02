"""FedAvg by Flower's simulation: a Ray actor for each core."""

import time

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import DEVICE, ORDER, accuracy, clients, cnn4, train

client_app, server_app = ClientApp(), ServerApp()


class Cohorts(FedAvg):
    """Trains the clients that are drawn for all peers."""

    def configure_train(self, server_round, arrays, config, grid):
        cohort = ORDER["cohorts"][server_round - 1]
        while len(nodes := sorted(grid.get_node_ids())) < len(cohort):
            time.sleep(0.1)
        contents = [
            RecordDict({"arrays": arrays, "config": ConfigRecord({"client": one})})
            for one in cohort
        ]
        pairs = zip(contents, nodes, strict=False)
        return [
            Message(content=content, message_type="train", dst_node_id=node)
            for content, node in pairs
        ]


@client_app.train()
def fit(message, context):
    model = cnn4()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = clients().own(message.content["config"]["client"], "train")
    train(model, x, y)
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )


@server_app.main()
def main(grid, context):
    began = [0.0]

    def clock(number, arrays):
        if number:
            print("round", time.perf_counter() - began[0], flush=True)
        if number == ORDER["rounds"]:
            model = cnn4()
            model.load_state_dict(arrays.to_torch_state_dict())
            print("accuracy", accuracy(model, *clients().tested()), flush=True)
        began[0] = time.perf_counter()

    strategy = Cohorts(fraction_evaluate=0.0)
    strategy.start(
        grid, ArrayRecord(cnn4().state_dict()), num_rounds=ORDER["rounds"], evaluate_fn=clock
    )


resources = {"num_cpus": 1, "num_gpus": 0.1 if DEVICE == "cuda" else 0.0}
run_simulation(
    server_app, client_app, len(clients().split), backend_config={"client_resources": resources}
)
