"""FedAvg by pfl-research, in one process."""

import time

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from workload import ORDER, accuracy, clients, cnn4


class Network(torch.nn.Module):
    """The network with the loss that pfl asks for."""

    def __init__(self):
        super().__init__()
        self.layers = cnn4()

    def forward(self, x):
        return self.layers(x)

    def loss(self, x, y, eval=False):
        return F.cross_entropy(self(x), y)

    def metrics(self, x, y, eval=False):
        return {}


class Clock(TrainingProcessCallback):
    """Prints each round's seconds, and the accuracy after the last."""

    def on_train_begin(self, *, model):
        self.began = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        print("round", time.perf_counter() - self.began, flush=True)
        self.began = time.perf_counter()
        return False, Metrics()

    def on_train_end(self, *, model):
        print("accuracy", accuracy(model.pytorch_model, *clients().tested()), flush=True)


cohorts = iter(
    [client for cohort in ORDER["cohorts"] for client in cohort] * 2
)  # it samples ahead of its rounds
shuffled = np.random.default_rng(42)


def dataset(client):
    x, y = clients().own(client, "train")
    rows = torch.from_numpy(shuffled.permutation(len(y)))
    return Dataset(raw_data=[x[rows], y[rows]], user_id=str(client))


network = Network()
model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
federated = FederatedDataset(dataset, lambda: next(cohorts))
FederatedAveraging().run(
    NNAlgorithmParams(
        central_num_iterations=ORDER["rounds"],
        evaluation_frequency=10 * ORDER["rounds"],
        train_cohort_size=len(ORDER["cohorts"][0]),
        val_cohort_size=0,
    ),
    SimulatedBackend(federated, federated, [WeightByDatapoints()]),
    model,
    NNTrainHyperParams(
        local_num_epochs=ORDER["epochs"],
        local_learning_rate=ORDER["lr"],
        local_batch_size=ORDER["batch"],
    ),
    callbacks=[Clock()],
)
