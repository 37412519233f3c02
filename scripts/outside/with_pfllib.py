"""PFLlib's servers and clients on the common problem."""

from __future__ import annotations

import copy
import importlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpfl.oracle import FlcoreLibrary
from outside.peers import Comparison, Lens, repair_module
from outside.plain import Case, Keeper, list_plain_comparisons
from outside.problem import (
    CLASSES,
    CLIENTS,
    EPOCHS,
    LEARNING_RATE,
    Models,
    Problem,
    draw_halves,
    keep_drawn_state,
    name_entries,
)

REPOSITORY = "TsingZ0/PFLlib"


def take_clients(server: Any, prefix: str = "") -> Models:
    """Return what each client would be judged by."""
    models: Models = {}
    for client in server.clients:
        model = getattr(client, "model_per", client.model)
        models.update(name_entries(f"{client.id}/{prefix}", model))
    return models


def take_server(server: Any) -> Models:
    """Return the global model."""
    return name_entries("server/", server.global_model)


class Library(Keeper, FlcoreLibrary):
    """Drive a checkout of PFLlib, and keep models where a server judges them before a round."""

    snapshot = staticmethod(take_clients)

    def look(self, server: Any) -> None:
        """Keep the models."""
        self.taken.setdefault(self.round - 1, self.snapshot(server))


PLAIN_CASES = (
    Case("fedbn", "FedBN", detail="convolutions, BatchNorm", is_convolved=True),
    Case("fedavg", "FedAvg", snapshot=take_server),
    Case("fedprox", "FedProx", {"mu": 0.7}, ("method.mu=0.7",), take_server),
    Case("scaffold", "SCAFFOLD", snapshot=take_server),
    Case("fedper", "FedPer"),
    Case(
        "fedrep",
        "FedRep",
        {"plocal_epochs": 2},
        ("method.head_epochs=2", "method.body_epochs=3"),
    ),
    Case("fedbabu", "FedBABU"),
    Case("lg_fedavg", "LG_FedAvg"),
    Case(
        "ditto",
        "Ditto",
        {"mu": 0.6, "plocal_epochs": 2},
        ("method.lam=0.6", "method.personal_epochs=2"),
    ),
    Case(
        "fedala",
        "FedALA",
        {"rand_percent": 100, "layer_idx": 2},
        ("method.share=1.0", "method.layers=1"),
        is_partial=False,  # there clients learn their weights in each round, also who waits
    ),
    Case(
        "fedproto",
        "FedProto",
        {"lamda": 2.0},
        ("method.lam=2", "method.prototypes=all_epochs"),
        partial(take_clients, prefix="model."),
        is_partial=False,
    ),
    Case(
        "feddbe",
        "FedDBE",
        {"kl_weight": 5.0, "momentum": 0.3},
        ("method.kappa=5", "method.rho=0.3", f"method.bias_lr={LEARNING_RATE}"),
        take_server,
    ),
)


# ---- What departs from its method in PFLlib, and is put right first


