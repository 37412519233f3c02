"""IFCA's and pFedFDA's official code: clusters of clients, and Gaussians of features."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outside.peers import Comparison, Repair, be_quiet, load_file, open_checkout
from outside.problem import (
    CLASSES,
    CLIENTS,
    CONVOLVED_SIDE,
    EPOCHS,
    HIDDEN,
    LEARNING_RATE,
    Models,
    Problem,
    keep_drawn_state,
    name_entries,
)

Pair = tuple[list[Models], list[Models]]


# ---- IFCA


def play_ifca(folder: Path, problem: Problem) -> Pair:
    """Compare the models that clients choose: whole batches, clients of one size."""
    from fedpfl.methods.ifca import IFCA

    rounds, clusters = 4, 2
    sizes = [32] * CLIENTS
    problem = Problem(problem.folder, problem.engine, train_sizes=sizes, side=CONVOLVED_SIDE)
    # ---- Step 1: fedpfl's rounds, which also say what the clusters begin with.
    settings = (f"method.clusters={clusters}", f"local.batch_size={max(sizes)}")
    with keep_drawn_state(IFCA) as drawn:
        ours = problem.play("method=ifca", *settings, rounds=rounds)
    # ---- Step 2: an object of the official class for MNIST.
    open_checkout(folder / "mnist")
    module = importlib.import_module("train_cluster_mnist")
    peer = module.TrainMNISTCluster.__new__(module.TrainMNISTCluster)
    peer.config = {"m": CLIENTS, "m_test": CLIENTS, "p": clusters, "tau": EPOCHS}
    peer.criterion = nn.CrossEntropyLoss()
    peer.dataset = {"train": {"cluster_assign": [0] * CLIENTS}}
    peer.load_data = lambda client, train=True: problem.samples(client)
    peer.models = [module.SimpleLinear(h1=HIDDEN) for _ in range(clusters)]
    for cluster, network in enumerate(peer.models):
        tensors = [values[cluster] for values in drawn["models"].values()]
        for parameter, tensor in zip(network.parameters(), tensors, strict=True):
            parameter.data = tensor.clone()
    # ---- Step 3: its rounds.
    played = []
    chosen = peer.test(train=True)["cluster_assign"]
    for _ in range(rounds):
        peer.train(chosen, lr=LEARNING_RATE)
        chosen = peer.test(train=True)["cluster_assign"]
        models: Models = {}
        for client, cluster in enumerate(chosen):
            models.update(name_entries(f"{client}/", peer.models[cluster]))
        played.append(models)
    return ours, played


# ---- pFedFDA

PFEDFDA_REPAIRS: tuple[Repair, ...] = (
    (".cuda()", ""),
    ("torch.LongTensor(labels))", 'torch.LongTensor(labels), reduction="sum")'),
)


class FeatureNet(nn.Module):
    """The small network, with features and layers as pFedFDA's code wants them."""

    D = HIDDEN

    def __init__(self, network: Any):
        super().__init__()
        self.base, self.fc = network.base, network.classifier

    def forward(self, images: Tensor, return_feat: bool = False) -> Any:
        """Return logits, and features where they are asked for."""
        features = self.base(images)
        logits = self.fc(features)
        return (features, logits) if return_feat else logits


