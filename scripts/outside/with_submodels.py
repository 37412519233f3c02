"""Sub-models and BatchNorm: code of HeteroFL, FedRolex, FlexFL, FedSPU and its dropout methods."""

from __future__ import annotations

import copy
import itertools
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedpfl.engine import keys
from outside.peers import Comparison, Lens, Repair, be_quiet, define_in, load_file
from outside.problem import (
    CHANNELS,
    CLASSES,
    CLIENTS,
    CONVOLVED_RATE,
    EPOCHS,
    HIDDEN,
    LEARNING_RATE,
    TRAIN_SIZES,
    Models,
    Problem,
    SmallNet,
    keep_drawn_state,
    name_entries,
)

HETEROFL = (
    "diaoenmao/HeteroFL-Computation-and-Communication-Efficient-Federated-Learning-for-"
    "Heterogeneous-Clients"
)
WIDTHS = (1.0, 0.5, 0.25, 0.125)
"""Of the four clients: shares of the hidden neurons."""
SPU_WIDTHS = (0.2, 0.5, 0.75, 1.0)
Pair = tuple[list[Models], list[Models]]


def format_widths(widths: Sequence[float]) -> str:
    """Return the setting of fedpfl that gives each client its width."""
    return f"method.widths=[{','.join(map(str, widths))}]"


# ---- HeteroFL and FedRolex: the same client in both