def play_pfedme(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare global models and, as personal ones, theta."""
    library = Library(folder, problem)
    optimizers = importlib.import_module("flcore.optimizers.fedoptimizer")
    take_step = optimizers.pFedMeOptimizer.step

    def step_apart(optimizer: Any, *arguments: Any) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in take_step(optimizer, *arguments)]

    def snapshot(server: Any) -> Models:
        models = take_server(server)
        for client in server.clients:
            models.update(name_entries(f"{client.id}/", client.personalized_params))
        return models

    optimizers.pFedMeOptimizer.step = step_apart
    options = {"lamda": 5.0, "K": 3, "p_learning_rate": 0.05, "beta": 0.8}
    theirs = library.play("pFedMe", snapshot=snapshot, **options)
    settings = ("inner_steps=3", "inner_lr=0.05", "outer_lr=0.1", "average=samples", "beta=0.8")
    chosen = [f"method.{setting}" for setting in settings]
    return problem.play("method=pfedme", "method.lam=5", *chosen), theirs


def play_per_fedavg(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model; clients train twice a round there, for twice the epochs here."""

    def weigh_equally(server: Any) -> None:
        for client in server.clients:
            client.train_samples = 1

    theirs = Library(folder, problem).play("PerAvg", snapshot=take_server, prepare=weigh_equally)
    settings = ("method.inner_lr=0.1", "method.outer_lr=0.1", f"local.epochs={2 * EPOCHS}")
    return problem.play("method=per_fedavg", *settings), theirs


def play_fedrod(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model and the personal heads."""

    def snapshot(server: Any) -> Models:
        models = take_server(server)
        for client in server.clients:
            weight, bias = client.head.parameters()
            head = {"q.classifier.weight": weight, "q.classifier.bias": bias}
            models.update(name_entries(f"{client.id}/", head))
        return models

    theirs = Library(folder, problem).play("FedROD", snapshot=snapshot)
    return problem.play("method=fedrod"), theirs


def play_fedpac(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clients' models."""
    library = Library(folder, problem)
    module = importlib.import_module("flcore.servers.serverpac")
    module.random = Lens(random, sample=lambda population, count: list(population)[:count])
    mix_heads = module.FedPAC.aggregate_and_send_heads

    def mix_copies(server: Any) -> None:
        server.uploaded_heads = [copy.deepcopy(head) for head in server.uploaded_heads]
        mix_heads(server)

    def average_by_counts(prototypes_of_clients: Sequence[Mapping[int, Tensor]]) -> Any:
        # Classes that nobody has are empty lists there.
        sums: dict[int, Any] = defaultdict(list)
        for label in range(CLASSES):
            chosen = []
            for client, prototypes in enumerate(prototypes_of_clients):
                count = (problem.samples(client)[1] == label).sum()
                if label in prototypes:
                    chosen.append((count, prototypes[label]))
            if chosen:
                total = sum(count for count, _ in chosen)
                sums[label] = sum(count * prototype for count, prototype in chosen) / total
        return sums

    module.FedPAC.aggregate_and_send_heads = mix_copies
    module.proto_aggregation = average_by_counts
    theirs = library.play("FedPAC")
    return problem.play("method=fedpac", "method.head_lr=null"), theirs


def play_fedproto(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clients' models, with half of them in each round."""
    library = Library(folder, problem)
    module = importlib.import_module("flcore.servers.serverproto")
    average = module.proto_aggregation
    kept: dict[int, Tensor] = {}

    def average_and_keep(prototypes_of_clients: Any) -> Any:
        kept.update(average(prototypes_of_clients))
        # Classes that nobody ever had are empty lists there.
        return defaultdict(list, kept)

    module.proto_aggregation = average_and_keep
    theirs = library.play(
        *("FedProto", partial(take_clients, prefix="model."), 4),
        cohorts=draw_halves(4),
        lamda=2.0,
    )
    settings = ("method.lam=2", "method.prototypes=all_epochs", "participation=0.5")
    return problem.play("method=fedproto", *settings, rounds=4), theirs


def play_moon(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model."""

    def begin_with_second_round(server: Any) -> None:
        receive = server.receive_models
        for client in server.clients:
            client.mu = 0

        def receive_and_begin() -> None:
            for client in server.clients:
                client.mu = 2
            receive()

        server.receive_models = receive_and_begin

    theirs = Library(folder, problem).play(
        "MOON", snapshot=take_server, prepare=begin_with_second_round, tau=0.5
    )
    return problem.play("method=moon", "method.mu=2", "method.tau=0.5"), theirs


def play_fedcac(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model."""
    library = Library(folder, problem)
    module = importlib.import_module("flcore.servers.servercac")

    def send_models(server: Any) -> None:
        if server.clients[0].critical_parameter is not None:
            server.get_customized_global_models()
        module.Server.send_models(server)

    module.FedCAC.send_models = send_models
    theirs = library.play("FedCAC", snapshot=take_server, tau=0.4, beta=3)
    return problem.play("method=fedcac", "method.tau=0.4", "method.beta=3"), theirs


def play_fedas(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clients' stored models."""
    library = Library(folder, problem)
    server_type = importlib.import_module("flcore.servers.serveras").FedAS
    server_type.avg_generalization_metrics = lambda server: 0
    theirs = library.play("FedAS")
    return problem.play("method=fedas", "method.align_lr=0.01", "method.first=init"), theirs


def square_norm(vector: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return a vector's squared length."""
    return vector.square().sum()


def play_feddyn(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the global model."""
    library = Library(folder, problem)
    module = importlib.import_module("flcore.clients.clientdyn")
    module.torch = Lens(torch, norm=square_norm)
    theirs = library.play("FedDyn", snapshot=take_server, alpha=0.3)
    return problem.play("method=feddyn", "method.alpha=0.3"), theirs


def play_fedamp(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clients' models."""
    library = Library(folder, problem)
    sigma, step, pull = 20.0, 5.0, 0.8
    module = repair_module(
        "flcore.clients.clientamp",
        ("p.data.view(-1) for p in self.model", "p.view(-1) for p in self.model"),
    )
    module.torch = Lens(torch, norm=square_norm)
    importlib.import_module("flcore.servers.serveramp").clientAMP = module.clientAMP

    def begin_with_second_round(server: Any) -> None:
        receive = server.receive_models
        for client in server.clients:
            client.lamda = 0.0

        def receive_and_begin() -> None:
            for client in server.clients:
                client.lamda = pull
            receive()

        server.receive_models = receive_and_begin

    theirs = library.play(
        "FedAMP", prepare=begin_with_second_round, sigma=sigma, alphaK=step, lamda=pull
    )
    settings = (f"sigma={sigma}", f"share={step * (CLIENTS - 1) / sigma}", f"pull={pull / step}")
    return problem.play("method=fedamp", *[f"method.{value}" for value in settings]), theirs


def play_fedfomo(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare the clients' models, by the last fifth of their training samples."""
    problem = Problem(problem.folder, problem.engine, validation=0.2)
    library = Library(folder, problem)
    module = importlib.import_module("flcore.clients.clientfomo")
    module.DataLoader = torch.utils.data.DataLoader
    theirs = library.play("FedFomo", M=CLIENTS)
    settings = ("method.candidates=3", "method.explore=0", "method.fallback=keep", "validation=0")
    return problem.play("method=fedfomo", *settings), theirs


def play_gpfl(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare bodies, heads and valves; fedpfl draws embeddings and valve for both."""
    from fedpfl.methods.gpfl import GPFL

    with keep_drawn_state(GPFL) as initial:
        ours = problem.play("method=gpfl", "method.lam=0.01", "method.mu=0.1")

    # ---- Step 1: both begin alike, and conditions come from the embeddings that were received.
    def receive(client: Any, sent: Any) -> None:
        client.GCE.load_state_dict(sent.state_dict())
        client.GCE_frozen = copy.deepcopy(client.GCE)
        embeddings = client.GCE.embedding.weight.detach()
        client.generic_conditional_input = embeddings.mean(0)
        client.personalized_conditional_input = client.sample_per_class @ embeddings

    def prepare(server: Any) -> None:
        for client in server.clients:
            client.set_GCE = partial(receive, client)
            client.GCE.embedding.weight.data = initial["embeddings"].clone()
            client.set_GCE(client.GCE)
            for part, sequence in find_valve(client).items():
                values = initial["valve"][part]
                sequence[0].load_state_dict({key: values[key] for key in ("weight", "bias")})

    # ---- Step 2: what is compared.
    def snapshot(server: Any) -> Models:
        models: Models = {}
        for client in server.clients:
            parameters = list(client.model.parameters())
            names = ("body.hidden.0.weight", "body.hidden.0.bias")
            names += ("head.classifier.weight", "head.classifier.bias")
            entries = dict(zip(names, parameters, strict=True))
            for part, sequence in find_valve(client).items():
                layer, _, norm = sequence
                tensors = (layer.weight, layer.bias, norm.weight, norm.bias)
                for key, tensor in zip(("weight", "bias", "scale", "shift"), tensors, strict=True):
                    entries[f"valve.{part}.{key}"] = tensor
            models.update(name_entries(f"{client.id}/", entries))
        return models

    library = Library(folder, problem)
    theirs = library.play("GPFL", snapshot=snapshot, prepare=prepare, lamda=0.01, mu=0.1)
    return ours, theirs


def find_valve(client: Any) -> dict[str, Any]:
    """Return the two halves of GPFL's conditional valve in PFLlib."""
    return {"gamma": client.CoV.Conditional_gamma, "beta": client.CoV.Conditional_beta}


def play_fedcp(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare bodies, heads and policies; fedpfl's draw of the policy is given to PFLlib."""
    from fedpfl.methods.fedcp import FedCP

    with keep_drawn_state(FedCP) as initial:
        ours = problem.play("method=fedcp", "method.lam=5", "method.policy_noise=off")

    def prepare(server: Any) -> None:
        for client in server.clients:
            client.context = client.model.model.head.weight.detach().sum(0, keepdim=True)
            policy = list(client.model.gate.cs.parameters())
            for tensor, key in zip(policy, ("weight", "bias", "scale", "shift"), strict=True):
                tensor.data = initial["policy"][key].clone()

    def snapshot(server: Any) -> Models:
        models: Models = {}
        for client in server.clients:
            tensors = (
                *client.model.model.base.parameters(),
                *client.model.model.head.parameters(),
                *client.model.gate.cs.parameters(),
            )
            names = ("body.hidden.0.weight", "body.hidden.0.bias")
            names += ("head.classifier.weight", "head.classifier.bias")
            names += ("policy.weight", "policy.bias", "policy.scale", "policy.shift")
            models.update(name_entries(f"{client.id}/", dict(zip(names, tensors, strict=True))))
        return models

    library = Library(folder, problem)
    module = importlib.import_module("flcore.servers.servercp")
    module.F = Lens(module.F, gumbel_softmax=lambda x, dim, tau, hard: torch.softmax(x / tau, dim))
    theirs = library.play("FedCP", snapshot=snapshot, prepare=prepare, lamda=5.0)
    return ours, theirs


REPAIRED = (
    ("pfedme", "", "theta was overwritten by the next download", play_pfedme),
    (
        "per_fedavg",
        "first order",
        "clients train twice a round: twice the epochs here; means by samples: equal",
        play_per_fedavg,
    ),
    ("fedrod", "", "", play_fedrod),
    (
        "fedpac",
        "",
        "heads in another order than their weights, mixed in place; prototypes weighed equally",
        play_fedpac,
    ),
    (
        "fedproto",
        "half the clients",
        "drops prototypes of classes that nobody in the cohort has",
        play_fedproto,
    ),
    ("moon", "", "contrasts in the first round already, with itself", play_moon),
    ("fedcac", "", "critical entries go back to the initial model after round 1", play_fedcac),
    ("fedas", "", "", play_fedas),
    ("feddyn", "", "the quadratic term is not squared", play_feddyn),
    (
        "fedamp",
        "",
        "the penalty has no gradient, is not squared, and pulls in round 1 already",
        play_fedamp,
    ),
    ("fedfomo", "", "drops last minibatches", play_fedfomo),
    ("gpfl", "", "conditions come from older embeddings, at first from zeros", play_gpfl),
    ("fedcp", "no Gumbel noise", "begins with a random context", play_fedcp),
)


def list_comparisons() -> list[Comparison]:
    """Return what is compared with PFLlib; nowhere are last minibatches dropped."""
    repaired = [Comparison(case[0], REPOSITORY, *case[1:]) for case in REPAIRED]
    return list_plain_comparisons(PLAIN_CASES, REPOSITORY, Library) + repaired
