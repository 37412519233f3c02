"""Methods' official code, and single peers' of it, on the common problem."""

from __future__ import annotations

import copy
import importlib
import types
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outside.peers import Comparison, be_quiet, define_in, open_checkout
from outside.problem import (
    BATCH,
    CLASSES,
    CLIENTS,
    EPOCHS,
    FEATURES,
    HIDDEN,
    LEARNING_RATE,
    Models,
    NamedLayers,
    Problem,
    name_entries,
    rename_entries,
)

Pair = tuple[list[Models], list[Models]]


def average_models(problem: Problem, models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of clients' models by their samples."""
    average = {}
    for name in models[0]:
        weighted = [
            share * model[name] for share, model in zip(problem.shares(), models, strict=True)
        ]
        average[name] = torch.stack(weighted).sum(0)
    return average


# ---- FedOBP


CLIENT_TYPES = {
    "fedobp": "FedOBPClient",
    "feddpa": "FedDpaClient",
    "seqfededt": "SeqFedEDTClient",
}


class OBPClient:
    """Drive one of the authors' clients, each of which is one object for all clients.

    Args:
        folder: of the checkout.
        problem: what it trains on.
        method: fedobp or, behind Figure 4's Fisher curve, feddpa; seqfededt.
        options: of the method.
    """

    def __init__(self, folder: Path, problem: Problem, method: str, options: Mapping[str, Any]):
        from omegaconf import OmegaConf

        open_checkout(folder, "ray", "pynvml")
        data_loader = torch.utils.data.DataLoader
        module = importlib.import_module("src.client.fedavg")
        module.DataLoader = lambda samples, batch_size, **_: data_loader(samples, batch_size)
        common = {
            "use_cuda": False,
            "buffers": "global",
            "batch_size": BATCH,
            "local_epoch": EPOCHS,
            "reset_optimizer_on_global_epoch": True,
            "client_side_evaluation": False,
            "test": {"client": {"train": False, "val": False, "test": False, "finetune_epoch": 0}},
        }
        config = {"common": common, method: dict(options), "dataset": {"name": ""}}
        dataset = torch.utils.data.TensorDataset(problem.images, problem.labels)
        dataset.train = dataset.eval = lambda: None  # type: ignore[attr-defined]
        self.problem = problem
        client_types = vars(importlib.import_module(f"src.client.{method}"))
        self.client = client_types[CLIENT_TYPES[method]](
            model=problem.make_network(),
            optimizer_cls=partial(torch.optim.SGD, lr=LEARNING_RATE),
            lr_scheduler_cls=None,
            args=OmegaConf.create(config),
            dataset=dataset,
            data_indices=[{"val": [], **part} for part in problem.parts],
            device=torch.device("cpu"),
            return_diff=False,
        )

    def play(self, rounds: int) -> list[Models]:
        """Return the global model and the merged ones after each round."""
        server = dict(self.problem.make_network().state_dict())
        played = []
        for number in range(rounds):
            uploads = []
            for client in range(CLIENTS):
                answer = self.client.train(self._message(client, number, server))
                uploads.append(answer["regular_model_params"])
            server = average_models(self.problem, uploads)
            models = rename_entries("server/", server)
            # Looking at merged models moves the official moving averages, which are put back.
            averages = copy.deepcopy(getattr(self.client, "Ig_ema", None))
            for client in range(CLIENTS):
                self.client.set_parameters(self._message(client, number, server))
                models.update(rename_entries(f"{client}/", self.client.model.state_dict()))
            self.client.Ig_ema = averages
            played.append(models)
        return played

    def pass_on(self, orders: Sequence[Sequence[int]]) -> list[Models]:
        """Return the model that goes from client to client, and the clients', after each round."""
        travelling = dict(self.problem.make_network().state_dict())
        played = []
        for number, order in enumerate(orders):
            for client in order:
                answer = self.client.train(self._message(client, number, travelling))
                travelling = answer["regular_model_params"]
            models = rename_entries("server/", travelling)
            for client in range(CLIENTS):
                kept = self.client.postrain_state_dict[client]
                models.update(rename_entries(f"{client}/", kept))
            played.append(models)
        return played

    def _message(self, client: int, number: int, server: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what a server sends."""
        self.client.local_epoch, self.client.testing = EPOCHS, False
        return {
            "client_id": client,
            "current_epoch": number,
            "local_epoch": EPOCHS,
            "regular_model_params": copy.deepcopy(dict(server)),
            "personal_model_params": {},
            "optimizer_state": {},
            "lr_scheduler_state": {},
        }


def play_fedobp(
    folder: Path, problem: Problem, score: str, q: float, average: float, norm: str
) -> Pair:
    """Compare the global and the merged models."""
    options = {"ig_ratio": q, "EMA": average > 0, "alpha": average, "norm": norm}
    options.update({"CLS": False, "track": False, "type": ""})
    theirs = OBPClient(folder, problem, "fedobp", options).play(rounds=3)
    settings = (f"method.q={q}", f"method.ema={average}", f"norm={norm}", f"score={score}")
    return problem.play("method=fedobp", *settings, rounds=3), theirs


def play_fisher(folder: Path, problem: Problem, q: float) -> Pair:
    """Compare FedOBP by Fisher scores, as the authors ran it for Figure 4."""
    peer = OBPClient(folder, problem, "feddpa", {"fisher_threshold": q})
    measure = peer.client.compute_fisher_diag

    def measure_personal(batches: Any) -> list[Tensor]:
        personal = peer.client.postrain_state_dict[peer.client.client_id]
        peer.client.model.load_state_dict(personal)
        return measure(batches)

    peer.client.compute_fisher_diag = measure_personal
    theirs = peer.play(rounds=3)
    settings = (f"method.q={q}", "score=fisher", "norm=layer", "method.scope=tensor")
    return problem.play("method=fedobp", *settings, rounds=3), theirs


# ---- SeqFedEDT


def play_seqfededt(folder: Path, problem: Problem, q: float, classifier_only: bool) -> Pair:
    """Compare the travelling model and the clients' own, in fedpfl's order of clients."""
    from fedpfl.methods.seqfededt import SeqFedEDT

    orders: dict[int, list[int]] = {}
    deal_turns = SeqFedEDT.turns

    def deal_and_keep(method: Any, played: int, *arguments: Any) -> Any:
        turns = deal_turns(method, played, *arguments)
        orders[played] = [client for turn in turns for client in turn.clients]
        return turns

    SeqFedEDT.turns = deal_and_keep  # type: ignore[method-assign]
    settings = (f"method.q={q}", f"method.classifier_only={str(classifier_only).lower()}")
    ours = problem.play("method=seqfededt", *settings, rounds=3)
    options = {"ig_ratio": q, "CLS": classifier_only, "track": False, "alpha": 0.0}
    peer = OBPClient(folder, problem, "seqfededt", options)
    return ours, peer.pass_on([orders[played] for played in sorted(orders)])


# ---- FedSelect


def play_fedselect(
    folder: Path, problem: Problem, every: int, alpha: float, p: float, rounds: int
) -> Pair:
    """Compare the clients' models at the end of each round."""
    open_checkout(folder)
    module = importlib.import_module("fedselect")
    played: list[Models] = []

    def prepare(samples: Any, chosen: int, *_: Any) -> tuple[Any, None]:
        return problem.batches(chosen), None

    def look(model: Any, states: Mapping[int, Mapping[str, Tensor]], *_: Any, **__: Any) -> Tensor:
        models: Models = {}
        for client, state in states.items():
            models.update(name_entries(f"{client}/", list(state.values())))
        played.append(models)
        return torch.zeros(CLIENTS, CLIENTS)

    module.prepare_dataloaders, module.cross_client_eval = prepare, look
    options = types.SimpleNamespace(
        com_rounds=rounds,
        lth_epoch_iters=every,
        prune_percent=100 * p,
        prune_target=100 * alpha,
        lr=LEARNING_RATE,
        la_epochs=EPOCHS,
        clipgradnorm=False,
    )
    clients = {client: client for client in range(CLIENTS)}
    with be_quiet():
        module.fedselect_algorithm(
            NamedLayers(problem.make_network()),
            *(options, None, None, clients, clients, None, list(clients)),
        )
    settings = (f"every={every}", f"alpha={alpha}", f"p={p}", "delta=window", "strict=false")
    chosen = [f"method.{setting}" for setting in settings]
    # After the last round it looks once more.
    return problem.play("method=fedselect", *chosen, rounds=rounds), played[:rounds]


# ---- FedPHP


class FeatureNet(nn.Module):
    """The small network, which answers with features too."""

    def __init__(self, network: Any):
        super().__init__()
        self.base, self.classifier = network.base, network.classifier

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits."""
        features = self.base(images)
        return features, self.classifier(features)


class Averager:
    """Average numbers, as the peer's tools do."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Add a number."""
        self.values.append(value)

    def item(self) -> float:
        """Return the mean."""
        return float(np.mean(self.values)) if self.values else 0.0


def make_fedphp(folder: Path, problem: Problem, transfer: str, lam: float, rounds: int) -> Any:
    """Return an object of the peer's class, without data sets, tests and clipping."""
    # ---- Step 1: the class, and what it looks up.
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "np": np,
        "copy": copy,
        "Averager": Averager,
        "count_acc": lambda *_: 0.0,
        "f1_score": lambda **_: 0.0,
        "construct_optimizer": lambda model, lr, _: torch.optim.SGD(model.parameters(), lr=lr),
    }
    define_in(scope, folder / "tools.py", "guassian_kernel", "mmd_rbf_noaccelerate")
    define_in(scope, folder / "algorithms" / "fedphp.py", "FedPHP")
    distance = scope["mmd_rbf_noaccelerate"]
    # In single precision its kernel loses half the digits of a distance.
    scope["mmd_rbf_noaccelerate"] = lambda one, two: distance(one.double(), two.double()).float()
    # ---- Step 2: its state before the first round.
    peer = scope["FedPHP"].__new__(scope["FedPHP"])
    peer.args = types.SimpleNamespace(
        lr=LEARNING_RATE,
        cuda=False,
        local_steps=None,
        local_epochs=EPOCHS,
        reg_way=transfer.upper(),
        reg_lamb=lam,
        max_grad_norm=1e9,
        c_ratio=1.0,
        max_round=rounds,
    )
    peer.test = lambda **_: (0.0, 0.0)
    peer.model = FeatureNet(problem.make_network())
    peer.hpms = {client: copy.deepcopy(peer.model) for client in range(CLIENTS)}
    peer.cnts = dict.fromkeys(range(CLIENTS), 0)
    return peer


def play_fedphp(folder: Path, problem: Problem, transfer: str) -> Pair:
    """Compare the global and the historical models."""
    rounds, lam = 3, 0.3
    peer = make_fedphp(folder, problem, transfer, lam, rounds)
    played = []
    for number in range(1, rounds + 1):
        # ---- Step 1: clients train, and the server averages.
        uploads = {}
        for client in range(CLIENTS):
            model, historical = copy.deepcopy(peer.model), peer.hpms[client]
            batches = OldBatches(problem.batches(client))
            trained, historical, *_ = peer.update_local(
                number, client, model, historical, batches, []
            )
            uploads[client], peer.hpms[client] = trained, copy.deepcopy(historical)
            peer.cnts[client] += 1
        peer.update_global(number, peer.model, uploads, dict(enumerate(problem.shares())))
        # ---- Step 2: what there is after the round.
        models = rename_entries("server/", peer.model.state_dict())
        for client, historical in peer.hpms.items():
            models.update(rename_entries(f"{client}/", historical.state_dict()))
        played.append(models)
    settings = (f"method.transfer={transfer}", f"method.lam={lam}", "method.momentum=0.9")
    return problem.play("method=fedphp", *settings, rounds=rounds), played


class OldBatches(list[Any]):
    """Minibatches whose iterator has a method `next`, as those of old PyTorch."""

    def __iter__(self) -> Any:
        """Return the iterator."""
        return OldIterator(super().__iter__())


class OldIterator:
    """Iterate, also by a method `next`."""

    def __init__(self, iterator: Any):
        self.iterator = iterator

    def __iter__(self) -> OldIterator:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next minibatch."""
        return next(self.iterator)

    next = __next__


# ---- FedDPA


class SizedBatches(list[Any]):
    """Minibatches that say how many samples there are."""

    dataset: range


def play_feddpa(folder: Path, problem: Problem) -> Pair:
    """Compare the global model, without noise."""
    rounds, rate, epochs = 3, 0.01, 2
    options = types.SimpleNamespace(
        fisher_threshold=0.4,
        lambda_1=0.1,
        lambda_2=0.05,
        clipping_bound=0.5,
        lr=rate,
        local_epoch=epochs,
    )
    peer: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "autograd": torch.autograd,
        "optim": torch.optim,
        "np": np,
        "copy": copy,
        "device": torch.device("cpu"),
        "args": options,
    }
    define_in(peer, folder / "utils.py", "compute_fisher_diag")
    define_in(peer, folder / "ours.py", "local_update")
    measure = peer["compute_fisher_diag"]
    server = problem.make_network()
    clients = [problem.make_network() for _ in range(CLIENTS)]
    played = []
    for number in range(rounds):
        # Nobody has a personal model before the first round, so nothing is personal in it.
        peer["compute_fisher_diag"] = measure if number else count_nothing
        updates = []
        for client in range(CLIENTS):
            batches = SizedBatches(problem.batches(client))
            batches.dataset = range(problem.size(client))
            updates.append(peer["local_update"](clients[client], batches, server))
        with torch.no_grad():
            for index, parameter in enumerate(server.parameters()):
                for share, update in zip(problem.shares(), updates, strict=True):
                    parameter += share * update[index]
        played.append(rename_entries("server/", server.state_dict()))
    settings = ("local.optimizer=adam", f"local.lr={rate}", f"local.epochs={epochs}")
    return problem.play("method=feddpa", *settings, rounds=rounds), played


def count_nothing(model: nn.Module, _: Any) -> list[Tensor]:
    """Return a Fisher information of zero."""
    return [torch.zeros_like(parameter) for parameter in model.parameters()]


# ---- APPLE


class Core(nn.Module):
    """A core model, by the names that APPLE's code gives its layers."""

    def __init__(self, network: Any):
        super().__init__()
        self.fc1, self.fc2 = network.base[1], network.classifier

    def get(self) -> Core:
        """Return itself; there it comes back from a virtual worker."""
        return self

    def send(self, worker: Any) -> Core:
        """Return itself."""
        return self


class MixedNet(nn.Module):
    """A client's mixture of all core models."""

    def __init__(self, problem: Problem, weights: Sequence[float]):
        super().__init__()
        self.conv1s, self.conv2s = nn.ModuleList(), nn.ModuleList()
        self.fc1s = nn.ModuleList([nn.Linear(FEATURES, HIDDEN) for _ in range(CLIENTS)])
        self.fc2s = nn.ModuleList([nn.Linear(HIDDEN, CLASSES) for _ in range(CLIENTS)])
        self.ps = nn.Parameter(torch.tensor(weights))
        self.problem = problem

    def mix(self, layers: nn.ModuleList, inputs: Tensor) -> Tensor:
        """Return what the mixture of these layers answers."""
        weight = sum(p * layer.weight for p, layer in zip(self.ps, layers, strict=True))
        bias = sum(p * layer.bias for p, layer in zip(self.ps, layers, strict=True))
        return nn.functional.linear(inputs, weight, bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.mix(self.fc2s, torch.relu(self.mix(self.fc1s, images.flatten(1))))

    def extract_learnables(self, client: int) -> tuple[Core, list[float]]:
        """Return a client's core and weights."""
        core = Core(self.problem.make_network())
        core.fc1.load_state_dict(self.fc1s[client].state_dict())
        core.fc2.load_state_dict(self.fc2s[client].state_dict())
        return core, [float(value) for value in self.ps.detach()]


def play_apple(folder: Path, problem: Problem) -> Pair:
    """Compare the clients' mixtures."""
    rounds = 3
    # ---- Step 1: the official functions in one scope.
    scope: dict[str, Any] = {"torch": torch, "optim": torch.optim, "np": np, "copy": copy, "nn": nn}
    wanted = {
        "utils/apple.py": ("init_pss", "convert_weights_name", "prepare_client_model"),
        "utils/losses.py": ("reg_loss", "get_reg_coef"),
        "train_APPLE.py": ("train_one_round",),
    }
    wanted["utils/apple.py"] += ("get_download_which",)
    for path, names in wanted.items():
        define_in(scope, folder / path, *names)
    options = types.SimpleNamespace(
        reg_last_round_over_total_round=1.0,
        limit_downloaded_models=99,
        lr_net=LEARNING_RATE,
        lr_coef=0.01,
        decay=1.0,
        num_local_epochs=EPOCHS,
        log_step=10**9,
        num_rounds=rounds,
        mu=0.1,
        L=10,
        scheduler="cosine",
    )
    # ---- Step 2: rounds.
    sizes = [problem.size(client) for client in range(CLIENTS)]
    weights = scope["init_pss"](sizes)
    mixtures = [MixedNet(problem, weights[client]) for client in range(CLIENTS)]
    cores = [Core(problem.make_network()) for _ in range(CLIENTS)]
    data = [(None, problem.batches(client)) for client in range(CLIENTS)]
    played = []
    for number in range(rounds):
        with be_quiet():
            cores, weights, mixtures = scope["train_one_round"](
                *(options, cores, mixtures, weights, sizes, None, number),
                *(nn.CrossEntropyLoss(), "cpu", "", data),
            )
        played.append(mix_cores(cores, weights))
    settings = ("method.rate=0.1", "method.mu=0.2", "method.schedule=cosine", "method.until=1.0")
    ours = problem.play("method=apple", "local.momentum=0.9", *settings, rounds=rounds)
    return ours, played


def mix_cores(cores: Sequence[Core], weights: Sequence[Sequence[float]]) -> Models:
    """Return the clients' personal models."""
    models: Models = {}
    for client in range(CLIENTS):
        tensors = []
        for parts in zip(*[core.parameters() for core in cores], strict=True):
            pairs = zip(weights[client], parts, strict=True)
            tensors.append(torch.stack([weight * part.detach() for weight, part in pairs]).sum(0))
        models.update(name_entries(f"{client}/", tensors))
    return models


# ---- Parts of methods: what training leaves to a function of its own


def play_floco_centres(folder: Path, problem: Problem) -> Pair:
    """Compare where clients of random updates are put on the simplex."""
    from sklearn import decomposition

    from fedpfl.methods.shared.simplex import client_centres

    peer = define_in(
        {"np": np, "decomposition": decomposition},
        folder / "src" / "server" / "floco.py",
        "project_clients",
        "_project_client_onto_simplex",
        "_riesz_s_energy",
    )
    ours, theirs = [], []
    for clients, endpoints in ((20, 5), (30, 10), (12, 3)):
        scales = 0.3 * np.linspace(1, 0.01, 200)
        updates = torch.tensor(np.random.RandomState(clients).randn(clients, 200) * scales)
        packages = {}
        for client in range(clients):
            parameters = {"classifier._weights.0": updates[client]}
            packages[client] = {"regular_model_params": parameters}
        with be_quiet():
            found = peer["project_clients"](packages, endpoints, False)
        theirs.append({"centres": torch.as_tensor(np.array(found))})
        ours.append({"centres": torch.as_tensor(client_centres(updates, endpoints))})
    return ours, theirs


class BruteForce:
    """Find nearest neighbours by all distances, in place of the index that the peer uses."""

    def __init__(self, features: np.ndarray):
        self.features = features.astype(np.float64)

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return squared distances and places of the nearest."""
        distances = ((queries[:, None].astype(np.float64) - self.features[None]) ** 2).sum(-1)
        nearest = distances.argsort(1, kind="stable")[:, :count]
        return np.take_along_axis(distances, nearest, 1), nearest


def play_knn_per(folder: Path, problem: Problem) -> Pair:
    """Compare the mixed probabilities of the clients' test samples."""
    scope = define_in(
        {"np": np, "warnings": warnings}, folder / "client.py", "Client", "KNNPerClient"
    )
    peer_type = scope["KNNPerClient"]
    ours, theirs = [], []
    for lam in (0.2, 0.5, 0.9):
        settings = (f"method.lam={lam}", "method.k=5")
        last = problem.play_to_the_end("method=knn_per", *settings, rounds=3)
        network = problem.make_network()
        model = {name.removeprefix("model."): value for name, value in last.global_model().items()}
        tensors = [model[name] for name in ("hidden.0.weight", "hidden.0.bias")]
        tensors += [model[name] for name in ("classifier.weight", "classifier.bias")]
        for parameter, tensor in zip(network.parameters(), tensors, strict=True):
            parameter.data = tensor
        for client in range(CLIENTS):
            with torch.no_grad():
                features = network.base(problem.samples(client)[0]).numpy()
                queries = network.base(problem.samples(client, "test")[0])
                outputs = torch.softmax(network.classifier(queries), 1).numpy()
            peer = peer_type.__new__(peer_type)
            peer.capacity, peer.k, peer.num_classes = 1, 5, CLASSES
            peer.features_flag = peer.datastore_flag = True
            peer.features_dimension = HIDDEN
            labels = problem.samples(client)[1].numpy()
            peer.datastore = types.SimpleNamespace(index=BruteForce(features), labels=labels)
            peer.test_features, peer.test_model_outputs = queries.numpy(), outputs
            peer.test_labels = problem.samples(client, "test")[1].numpy()
            peer.gather_knn_outputs(mode="test", scale=1.0)
            mixed = lam * peer.test_knn_outputs + (1 - lam) * outputs
            theirs.append({"probabilities": torch.as_tensor(mixed)})
            predicted = last.predict(client, last.samples(client)[0])
            ours.append({"probabilities": torch.as_tensor(predicted).exp()})
    return ours, theirs


OBP_SETTINGS = (
    (0.9, 0.0, "global"),
    (0.5, 0.5, "global"),
    (0.99, 0.0, "none"),
    (0.9, 0.3, "layer"),
)


def list_comparisons() -> list[Comparison]:
    """Return what is compared with single repositories."""
    comparisons = []
    for score, repository in (("obp", "FedOBP_CODE"), ("obp_as_published", "FedOBP")):
        for q, average, norm in OBP_SETTINGS:
            play = partial(play_fedobp, score=score, q=q, average=average, norm=norm)
            detail = f"score={score}, q {q}, moving average {average}, norm {norm}"
            comparisons.append(Comparison("fedobp", f"uglyghost/{repository}", detail, "", play))
    for q in (0.5, 0.9):
        detail = f"score=fisher, q {q} of each tensor, norm layer"
        undone = "scores the model that a worker last held"
        play = partial(play_fisher, q=q)
        comparisons.append(Comparison("fedobp", "uglyghost/FedOBP", detail, undone, play))
    for q, classifier_only in ((0.9, False), (0.5, True)):
        play = partial(play_seqfededt, q=q, classifier_only=classifier_only)
        detail = f"q {q}" + (" of the classifier" if classifier_only else "")
        comparisons.append(Comparison("seqfededt", "tian0920/SeqFedEDT", detail, "", play))
    for every, alpha, p, rounds in ((2, 0.8, 0.25, 6), (1, 0.3, 0.5, 5)):
        play = partial(play_fedselect, every=every, alpha=alpha, p=p, rounds=rounds)
        detail = f"window of {every}, alpha {alpha}, p {p}"
        comparisons.append(Comparison("fedselect", "lapisrocks/fedselect", detail, "", play))
    for transfer in ("kd", "mmd"):
        undone = "its kernel loses digits: in double precision" if transfer == "mmd" else ""
        play = partial(play_fedphp, transfer=transfer)
        comparisons.append(Comparison("fedphp", "lxcnju/FedRepo", transfer, undone, play))
    first_round = "masks by a model that never trained in round 1"
    comparisons += [
        Comparison("feddpa", "xiyuanyang45/DynamicPFL", "no noise", first_round, play_feddpa),
        Comparison("apple", "ljaiverson/pFL-APPLE", "", "", play_apple),
        Comparison("floco", "dennis-grinwald/floco", "centres alone", "", play_floco_centres),
        Comparison("knn_per", "omarfoq/knn-per", "probabilities", "exact neighbours", play_knn_per),
    ]
    return comparisons
