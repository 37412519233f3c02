"""Official code of IFCA, pFedFDA and FedGen: clusters, Gaussians of features, made-up features."""

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

from fedpfl.engine import keys
from outside.peers import (
    Comparison,
    Lens,
    Repair,
    be_quiet,
    load_file,
    open_checkout,
    repair_module,
)
from outside.problem import (
    BATCH,
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

NOISE = 6
GENERATOR_WIDTH = 24
LESSONS = 20
"""FedGen's numbers of noise, width of its generator, and steps of the server."""
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


# ---- FedGen


class LatentNet(nn.Module):
    """The small network, which FedGen's code also asks from the features on."""

    def __init__(self, network: Any):
        super().__init__()
        self.base, self.classifier = network.base, network.classifier

    def forward(
        self, inputs: Tensor, start_layer_idx: int = 0, logit: bool = False
    ) -> dict[str, Tensor]:
        """Return logits and their logarithms of probabilities; from features where not 0."""
        features = inputs if start_layer_idx else self.base(inputs)
        logits = self.classifier(features)
        return {"logit": logits, "output": logits.log_softmax(1)}


class LessonDraws:
    """Give FedGen's code the numbers that fedpfl draws, and look like its `np.random`."""

    def __init__(self) -> None:
        self.noise: Iterator[Tensor] = iter(())
        self.lots: Iterator[Tensor] = iter(())

    def begin_client(self, client: int, steps: int) -> None:
        """Start again, as a client that makes so many steps an epoch."""
        noise, lots = [], []
        for epoch in range(EPOCHS):
            numbers = draw_lessons(None, client, "", epoch, steps * BATCH, 2 * NOISE + 1)
            # fedpfl draws the numbers of all steps' first samples first.
            for step in numbers.view(BATCH, steps, -1).unbind(1):
                noise += [step[:, :NOISE], step[:, NOISE:-1]]
                lots.append(step[:, -1])
        self.noise, self.lots = iter(noise), iter(lots)

    def begin_server(self, numbers: Tensor) -> None:
        """Start again, with the numbers of the server's steps, `[steps, batch, 1 + noise]`."""
        self.lots, self.noise = iter(numbers[:, :, 0]), iter(numbers[:, :, 1:])

    def draw_noise(self, _: Any) -> Tensor:
        """Return the noise of the next samples, in place of `torch.rand`."""
        return next(self.noise)

    def choice(self, labels: Any, _: int) -> np.ndarray:
        """Return a label for each of the next lots."""
        positions = (next(self.lots) * len(labels)).long()
        return np.asarray(labels)[positions.numpy()]

    def randint(self, *_: int) -> int:
        """Return whose losses would be printed."""
        return 0


def draw_lessons(
    draws: Any, client: int, stream: str, epoch: int, rows: int, count: int, *_: Any
) -> Tensor:
    """Return the numbers of an epoch by client and epoch alone, for fedpfl and the peer."""
    generator = torch.Generator().manual_seed(100 * client + epoch % EPOCHS)
    return torch.rand(rows, count, generator=generator)


def play_fedgen_here(problem: Problem, rounds: int) -> tuple[list[Models], Any, list[Tensor]]:
    """Return fedpfl's models, the generator that it draws, and the numbers of server's steps."""
    from fedpfl.methods.fedgen import FedGen

    keys.Draws.random = draw_lessons  # type: ignore[method-assign, assignment]
    numbers: dict[int, Tensor] = {}
    aggregate = FedGen.aggregate

    def aggregate_and_keep(method: Any, server: Any, *arguments: Any) -> Any:
        copy_of_generator = arguments[-1].clone_state()
        shape = (method.steps, method.batch, 1 + method.noise)
        numbers[int(server["rounds"])] = torch.rand(shape, generator=copy_of_generator)
        return aggregate(method, server, *arguments)

    FedGen.aggregate = aggregate_and_keep  # type: ignore[method-assign]
    settings = (f"noise={NOISE}", f"hidden={GENERATOR_WIDTH}", f"batch={BATCH}")
    settings += (f"steps={LESSONS}", "alpha=2.0", "beta=1.5")
    with keep_drawn_state(FedGen) as drawn:
        chosen = [f"method.{setting}" for setting in settings]
        ours = problem.play("method=fedgen", *chosen, rounds=rounds)
    return ours, drawn["generator"]["learned"], [numbers[played] for played in range(rounds)]


def open_fedgen(folder: Path, problem: Problem, draws: LessonDraws) -> Any:
    """Import FedGen's server, with minibatches in order and what departs from it put right."""
    open_checkout(folder, "h5py")
    users = importlib.import_module("FLAlgorithms.users.userbase")
    data_loader = users.DataLoader
    users.DataLoader = lambda samples, size, **_: data_loader(samples, size)
    module = importlib.import_module("FLAlgorithms.servers.serverpFedGen")
    weights = "torch.tensor(weight, dtype=torch.float32))"
    module = repair_module(module.__name__, (weights, f"{weights[:-1]}.squeeze(1))"))
    # ---- Step 1: the draws, the samples and the sizes.
    generators = importlib.import_module("FLAlgorithms.trainmodel.generator")
    generators.torch = Lens(torch, rand=draws.draw_noise)
    user_module = importlib.import_module("FLAlgorithms.users.userpFedGen")
    user_module.np = module.np = Lens(np, random=draws)
    configs = importlib.import_module("utils.model_config")
    configs.GENERATORCONFIGS["mnist"] = (GENERATOR_WIDTH, HIDDEN, 1, CLASSES, NOISE)
    configs.RUNCONFIGS["mnist"].update(
        ensemble_epochs=LESSONS, generative_alpha=2.0, generative_beta=1.5
    )
    samples: dict[str, dict[int, Any]] = {"train": {}, "test": {}}
    for split, of_clients in samples.items():
        for client in range(CLIENTS):
            images, labels = problem.samples(client, split)
            of_clients[client] = {"x": images, "y": labels}
    data = (list(range(CLIENTS)), [], samples["train"], samples["test"], {})
    module.read_data = lambda _: data
    # ---- Step 2: counts of samples alone, and what neither judges nor writes.
    user_type, server_type = user_module.UserpFedGen, module.FedGen
    user_type.clean_up_counts = lambda user: setattr(
        user, "label_counts", dict.fromkeys(range(CLASSES), 0)
    )
    for hook in ("evaluate", "save_results", "save_model"):
        setattr(server_type, hook, lambda *_: None)
    server_type.select_users = lambda server, *_, **__: (server.users, range(CLIENTS))
    return server_type


def play_fedgen(folder: Path, problem: Problem) -> Pair:
    """Compare the global model; fedpfl draws the generator and all lots for both."""
    rounds = 4
    ours, learned, numbers = play_fedgen_here(problem, rounds)
    draws = LessonDraws()
    server_type = open_fedgen(folder, problem, draws)
    # ---- Step 1: the server, whose users step by a rate that stays.
    options = {"dataset": "mnist", "algorithm": "FedGen", "result_path": str(problem.folder)}
    options.update(train=1, embedding=0, K=1, beta=1, lamda=1, num_users=CLIENTS)
    sizes = {"num_glob_iters": rounds, "local_epochs": EPOCHS, "batch_size": BATCH}
    arguments = types.SimpleNamespace(
        **options, **sizes, gen_batch_size=BATCH, learning_rate=LEARNING_RATE
    )
    with be_quiet():
        server = server_type(arguments, (LatentNet(problem.make_network()), "cnn"), 0)
    for user in server.users:
        user.K = problem.size(user.id) // BATCH
        user.lr_scheduler = types.SimpleNamespace(step=lambda *_: None)
    layers = server.generative_model.fc_layers
    layers[0].load_state_dict(learned["first"])
    server.generative_model.representation_layer.load_state_dict(learned["last"])
    # ---- Step 2: what is drawn before, and looked at after, its steps.
    played: list[Models] = []
    train_user, aggregate = type(server.users[0]).train, server.aggregate_parameters

    def train_from_start(user: Any, *arguments: Any, **options: Any) -> None:
        draws.begin_client(user.id, user.K)
        train_user(user, *arguments, **options)
        draws.begin_server(numbers[len(played)])

    def aggregate_and_look() -> None:
        aggregate()
        played.append(name_entries("server/", server.model))

    type(server.users[0]).train = train_from_start
    server.aggregate_parameters = aggregate_and_look
    with be_quiet():
        server.train(arguments)
    return ours, played


def list_comparisons() -> list[Comparison]:
    """Return what is compared of clusters, Gaussians and generators."""
    folds = "folds are drawn, and judged by their means; its solver clips afterwards"
    fda = "cj-mclaughlin/pFedFDA"
    detail = "whole batches, clients of one size"
    lessons = "weighs each sample by all labels; counts steps, and one more; steps shrink by round"
    return [
        Comparison("fedgen", "zhuangdizhu/FedGen", "", lessons, play_fedgen),
        Comparison("ifca", "jichan3751/ifca", detail, "", play_ifca),
        Comparison("pfedfda", fda, "", folds, partial(play_pfedfda, single=False)),
        Comparison("pfedfda", fda, "single_beta", folds, partial(play_pfedfda, single=True)),
    ]
