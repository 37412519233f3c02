"""FedAvg or FedPer by fluke, in one process."""

import sys
import time

from fluke import FlukeENV
from fluke.algorithms.fedavg import CentralizedFL
from fluke.algorithms.fedper import FedPer
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.nets import EncoderHeadNet
from fluke.utils import FederationObserver
from workload import DEVICE, ORDER, accuracy, clients, cnn4


class Network(EncoderHeadNet):
    """The network in fluke's two parts."""

    def __init__(self):
        layers = cnn4()
        super().__init__(layers[:-1], layers[-1])


class Clock(FederationObserver):
    """Prints each round's seconds."""

    def start_round(self, round, global_model):
        self.began = time.perf_counter()

    def end_round(self, round):
        print("round", time.perf_counter() - self.began, flush=True)


def loader(client, part):
    own = clients().own(client, part)
    return FastDataLoader(*own, num_labels=10, batch_size=ORDER["batch"], shuffle=part == "train")


FlukeENV().set_seed(42)
FlukeENV().set_device(DEVICE)
FlukeENV().set_inmemory(True)
FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
everyone, cohorts = range(len(clients().split)), iter(ORDER["cohorts"])
train, test = ([loader(client, part) for client in everyone] for part in ("train", "test"))
client = {"batch_size": ORDER["batch"], "local_epochs": ORDER["epochs"], "loss": "CrossEntropyLoss"}
client |= {
    "optimizer": {"name": "SGD", "lr": ORDER["lr"]},
    "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1},
}
personal = sys.argv[1] == "FedPer"
client |= {"model": Network()} if personal else {}
algorithm = (FedPer if personal else CentralizedFL)(
    len(everyone),
    DataSplitter(DummyDataContainer(train, test, None, 10)),
    {
        "client": client,
        "server": {"weighted": True},
        "model": Network().encoder if personal else Network(),
    },
)
server = algorithm.server
server.get_eligible_clients = lambda share: [algorithm.clients[one] for one in next(cohorts)]
algorithm.set_callbacks([Clock()])
algorithm.run(ORDER["rounds"], ORDER["share"], finalize=False)
if personal:
    server.broadcast_model(algorithm.clients)
    right = total = 0
    for number, one in enumerate(algorithm.clients):
        one.receive_model()
        x, y = clients().own(number, "test")
        right, total = right + accuracy(one.model, x, y) * len(y), total + len(y)
    print("accuracy", right / total, flush=True)
else:
    print("accuracy", accuracy(server.model, *clients().tested()), flush=True)