class DealtFolds:
    """Deal the samples of each class in turn to the folds, as fedpfl does."""

    def __init__(self, n_splits: int, **_: Any):
        self.folds = n_splits

    def split(self, _: Any, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the samples to learn from and those to judge by, for each fold."""
        ranks = np.zeros(len(labels), int)
        for label in np.unique(labels):
            ranks[labels == label] = np.arange((labels == label).sum())
        for fold in range(self.folds):
            is_judge = ranks % self.folds == fold
            yield np.flatnonzero(~is_judge), np.flatnonzero(is_judge)


def minimize(loss: Callable[[Tensor], Tensor], x0: Tensor, **_: Any) -> Any:
    """Minimise a loss over the unit box, in place of a package that clips afterwards."""
    from scipy import optimize

    def measure(numbers: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(numbers, requires_grad=True)
        value = loss(point)
        return value.item(), torch.autograd.grad(value, point)[0].numpy()

    bounds = [(0, 1)] * len(x0)
    found = optimize.minimize(
        measure, x0.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 10}
    )
    return types.SimpleNamespace(x=torch.tensor(found.x))


def play_pfedfda(folder: Path, problem: Problem, single: bool) -> Pair:
    """Compare body and fitted head of each client, judged by the official server."""
    from fedpfl.methods.pfedfda import PFedFDA
    from fedpfl.methods.shared.gaussian import unpack_symmetric

    rounds = 3
    # ---- Step 1: fedpfl's rounds, which also say what the statistics begin with.
    with keep_drawn_state(PFedFDA) as drawn:
        settings = (f"method.single_beta={str(single).lower()}",)
        ours = problem.play("method=pfedfda", *settings, rounds=rounds)
    # ---- Step 2: the official modules, in double precision.
    network = FeatureNet(problem.make_network()).double()
    torch.set_default_dtype(torch.float64)
    open_checkout(folder, "statsmodels", "torchmin")
    loader = {"get_augmented_partition": None, "get_partition": None}
    loader.update(get_digit5=None, get_office10=None)
    sys.modules["data.utils.loader"] = types.ModuleType("data.utils.loader")
    vars(sys.modules["data.utils.loader"]).update(loader)
    source = folder / "clients" / "client_fedfda.py"
    client_module = load_file("clients.client_fedfda", source, PFEDFDA_REPAIRS)
    client_module.cov_nearest = lambda matrix, **_: matrix  # of what is positive definite
    client_module.torchmin = types.SimpleNamespace(minimize=minimize)
    client_module.StratifiedKFold = DealtFolds
    server_module = importlib.import_module("servers.server_fedfda")
    server_module.cov_nearest = client_module.cov_nearest
    # ---- Step 3: its server and clients, without files.
    client_type = client_module.ClientFedFDA
    client_type.setup_dataset = lambda client, _: vars(client).update(
        num_train=problem.size(client.client_idx), num_test=1
    )
    client_type.load_train_data = lambda client, **_: [
        (images.double(), labels) for images, labels in problem.batches(client.client_idx)
    ]
    judged: Models = {}

    def take_model(client: Any) -> tuple[Tensor, Tensor]:
        judged.update(name_entries(f"{client.client_idx}/", client.model))
        return torch.tensor(0.0), torch.tensor(0.0)

    client_type.evaluate = take_model
    options = types.SimpleNamespace(
        model=network,
        exp_name="",
        partition_path="",
        batch_size=0,
        local_epochs=EPOCHS,
        num_classes=CLASSES,
        device="cpu",
        lr=LEARNING_RATE,
        model_name="",
        momentum=0.0,
        wd=0.0,
        train_prop=1.0,
        single_beta=single,
        local_beta=False,
        num_clients=CLIENTS,
        global_rounds=rounds,
        sampling_prob=1.0,
        eval_gap=1,
    )
    server = server_module.ServerFedFDA(options)
    server.global_means.data = drawn["mean"].double()
    server.global_covariance.data = unpack_symmetric(drawn["cov"]).double()
    played = []
    judge = server.evaluate_personalized

    def judge_and_keep() -> Any:
        result = judge()
        played.append(dict(judged))
        return result

    server.evaluate_personalized = judge_and_keep
    with be_quiet():
        server.train()
    torch.set_default_dtype(torch.float32)
    return ours, played


def list_comparisons() -> list[Comparison]:
    """Return what is compared of clusters and Gaussians."""
    folds = "folds are drawn, and judged by their means; its solver clips afterwards"
    fda = "cj-mclaughlin/pFedFDA"
    detail = "whole batches, clients of one size"
    return [
        Comparison("ifca", "jichan3751/ifca", detail, "", play_ifca),
        Comparison("pfedfda", fda, "", folds, partial(play_pfedfda, single=False)),
        Comparison("pfedfda", fda, "single_beta", folds, partial(play_pfedfda, single=True)),
    ]
