"""FL-bench's servers and clients on the common problem."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpfl import oracle
from fedpfl.engine import keys
from outside.peers import Comparison, Lens, repair_module
from outside.plain import Case, Keeper, list_plain_comparisons
from outside.problem import (
    CLIENTS,
    EPOCHS,
    NAMES,
    TRAIN_SIZES,
    Models,
    Problem,
    keep_drawn_state,
    rename_entries,
)

REPOSITORY = "KarhouTam/FL-bench"


def take_server(server: Any) -> Models:
    """Return the global model."""
    return rename_entries("server/", server.public_model_params)


def take_personal(server: Any) -> Models:
    """Return what clients have by themselves."""
    models: Models = {}
    for client, entries in server.clients_personal_model_params.items():
        models.update(rename_entries(f"{client}/", entries))
    return models


def take_both(server: Any) -> Models:
    """Return the global model and what clients have by themselves, laid over it."""
    models: Models = {}
    for client, entries in server.clients_personal_model_params.items():
        models.update(rename_entries(f"{client}/", {**server.public_model_params, **entries}))
    return models


def take_ditto(server: Any) -> Models:
    """Return the global model and the clients' whole ones."""
    models = take_server(server)
    for client, entries in server.clients_personalized_model_params.items():
        models.update(rename_entries(f"{client}/", entries))
    return models


class Bench(Keeper, oracle.Bench):
    """Drive a checkout of FL-bench, and keep models after each round."""

    snapshot = staticmethod(take_server)

    def look(self, server: Any) -> None:
        """Keep the models."""
        self.taken[self.round] = self.snapshot(server)


PLAIN_CASES = (
    Case("fedavg", "fedavg"),
    Case("fedavg", "fedavg", detail="convolutions, BatchNorm", is_convolved=True),
    Case("fedbn", "fedbn", {}, (), take_both, "convolutions, BatchNorm", is_convolved=True),
    Case("fedprox", "fedprox", {"mu": 0.7}, ("method.mu=0.7",)),
    Case("fedbabu", "fedbabu"),
    Case(
        "fedrep",
        "fedrep",
        settings=("method.head_epochs=2", "method.personal_init=server_average"),
        snapshot=take_both,
        detail="server_average",
    ),
    Case(
        "fedper",
        "fedper",
        settings=("method.head_init=server_average",),
        snapshot=take_both,
        detail="server_average",
    ),
    Case(
        "lg_fedavg",
        "lgfedavg",
        settings=("method.variant=as_published", "method.personal_init=server_average"),
        snapshot=take_both,
        detail="as_published, server_average",
    ),
    Case("local_only", "local", {}, (), take_personal),
    Case(
        "fedavgm",
        "fedavgm",
        {"server_momentum": 0.9},
        ("method.momentum=0.9", "method.nesterov=true"),
    ),
    Case(
        "ditto",
        "ditto",
        {"lamda": 0.6, "pers_epoch": EPOCHS},
        ("method.lam=0.6", f"method.personal_epochs={EPOCHS}"),
        take_ditto,
    ),
    Case(
        "flute",
        "flute",
        {"rep_round": 1},
        ("method.variant=as_published",),
        take_both,
        "as_published",
        is_partial=False,
    ),
)


# ---- What departs from its method in FL-bench, and is put right first