class MaskedNet(nn.Module):
    """A narrow small network, which masks logits and names layers as the peers' networks do.

    Args:
        hidden: how many hidden neurons there are.
        names: of its two layers.
    """

    def __init__(self, hidden: int, names: tuple[str, str]):
        super().__init__()
        network = SmallNet(hidden=hidden)
        self.names = names
        self.add_module(names[0], network.base[1])
        self.add_module(names[1], network.classifier)

    def to(self, *_: Any, **__: Any) -> MaskedNet:
        """Stay on the CPU."""
        return self

    def forward(self, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return logits and their loss; 0 for classes that the client lacks."""
        first, last = (self.get_submodule(name) for name in self.names)
        logits = last(torch.relu(first(samples["img"].flatten(1))))
        is_absent = torch.ones(CLASSES, dtype=torch.bool)
        is_absent[samples["label_split"]] = False
        logits = logits.masked_fill(is_absent, 0)
        loss = nn.functional.cross_entropy(logits, samples["label"])
        return {"score": logits, "loss": loss}


def make_training_scope(width_names: tuple[str, str]) -> dict[str, Any]:
    """Return what the training of HeteroFL and FedRolex looks up."""

    def make_network(model_rate: float, **_: Any) -> MaskedNet:
        return MaskedNet(int(np.ceil(model_rate * HIDDEN)), width_names)

    settings = {"device": "cpu", "model_name": "conv", "num_epochs": {"local": EPOCHS}}
    settings.update({"metric_name": {"train": {"Local": []}}, "log_interval": 1})
    return {
        "torch": torch,
        "cfg": settings,
        "models": types.SimpleNamespace(conv=make_network),
        "resnet": types.SimpleNamespace(resnet18=make_network),
        "Metric": lambda: types.SimpleNamespace(evaluate=lambda *_: {}),
        "make_optimizer": lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
        "collate": lambda samples: samples,
        "to_device": lambda samples, _: samples,
    }


def list_batches(problem: Problem, client: int) -> list[dict[str, Tensor]]:
    """Return a client's minibatches as HeteroFL reads them."""
    return [{"img": images, "label": labels} for images, labels in problem.batches(client)]


def list_classes(problem: Problem, client: int) -> list[int]:
    """Return which classes a client has."""
    return sorted(problem.samples(client)[1].unique().tolist())


def name_layers(problem: Problem, names: tuple[str, str]) -> dict[str, Tensor]:
    """Return the initial small network by the peer's names of layers."""
    keys_of_peer = [f"{layer}.{entry}" for layer in names for entry in ("weight", "bias")]
    tensors = problem.make_network().parameters()
    return {key: tensor.detach() for key, tensor in zip(keys_of_peer, tensors, strict=True)}


def play_heterofl(folder: Path, problem: Problem) -> Pair:
    """Compare the global model."""
    names, rounds = ("hidden", "classifier"), 3
    # ---- Step 1: the official server and client.
    scope = make_training_scope(names)
    define_in(scope, folder / "src" / "train_classifier_fed.py", "Local")
    settings = {"model_name": "conv", "model_split_mode": "fix", "global_model_rate": 1.0}
    sys.modules["config"] = types.ModuleType("config")
    sys.modules["config"].__dict__["cfg"] = settings
    module = load_file("fed", folder / "src" / "fed.py")
    classes = [list_classes(problem, client) for client in range(CLIENTS)]
    server = module.Federation(OrderedDict(name_layers(problem, names)), WIDTHS, classes)
    log = types.SimpleNamespace(append=lambda *_, **__: None)
    # ---- Step 2: rounds.
    played, everybody = [], list(range(CLIENTS))
    for _ in range(rounds):
        with be_quiet():
            parameters, places = server.distribute(everybody)
            for client in everybody:
                batches = list_batches(problem, client)
                peer = scope["Local"](server.model_rate[client], batches, classes[client])
                parameters[client] = copy.deepcopy(
                    peer.train(parameters[client], LEARNING_RATE, log)
                )
            server.combine(parameters, places, everybody)
        played.append(name_entries("server/", list(server.global_parameters.values())))
    chosen = ("method=heterofl", format_widths(WIDTHS), "local.clip=1")
    return problem.play(*chosen, rounds=rounds), played


def play_fedrolex(folder: Path, problem: Problem) -> Pair:
    """Compare the global model."""
    names, rounds = ("conv1", "linear"), 4
    # ---- Step 1: the official server and client, without their workers.
    scope = make_training_scope(names)
    ray = types.SimpleNamespace(remote=lambda **_: lambda one: one, get=lambda one: one)
    scope["ray"] = ray
    define_in(scope, folder / "resnet_client.py", "ResnetClient")
    stub = types.ModuleType("ray")
    vars(stub).update(vars(ray))
    sys.modules["ray"] = stub
    forwards = ("torch.roll(model_idx, roll, -1)", "torch.roll(model_idx, -roll, -1)")
    weights = ("            self.tmp_counts = tmp_counts_cpy", "")
    module = load_file("resnet_server", folder / "resnet_server.py", (forwards, weights))
    settings = {**scope["cfg"], "model_split_mode": "fix", "global_model_rate": 1.0}
    settings.update({"overlap": None, "weighting": "avg", "num_users": CLIENTS})
    classes = [list_classes(problem, client) for client in range(CLIENTS)]
    network = MaskedNet(HIDDEN, names)
    network.load_state_dict(name_layers(problem, names))
    network.cpu = lambda: network  # type: ignore[method-assign, assignment]
    server = module.ResnetServerRoll(network, WIDTHS, {"label_split": classes}, settings)
    # ---- Step 2: rounds.
    played, everybody = [], list(range(CLIENTS))
    for _ in range(rounds):
        with be_quiet():
            parameters, places = server.distribute(everybody)
            for client in everybody:
                peer = scope["ResnetClient"].__new__(scope["ResnetClient"])
                vars(peer).update(cfg=settings, metric=scope["Metric"](), log=lambda *_: None)
                vars(peer).update(client_id=client, model_rate=server.model_rate[client])
                vars(peer).update(data_loader=list_batches(problem, client), label_split=classes)
                vars(peer).update(lr=LEARNING_RATE, local_parameters=parameters[client])
                peer.logger = types.SimpleNamespace(append=lambda *_, **__: None)
                parameters[client] = peer.step(client, CLIENTS, 0)
            server.step(parameters, places, everybody)
        played.append(name_entries("server/", list(server.global_parameters.values())))
    chosen = ("method=fedrolex", "method.rounding=ceil", "method.weighting=equal")
    return problem.play(*chosen, format_widths(WIDTHS), "local.clip=1", rounds=rounds), played


# ---- FedSPU, and the dropout methods that it compares itself with

WRONG_COLUMNS = """                    for f in range(CLASSES):
                        j1 = 0
                        for j in last_layer_indices:
                            if (layer_count,f,j)"""
FIRST_VALUE = """                            Aggregation_Dict[(layer_count, f)] = [([layer[i1]], num)]
"""
WRONG_UNION = """                    for j in last_layer_indices:
                        full_layer[f][j] = sub_layer[f][j1]"""
AGGREGATION_REPAIRS: tuple[Repair, ...] = (
    (FIRST_VALUE, f"{FIRST_VALUE}                        i1 += 1\n"),
    ("CLASSES = 62", f"CLASSES = {CLASSES}"),
    ("rate >= 0.99", "rate > 1"),
    (WRONG_COLUMNS, WRONG_COLUMNS.replace("last_layer_indices", "selected_filters")),
    (WRONG_UNION, WRONG_UNION.replace("last_layer_indices", "selected_filters")),
)
WRONG_MERGE = """                        for j in last_layer_indices:
                            full_layer[f][j] = sub_layer[f][j1]"""
WRONG_MASK = """                if i in non_mask_filters or k == 'fc.weight':
"""
RIGHT_MASK = """                if k == 'fc.weight':
                    gradient_mask[i] = 0.0
                    gradient_mask[i, non_mask_filters] = 1.0
                elif i in non_mask_filters:
"""
CLIENT_REPAIRS: tuple[Repair, ...] = (
    (", compute_normalized_norm, compute_update", ""),  # which util has not
    ("CLASSES = 62", f"CLASSES = {CLASSES}"),
    (WRONG_MERGE, WRONG_MERGE.replace("last_layer_indices", "selected_filters")),
    (WRONG_MASK, RIGHT_MASK),
    ("lr=5e-4", f"lr={CONVOLVED_RATE}"),
)
FJORD_REPAIRS: tuple[Repair, ...] = (
    ("CLASSES = 62", f"CLASSES = {CLASSES}"),
    ("lr=0.001", f"lr={CONVOLVED_RATE}"),
)
DROPOUT_REPAIRS = FJORD_REPAIRS
PRUNED_REPAIRS: tuple[Repair, ...] = (
    ("CLASSES = 62", f"CLASSES = {CLASSES}"),
    ("rate >= 0.99", "rate > 1"),
    (WRONG_MERGE, WRONG_MERGE.replace("last_layer_indices", "selected_filters")),
)
RANKED_REPAIRS: tuple[Repair, ...] = (
    *PRUNED_REPAIRS,
    ("lr=2e-4", f"lr={CONVOLVED_RATE}"),
    (
        "maskmodel = CNN(in_channels=CHANNELS, outputs=CLASSES).to(DEVICE)",
        "maskmodel = deepcopy(self.model)",
    ),
    ("                break\n", ""),
)
NORM_REPAIRS: tuple[Repair, ...] = (
    *PRUNED_REPAIRS,
    ("lr=0.001", f"lr={CONVOLVED_RATE}"),
    ("range(6*7*7)", "range(WIDTH*7*7)"),
)


def stand_in_for_flower() -> None:
    """Give the peers what they take of Flower: a base class, bare results and a mean."""

    def average(results: Sequence[tuple[Sequence[Any], int]]) -> list[Any]:
        total = sum(weight for _, weight in results)
        layers = zip(*[layers for layers, _ in results], strict=True)
        weights = [weight for _, weight in results]
        return [
            sum(layer * weight for layer, weight in zip(layer_of_all, weights, strict=True)) / total
            for layer_of_all in layers
        ]

    contents: dict[str, dict[str, Any]] = {
        "flwr": {"client": types.SimpleNamespace(Client=object)},
        "flwr.common": {
            "ndarrays_to_parameters": lambda arrays: arrays,
            "parameters_to_ndarrays": lambda arrays: arrays,
            "Code": types.SimpleNamespace(OK=0),
            **dict.fromkeys(("EvaluateIns", "EvaluateRes", "FitIns"), types.SimpleNamespace),
            **dict.fromkeys(("FitRes", "Status"), types.SimpleNamespace),
        },
        "flwr.common.logger": {"log": print},
        "flwr.server": {},
        "flwr.server.client_manager": {"SimpleClientManager": object},
        "flwr.server.criterion": {"Criterion": object},
        "flwr.server.strategy": {},
        "flwr.server.strategy.aggregate": {"aggregate": average},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(attributes)
        sys.modules[name] = module


class SpuPeer:
    """Drive FedSPU's code for EMNIST, or that of a method that it compares itself with.

    Args:
        folder: of the checkout.
        problem: with convolutions.
        name: of the client's module.
        repairs: of it.
    """

    def __init__(self, folder: Path, problem: Problem, name: str, repairs: tuple[Repair, ...]):
        stand_in_for_flower()
        self.problem = problem
        source = folder / "EMNIST"
        self.network = load_file("models", source / "models.py").CNN
        self.util = load_file("util", source / "util.py", AGGREGATION_REPAIRS)
        module = load_file(f"{name}_client", source / f"{name}_client.py", repairs)
        self.client_type = vars(module)[f"{name}_client"]
        self.server = self.make_network()
        initial = problem.make_network().state_dict()
        names = [name.replace("base.", "").replace("classifier", "fc") for name in initial]
        self.server.load_state_dict(dict(zip(names, initial.values(), strict=True)))

    def make_network(self, **options: Any) -> Any:
        """Return one of the peer's networks."""
        return self.network(outputs=CLASSES, **options).to(memory_format=self.problem.layout)

    def make_client(self, client: int, **networks: Any) -> Any:
        """Return an object of the peer's class for one round, without data sets of its own."""
        peer = self.client_type.__new__(self.client_type)
        batches = self.problem.batches(client)
        loaders = {"trainloader": batches, "testloader": batches}
        vars(peer).update(cid=client, local_epoch=EPOCHS, **loaders, **networks)
        return peer

    def aggregate(self, results: Sequence[Any]) -> Models:
        """Put the mean of uploads into the server's model, and return its parameters."""
        current = self.util.get_filters(self.server)
        self.util.set_filters(self.server, self.util.spu_aggregation(list(results), current))
        return name_entries("server/", self.server)


def seed_lots() -> None:
    """Let fedpfl draw each client's lots by the round and the client alone."""

    def make_generator(draws: keys.Draws, client: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * draws.round + client)

    keys.Draws.server = make_generator  # type: ignore[method-assign]


def draw_channels(number: int, client: int, width: float) -> list[list[int]]:
    """Return which channels of both convolutions fedpfl draws for a client, in a round."""
    generator = torch.Generator().manual_seed(1000 * number + client)
    lots = torch.rand(2 * CHANNELS, generator=generator).split(CHANNELS)
    count = max(1, int(width * CHANNELS + 1e-9))
    return [sorted(lot.argsort(descending=True)[:count].tolist()) for lot in lots]


def choose_in_turn(channels: Sequence[list[int]]) -> Callable[..., list[int]]:
    """Return a stand-in for `random.sample` that gives the channels where the peer draws them.

    It draws once for each tensor, and twice for weights of a convolution; the second convolution
    begins with the eighth draw.
    """
    turns: Iterator[int] = itertools.count()
    return lambda *_: channels[0] if next(turns) < 7 else channels[1]


def play_spu(problem: Problem, method: str, rounds: int) -> list[Models]:
    """Train one of FedSPU's methods with fedpfl."""
    return problem.play(f"method={method}", format_widths(SPU_WIDTHS), rounds=rounds)


def play_fedspu(folder: Path, problem: Problem) -> Pair:
    """Compare the global model and the clients' full ones."""
    rounds = 3
    problem = Problem(problem.folder, problem.engine, is_convolved=True)
    seed_lots()
    peer = SpuPeer(folder, problem, "spues", CLIENT_REPAIRS)
    personal = [copy.deepcopy(peer.util.get_filters(peer.server)) for _ in range(CLIENTS)]
    played = []
    for number in range(1, rounds + 1):
        results = []
        for client, width in enumerate(SPU_WIDTHS):
            channels = draw_channels(number, client, width)
            peer.util.random = Lens(random, sample=choose_in_turn(channels))
            places, part = peer.util.generate_filters_random(peer.server, width)
            network = peer.make_network()
            config = {"drop_info": places, "personal model": personal[client], "last loss": None}
            instructions = types.SimpleNamespace(parameters=part, config=config)
            result = peer.make_client(client, model=network).fit(instructions)
            results.append(result)
            personal[client] = copy.deepcopy(result.metrics["personal model"])
        models = peer.aggregate(results)
        for client, trained in enumerate(personal):
            network = peer.make_network()
            peer.util.set_filters(network, trained)
            models.update(name_entries(f"{client}/", network))
        played.append(models)
    return play_spu(problem, "fedspu", rounds), played


def play_fjord(folder: Path, problem: Problem) -> Pair:
    """Compare the global model."""
    rounds = 3
    problem = Problem(problem.folder, problem.engine, is_convolved=True)
    peer = SpuPeer(folder, problem, "fjord", FJORD_REPAIRS)
    played = []
    for _ in range(rounds):
        results = []
        for client, width in enumerate(SPU_WIDTHS):
            places, part = peer.util.generate_subnet_ordered(peer.server, width)
            network = peer.make_network(rate=width)
            instructions = types.SimpleNamespace(parameters=part, config={"drop_info": places})
            results.append(peer.make_client(client, model=network).fit(instructions))
        played.append(peer.aggregate(results))
    return play_spu(problem, "fjord", rounds), played


def play_random_dropout(folder: Path, problem: Problem) -> Pair:
    """Compare the global model."""
    rounds = 3
    problem = Problem(problem.folder, problem.engine, is_convolved=True)
    seed_lots()
    peer = SpuPeer(folder, problem, "feddrop", DROPOUT_REPAIRS)
    played = []
    for number in range(1, rounds + 1):
        results = []
        for client, width in enumerate(SPU_WIDTHS):
            channels = draw_channels(number, client, width)
            peer.util.random = Lens(random, sample=choose_in_turn(channels))
            places, part = peer.util.generate_filters_random(peer.server, width)
            instructions = types.SimpleNamespace(parameters=part, config={"drop_info": places})
            worker = peer.make_client(client, model=peer.make_network())
            results.append(worker.fit(instructions))
        played.append(peer.aggregate(results))
    return play_spu(problem, "random_dropout", rounds), played


def play_pruned(
    folder: Path, problem: Problem, method: str, name: str, repairs: tuple[Repair, ...]
) -> Pair:
    """Compare the global model of a method whose clients prune once, in round 1.

    Args:
        folder: of the checkout.
        problem: without convolutions, which it gets.
        method: in fedpfl.
        name: of the peer's module.
        repairs: of it.
    """
    rounds = 3
    # With the usual sizes an activation of Hermes lies within rounding of 0, and parts there.
    sizes = (48, 32, 64, 32) if method == "hermes" else TRAIN_SIZES
    problem = Problem(problem.folder, problem.engine, train_sizes=sizes, is_convolved=True)
    peer = SpuPeer(folder, problem, name, repairs)
    personal = [copy.deepcopy(peer.util.get_filters(peer.server)) for _ in range(CLIENTS)]
    places: list[Any] = [{}] * CLIENTS
    played = []
    for number in range(rounds):
        results = []
        for client, width in enumerate(SPU_WIDTHS):
            # ---- Step 1: the server's part of a client that has pruned, else the whole.
            part = personal[client]
            if number:
                holder = peer.make_client(client, model=peer.server)
                part = holder.get_updated_parameters(places[client])
            config = {"drop_info": places[client], "needmask": not number}
            config["personal model"] = personal[client]
            instructions = types.SimpleNamespace(parameters=part, config=config)
            # ---- Step 2: the client's round.
            worker = peer.make_client(client, model=peer.make_network(), sub_model_rate=width)
            result = worker.fit(instructions)
            results.append(result)
            places[client] = result.metrics["drop_info"]
            personal[client] = copy.deepcopy(result.metrics["personal model"])
        played.append(peer.aggregate(results))
    # ---- Step 3: fedpfl's; Hermes ranks what it received, the others a copy that has trained.
    settings = [f"method={method}", format_widths(SPU_WIDTHS), "method.ranking_lr=0.005"]
    if method == "hermes":
        settings.append("method.ranking_epochs=0")
    return problem.play(*settings, rounds=rounds), played


# ---- FlexFL


class NarrowNet(SmallNet):
    """A small network of some hidden neurons, which answers as FlexFL's do."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Return logits."""
        return {"output": super().forward(images)}


def play_flexfl(folder: Path, problem: Problem) -> Pair:
    """Compare the global model, with equal shares in all layers and self-distillation."""
    from fedpfl.methods.flexfl import FlexFL

    rounds, gamma, temperature, devices = 3, 2.0, 3.0, (0, 1, 2, 2)
    # ---- Step 1: fedpfl's rounds, which also say how many neurons a level has.
    seed_lots()
    settings = (f"method.gamma={gamma}", f"method.temperature={temperature}")
    settings += ("method.devices=[1,1,2]",)
    with keep_drawn_state(FlexFL) as drawn:
        ours = problem.play("method=flexfl", *settings, rounds=rounds)
    widths = [int(active[:-1].sum()) for active in drawn["levels"]]
    # ---- Step 2: the peer's networks and functions.
    scope: dict[str, Any] = {"torch": torch, "copy": copy, "nn": nn, "F": nn.functional}
    scope.update(OrderedDict=OrderedDict, _should_filter_inactive_vit=lambda _: False)
    scope["_build_optimizer"] = lambda _, parameters, __: torch.optim.SGD(
        parameters, lr=LEARNING_RATE
    )
    parts = ("_is_qkv_weight", "_is_qkv_bias", "_prefix_slices", "_slice_param")
    parts += ("_accumulate_param", "split_model", "Aggregation_FedSlim")
    define_in(scope, folder / "models" / "Fed.py", *parts)
    define_in(scope, folder / "models" / "Update.py", "KDLoss", "LocalUpdate_FlexFL")
    options = types.SimpleNamespace(T=temperature, gamma=gamma, local_ep=EPOCHS, device="cpu")
    networks = [NarrowNet(hidden=width) for width in widths]
    server = dict(problem.make_network().state_dict())
    sizes = [problem.size(client) for client in range(CLIENTS)]
    # ---- Step 3: its rounds.
    played = []
    for number in range(1, rounds + 1):
        for network in networks:
            network.load_state_dict(scope["split_model"](server, network.state_dict()))
        uploads = []
        for client, device in enumerate(devices):
            generator = torch.Generator().manual_seed(1000 * number + client)
            level = min(int(torch.randint(len(widths), (), generator=generator)), device)
            peer = scope["LocalUpdate_FlexFL"].__new__(scope["LocalUpdate_FlexFL"])
            vars(peer).update(args=options, loss_func=scope["KDLoss"](options), verbose=False)
            peer.ldr_train = problem.batches(client)
            copies = copy.deepcopy(networks)
            with be_quiet():
                trained = peer.train(number, copy.deepcopy(copies[level]), copies, level)
            uploads.append(trained)
        server = scope["Aggregation_FedSlim"](uploads, sizes, server)
        played.append(name_entries("server/", list(server.values())))
    return ours, played


def list_comparisons() -> list[Comparison]:
    """Return what is compared of sub-models."""
    spu = "ZiruNiu0/FedSPU"
    ranking = "ranks a network drawn anew, by one minibatch"
    faults = "columns behind the flattening by channel numbers; clients of full width overwrite"
    return [
        Comparison("heterofl", HETEROFL, "masked logits", "", play_heterofl),
        Comparison(
            "fedrolex",
            "AIoT-MLSys-Lab/FedRolex",
            "rounding=ceil, equal weights",
            "rolls backwards",
            play_fedrolex,
        ),
        Comparison("flexfl", "Roland4396/FlexFL-main", "equal shares of layers", "", play_flexfl),
        Comparison("fedspu", spu, "convolutions, BatchNorm", faults, play_fedspu),
        Comparison("fjord", spu, "own width, convolutions, BatchNorm", faults, play_fjord),
        Comparison("random_dropout", spu, "convolutions, BatchNorm", faults, play_random_dropout),
        Comparison(
            "hermes",
            spu,
            "ranking_epochs=0, convolutions, BatchNorm",
            f"columns of the first six channels alone; {faults}",
            partial(play_pruned, method="hermes", name="adadrop", repairs=NORM_REPAIRS),
        ),
        Comparison(
            "fedmp",
            spu,
            "convolutions, BatchNorm",
            f"{ranking}; {faults}",
            partial(play_pruned, method="fedmp", name="fedmp", repairs=RANKED_REPAIRS),
        ),
        Comparison(
            "prunefl",
            spu,
            "convolutions, BatchNorm",
            f"{ranking}; {faults}",
            partial(play_pruned, method="prunefl", name="pruneFL", repairs=RANKED_REPAIRS),
        ),
    ]
