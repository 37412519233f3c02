"""Fling's clients and groups on the common problem, and FedPURIN's, which are built on Fling."""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from outside.peers import Comparison, be_quiet, open_checkout
from outside.problem import (
    BATCH,
    CLIENTS,
    EPOCHS,
    LEARNING_RATE,
    Models,
    Problem,
    rename_entries,
)

MOMENTUM = 0.9


class Options(dict):  # type: ignore[type-arg]
    """Options that are read as attributes; None where there is none."""

    def __getattr__(self, name: str) -> Any:
        """Return an option."""
        value = self.get(name)
        return Options(value) if type(value) is dict else value


class Samples(Dataset[Any]):
    """A client's samples as Fling reads them."""

    def __init__(self, problem: Problem, client: int):
        self.images, self.labels = problem.samples(client)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self.images[index], "class_id": self.labels[index]}


def open_fling(folder: Path, problem: Problem) -> None:
    """Import Fling, with the small network and minibatches in order."""
    # FedPURIN's repository lacks a file of default options, which no part of the method reads.
    missing = ("easydict", "einops", "flzoo", "lmdb", "prettytable", "seaborn", "tensorboardX")
    open_checkout(folder, *missing, "timm", "torchattacks", "transformers")
    template = importlib.import_module("fling.component.client.client_template")
    template.get_model = lambda options: problem.make_network()
    base = importlib.import_module("fling.component.client.base_client")
    base.DataLoader = lambda samples, batch_size, shuffle: DataLoader(samples, batch_size)


def play_group(
    problem: Problem, client_path: str, group_path: str, options: Mapping[str, Any], rounds: int = 5
) -> list[Models]:
    """Play rounds of a Fling group.

    Args:
        problem: what they train on.
        client_path: MODULE.CLASS under fling.component.client.
        group_path: the same under fling.component.group.
        options: by section, beside those that all have.
        rounds: how many.

    Returns:
        After each round the global model and what each client had after its training.
    """
    make_client = find_class("client", client_path)
    # ---- Step 1: options and the group.
    sections: dict[str, dict[str, Any]] = {
        "client": {"val_frac": 0, "client_num": CLIENTS},
        "learn": {
            "batch_size": BATCH,
            "device": "cpu",
            "local_eps": EPOCHS,
            "optimizer": {"name": "sgd", "lr": LEARNING_RATE, "momentum": MOMENTUM},
        },
        "group": {"aggregation_method": "avg", "aggregation_parameters": {"name": "all"}},
        "other": {},
    }
    for section, values in options.items():
        sections[section] = {**sections.get(section, {}), **values}
    chosen = Options(sections)
    ignore = types.SimpleNamespace(logging=lambda *_: None, add_scalar=lambda *_: None)
    with be_quiet():
        group = find_class("group", group_path)(chosen, ignore)
        group.server = types.SimpleNamespace(glob_dict=None)
        for client in range(CLIENTS):
            group.append(make_client(chosen, client, Samples(problem, client)))
        group.initialize()
        # ---- Step 2: rounds.
        played = []
        for number in range(rounds):
            models: Models = {}
            for client in range(CLIENTS):
                group.clients[client].train(lr=None, device="cpu")
                models.update(
                    rename_entries(f"{client}/", group.clients[client].model.state_dict())
                )
            group.aggregate(number)
            models.update(rename_entries("server/", group.server.glob_dict))
            played.append(copy.deepcopy(models))
    return played


def find_class(part: str, path: str) -> Any:
    """Return a class of fling.component."""
    module, name = path.split(".")
    return getattr(importlib.import_module(f"fling.component.{part}.{module}"), name)


def play_fedpurin(
    folder: Path, problem: Problem, tau: float, beta: int, uses_gradient: bool, uses_hessian: bool
) -> tuple[list[Models], list[Models]]:
    """Compare FedPURIN, whose gradients are kept in single precision for it."""
    open_fling(folder, problem)
    torch.Tensor.half = lambda tensor: tensor  # type: ignore
    hyper = {"exc": "all", "HeadEnd": False, "isBN": False}
    hyper.update(isGrad=uses_gradient, isHessian=uses_hessian)
    options = {"learn": {"tau": tau, "beta": beta}, "group": {"isLocal": False}, "hyper": hyper}
    theirs = play_group(
        problem, "purin_client.PurinClient", "purin_group.PurinServerGroup", options
    )
    settings = (
        f"method.score={'gradient' if uses_gradient else 'delta'}",
        f"method.hessian={str(uses_hessian).lower()}",
        "method.include_norm=true",
        f"method.tau={tau}",
        f"method.beta={beta}",
    )
    return play_ours(problem, "fedpurin", *settings), theirs


def play_fedcac(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare FedCAC."""
    open_fling(folder, problem)
    options = {"learn": {"tau": 0.4, "beta": 3}}
    theirs = play_group(
        problem, "fedcac_client.FedCACClient", "fedcac_group.FedCACServerGroup", options
    )
    return play_ours(problem, "fedcac", "method.tau=0.4", "method.beta=3"), theirs


def play_pfedsd(folder: Path, problem: Problem) -> tuple[list[Models], list[Models]]:
    """Compare pFedSD; with this momentum roundings grow tenfold with each further round."""
    rounds = 3
    open_fling(folder, problem)
    options = {"learn": {"tau": 3.0, "lamda": 0.5}}
    theirs = play_group(
        problem, "pfedsd_client.pFedSDClient", "base_group.ParameterServerGroup", options, rounds
    )
    settings = ("method.lam=0.5", "method.tau=3.0")
    return play_ours(problem, "pfedsd", *settings, rounds=rounds), theirs


def play_ours(problem: Problem, method: str, *settings: str, rounds: int = 5) -> list[Models]:
    """Play fedpfl's rounds."""
    momentum = f"local.momentum={MOMENTUM}"
    return problem.play(f"method={method}", momentum, *settings, rounds=rounds)


def list_comparisons() -> list[Comparison]:
    """Return what is compared with Fling and FedPURIN."""
    comparisons = [
        Comparison("fedcac", "kxzxvbk/Fling", "", "", play_fedcac),
        Comparison("pfedsd", "kxzxvbk/Fling", "", "", play_pfedsd),
    ]
    for tau, beta in ((0.5, 3), (0.2, 100)):
        for uses_gradient, uses_hessian in ((True, False), (False, False), (True, True)):
            play = partial(
                play_fedpurin,
                tau=tau,
                beta=beta,
                uses_gradient=uses_gradient,
                uses_hessian=uses_hessian,
            )
            score = "gradient" if uses_gradient else "delta"
            detail = f"tau {tau}, beta {beta}, {score}" + (", Hessian" if uses_hessian else "")
            undone = "keeps scores in half precision" if uses_gradient else ""
            comparisons.append(Comparison("fedpurin", "HikariX/FedPURIN", detail, undone, play))
    return comparisons