def play_scaffold(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model; an epoch is one minibatch there."""
    bench = Bench(folder, problem)
    client_type = importlib.import_module("src.client.scaffold").SCAFFOLDClient
    server_type = importlib.import_module("src.server.scaffold").SCAFFOLDServer
    pack, aggregate = client_type.package, server_type.aggregate_client_updates

    def pack_variate(client: Any) -> dict[str, Any]:
        return {**pack(client), "variate": [tensor.clone() for tensor in client.c_local]}

    def keep_variates(server: Any, packages: Mapping[int, Any]) -> None:
        for client, package in packages.items():
            server.c_local[client] = package["variate"]
        aggregate(server, packages)

    client_type.package = pack_variate
    server_type.aggregate_client_updates = keep_variates
    theirs = bench.play("scaffold", take_server, rounds=3)
    settings = ("method=scaffold", "local.epochs=null", f"local.steps={EPOCHS}")
    return problem.play(*settings, rounds=3), theirs


def play_fedopt(folder: Path, problem: Problem, variant: str) -> tuple[list[Models], list[Models]]:
    """Compare the global model of FedAdam or FedYogi."""
    tau = 0.001

    def begin_with_tau(server: Any) -> None:
        for velocity in server.adaptive_optimizer.velocities:
            velocity.fill_(tau**2)

    values = {"beta1": 0.9, "beta2": 0.99, "server_lr": 0.1, "tau": tau}
    theirs = Bench(folder, problem).play(
        "fedopt", take_server, rounds=3, prepare=begin_with_tau, type=variant, **values
    )
    settings = ("method.lr=0.1", "method.beta1=0.9", "method.beta2=0.99", f"method.tau={tau}")
    return problem.play(f"method=fed{variant}", *settings, rounds=3), theirs


def play_apfl(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare global and private models, at a fixed share."""
    bench = Bench(folder, problem)
    optimizers = importlib.import_module("src.utils.constants").OPTIMIZERS

    class OneStepABatch(torch.optim.SGD):
        """Leave the first of a minibatch's two steps out: gradients then add up to the second."""

        is_second = False

        def step(self, *arguments: Any) -> Any:
            if self.is_second:
                super().step(*arguments)
            self.is_second = not self.is_second

    optimizers["sgd"] = OneStepABatch

    def snapshot(server: Any) -> Models:
        models = take_server(server)
        for client, entries in server.client_local_model_params.items():
            models.update(rename_entries(f"{client}/v.", entries))
        return models

    theirs = bench.play("apfl", snapshot, alpha=0.4, adaptive_alpha=0)
    return problem.play("method=apfl", "method.alpha=0.4", "method.adaptive=false"), theirs


def play_flute(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare body and heads."""
    bench = Bench(folder, problem)
    network_type = importlib.import_module("src.utils.models").DecoupledModel
    read_features = network_type.get_last_features
    network_type.get_last_features = lambda network, images: read_features(
        network, images, detach=False
    )
    theirs = bench.play(
        "flute", take_both, rep_round=1, lamda1=0.25, lamda2=0.0025, lamda3=0.0005, nc2_lr=0.5
    )
    return problem.play("method=flute"), theirs


def play_cfl(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clusters' models of clients of one size, as its means are uniform.

    One split only: the second takes places within a cluster for numbers of clients there.
    """
    problem = Problem(problem.folder, problem.engine, train_sizes=[32] * CLIENTS)
    bounds = {"eps_1": 0.35, "eps_2": 0.1, "min_cluster_size": 3, "start_clustering_round": 0}
    theirs = Bench(folder, problem).play("cfl", take_personal, rounds=4, **bounds)
    settings = ("eps1=0.35", "eps2=0.1", "warmup=0", "linkage=complete", "clusters=2")
    chosen = [f"method.{setting}" for setting in settings]
    return problem.play("method=cfl", *chosen, rounds=4), theirs


def play_per_fedavg(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model, with Hessian-vector products of three minibatches a step.

    A large difference quotient, as a small one would blow rounding up.
    """
    problem = Problem(problem.folder, problem.engine, train_sizes=(48, 48, 96, 48))
    values = {"version": "hf", "beta": 0.05, "delta": 0.1}
    theirs = Bench(folder, problem).play("perfedavg", take_server, **values)
    settings = ("version=hf", "inner_lr=0.1", "outer_lr=0.05", "delta=0.1")
    return problem.play("method=per_fedavg", *[f"method.{value}" for value in settings]), theirs


def play_pfedhn(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clients' models; fedpfl's draw of the hypernetwork is given to FL-bench."""
    from fedpfl.methods.pfedhn import PFedHN

    settings = ("order=sequential", "rows=all", "embedding=3", "hidden=20", "lr=0.02")
    with keep_drawn_state(PFedHN) as drawn:
        ours = problem.play("method=pfedhn", *[f"method.{setting}" for setting in settings])
    initial = drawn["learned"]

    def prepare(server: Any) -> None:
        network = server.hypernet
        network.embedding.weight.data = initial["v"].clone()
        layers = [layer for layer in network.mlp if isinstance(layer, torch.nn.Linear)]
        for number, layer in enumerate(layers):
            layer.load_state_dict(initial["mlp"][str(number)])
        for name in server.public_model_param_names:
            output = network.params_generator[name.replace(".", "-")]
            output.weight.data = initial["weight"][NAMES.get(name, name)].clone()
            output.bias.data = initial["bias"][NAMES.get(name, name)].reshape(-1).clone()

    def snapshot(server: Any) -> Models:
        models: Models = {}
        for client in range(CLIENTS):
            tensors = server.hypernet(torch.tensor(client))
            entries = dict(zip(server.public_model_param_names, tensors, strict=True))
            models.update(rename_entries(f"{client}/", entries))
        return models

    hyperparameters = {"embed_dim": 3, "hidden_dim": 20, "hn_lr": 0.02, "common.buffers": "local"}
    theirs = Bench(folder, problem).play("pfedhn", snapshot, prepare=prepare, **hyperparameters)
    return ours, theirs


# ---- FLOCO: both draw the same points of the simplex


class SharedDraws:
    """Give fedpfl and FLOCO's code the same uniform numbers, by epoch and step alone.

    Args:
        count: how many a step takes.
    """

    def __init__(self, count: int):
        generator = torch.Generator().manual_seed(1)
        self.table = torch.rand(EPOCHS, 1 + max(TRAIN_SIZES), count, generator=generator)
        self.turns: Iterator[Tensor] = iter(())
        self.step = self.table[0, 0]

    def begin_client(self, steps: int) -> None:
        """Start again, as a client that makes so many steps an epoch.

        fedpfl draws the numbers of all steps' first samples first.
        """
        self.turns = iter(self.table[:, :steps].flatten(0, 1))

    def draw_rows(
        self, client: int, stream: str, epoch: int, rows: int, count: int, *_: Any
    ) -> Tensor:
        """Return fedpfl's numbers of an epoch, `[rows, count]`."""
        return self.table[epoch % EPOCHS, :rows, :count].clone()

    def exponential(self, size: int, **_: Any) -> np.ndarray:
        """Return the step's exponentials, as fedpfl makes them of uniform numbers."""
        self.step = next(self.turns)
        return -np.log1p(-self.step[:size].double().numpy())

    def uniform(self, low: float, high: float, size: int | None = None) -> Any:
        """Return the step's direction or, without a size, its radius."""
        if size is None:
            return high * float(self.step[-1])
        self.step = next(self.turns)
        return low + (high - low) * self.step[:size].double().numpy()


def play_floco(
    folder: Path, problem: Problem, is_private: bool = False
) -> tuple[list[Models], list[Models]]:
    """Compare the clients' models, before and after the projection in round 3.

    Args:
        folder: of the checkout.
        problem: what they train on.
        is_private: whether clients have a private simplex too, which is FLOCO+.
    """
    from fedpfl.methods.floco import Floco

    rounds, endpoints, tau, rho, lam = 4, 3, 2, 0.2, 0.6
    # ---- Step 1: fedpfl's rounds, which also say what the simplex begins with.
    draws = SharedDraws(endpoints + 1)
    keys.Draws.random = draws.draw_rows  # type: ignore[method-assign, assignment]
    chosen = [f"method.endpoints={endpoints}", f"method.tau={tau}", f"method.rho={rho}"]
    chosen.append(f"method=floco{'_plus' * is_private}")
    if is_private:
        chosen.append(f"method.lam={lam}")
    with keep_drawn_state(Floco) as drawn:
        ours = problem.play(*chosen, rounds=rounds)
    # ---- Step 2: the peer, which draws the same points, and starts with the same simplex.
    bench = Bench(folder, problem)
    mend_floco(draws)
    importlib.import_module("src.server.floco").np = Lens(np, random=draws)

    def prepare(server: Any) -> None:
        entries = problem.make_network().state_dict()
        for number, head in enumerate(drawn["endpoints"]["classifier.weight"]):
            entries[f"classifier._weights.{number}"] = head
        states = [server.public_model_params]
        if is_private:
            states += server.clients_personalized_model_params.values()
        for state in states:
            for name in state:
                state[name] = entries[name].clone()

    # ---- Step 3: each client's model at the centre of its region.
    def snapshot(server: Any) -> Models:
        models: Models = {}
        for client in range(CLIENTS):
            state = server.public_model_params
            if is_private:
                state = server.clients_personalized_model_params[client]
            centre = np.full(endpoints, 1 / endpoints)
            if server.projected_clients is not None:
                centre = server.projected_clients[client]
            heads = [state[f"classifier._weights.{number}"] for number in range(endpoints)]
            mixed = sum(share * head for share, head in zip(centre, heads, strict=True))
            names = ("base.1.weight", "base.1.bias", "classifier.bias")
            entries = {name: state[name] for name in names}
            models.update(rename_entries(f"{client}/", {**entries, "classifier.weight": mixed}))
        return models

    options: dict[str, Any] = {"endpoints": endpoints, "tau": tau, "rho": rho, "lamda": lam}
    options["pers_epoch"] = EPOCHS if is_private else 0
    return ours, bench.play("floco", snapshot, rounds, prepare, **options)


def mend_floco(draws: SharedDraws) -> None:
    """Let both simplexes draw the same points, and put FLOCO+ right."""
    module = repair_module(
        "src.client.floco",
        (
            "lamda * pers_param.data - global_param.data",
            "lamda * (pers_param.data - global_param.data)",
        ),
    )
    train, receive = module.training_loop, module.FlocoClient.set_parameters

    def train_from_start(dataloader: Any, **rest: Any) -> None:
        draws.begin_client(len(dataloader))
        train(dataloader=dataloader, **rest)

    def receive_region(client: Any, package: Any) -> None:
        receive(client, package)
        client.pers_model.subregion_parameters = package["subregion_parameters"]

    module.training_loop = train_from_start
    module.FlocoClient.set_parameters = receive_region


REPAIRED = (
    (
        "scaffold",
        "",
        "control variates are never returned; takes minibatches for epochs",
        play_scaffold,
    ),
    ("fedadam", "", "v begins at 0, in the paper at tau^2", partial(play_fedopt, variant="adam")),
    ("fedyogi", "", "v begins at 0, in the paper at tau^2", partial(play_fedopt, variant="yogi")),
    ("apfl", "fixed share", "steps the global model twice a minibatch", play_apfl),
    ("flute", "", "the body never trains", play_flute),
    ("cfl", "clients of one size, one split", "", play_cfl),
    ("per_fedavg", "second order", "", play_per_fedavg),
    ("pfedhn", "one client a step", "", play_pfedhn),
    ("floco", "", "", play_floco),
    (
        "floco_plus",
        "lam 0.6",
        "scales the private model, not the difference; forgets its region",
        partial(play_floco, is_private=True),
    ),
)


def list_comparisons() -> list[Comparison]:
    """Return what is compared with FL-bench."""
    repaired = [Comparison(case[0], REPOSITORY, *case[1:]) for case in REPAIRED]
    return list_plain_comparisons(PLAIN_CASES, REPOSITORY, Bench) + repaired
