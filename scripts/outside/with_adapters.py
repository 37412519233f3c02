"""Low-rank adapters: authors' code of FedALT, FedSA-LoRA and FFA-LoRA, SDFLoRA, and of servers that
merge pairs of different ranks.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import types
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.engine import keys
from outside.peers import Comparison, be_quiet, define_in, load_file
from outside.problem import (
    CLIENTS,
    EPOCHS,
    FEATURES,
    HIDDEN,
    LEARNING_RATE,
    SEED,
    Models,
    NamedLayers,
    Problem,
    keep_drawn_state,
    name_entries,
)

RANK = 4
ALPHA = 8.0
ROUNDS = 3
ADAPTER = (
    *("adapter=lora", "adapter.layers=[linear]"),
    *(f"adapter.rank={RANK}", f"adapter.alpha={ALPHA}"),
)
HEAD = ("classifier.weight", "classifier.bias")
Pair = tuple[list[Models], list[Models]]


def list_trained(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that train."""
    return [parameter for parameter in network.parameters() if parameter.requires_grad]


# ---- FedALT


class PlainTrainer:
    """Take steps of plain SGD in place of a package's trainer; the classifier trains too."""

    def __init__(self, model: Any, args: Any, train_dataset: Sequence[Any], **_: Any):
        self.model, self.epochs, self.batches = model, args.num_train_epochs, train_dataset

    def train(self) -> None:
        """Train."""
        self.model.fc.requires_grad_(True)
        optimizer = torch.optim.SGD(list_trained(self.model), lr=LEARNING_RATE)
        for images, labels in [*self.batches] * self.epochs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(images), labels).backward()
            optimizer.step()


class RoutedNet(NamedLayers):
    """The small network with FedALT's layer, which takes positions of a text."""

    def __init__(self, network: Any, layer: Any):
        super().__init__(network)
        layer.load_state_dict(self.hidden.state_dict(), strict=False)
        self.hidden = layer

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.fc(torch.relu(self.hidden(images.flatten(1)[:, None]))[:, 0])


class AltPeer:
    """Drive FedALT's client, server and layer."""

    def __init__(self, folder: Path, problem: Problem, initial: Mapping[str, Tensor]):
        scope: dict[str, Any] = {"nn": nn, "F": nn.functional, "math": math, "torch": torch}
        scope["transpose"] = lambda weight, is_transposed: weight.T if is_transposed else weight
        define_in(scope, folder / "peft" / "tuners" / "lora.py", "LoraLayer", "Linear")
        self.layer_type = scope["Linear"]
        scope = {"torch": torch, "json": json, "gc": gc}
        scope.update(Trainer=PlainTrainer, TrainingArguments=types.SimpleNamespace)
        scope.update(DataCollatorForSeq2Seq=lambda *_, **__: None)
        define_in(scope, folder / "client.py", "Client")
        self.server = load_file("fedalt_server", folder / "server.py").Server(CLIENTS, "cpu")
        self.clients = []
        for number in range(CLIENTS):
            client = scope["Client"](number, problem.batches(number), None, None, "")
            client.local_model = self._make_network(problem, initial)
            self.clients.append(client)

    def _make_network(self, problem: Problem, initial: Mapping[str, Tensor]) -> RoutedNet:
        """Return the network as fedpfl draws it; the others' pair is the first there."""
        layer = self.layer_type(
            *(FEATURES, HIDDEN),
            r=RANK,
            lora_alpha=ALPHA,
            lora_nums=2,
            asymmetric=False,
        )
        network = RoutedNet(problem.make_network(), layer)
        layer.lora_A1.weight.data = initial["hidden.0.lora_A"][0].clone()
        layer.lora_route.weight.data = initial["hidden.0.lora_mixer"][0].flip(0)
        return network

    def name_model(self, number: int) -> Models:
        """Return a client's entries by fedpfl's names."""
        network = self.clients[number].local_model
        entries = dict(zip(HEAD, network.fc.parameters(), strict=True))
        for pair, suffix in ((1, ""), (0, "1")):
            for factor in "AB":
                matrix = getattr(network.hidden, f"lora_{factor}{pair}").weight
                entries[f"hidden.0.lora_{factor}{suffix}"] = matrix
        entries["hidden.0.lora_mixer"] = network.hidden.lora_route.weight.flip(0)
        return name_entries(f"{number}/", entries)


def play_fedalt(folder: Path, problem: Problem) -> Pair:
    """Compare the clients' mixtures, with the others' latest pairs in them."""
    from fedpfl.methods.fedalt import FedALT

    with keep_drawn_state(FedALT) as initial:
        ours = problem.play("method=fedalt", *ADAPTER, "adapter.pairs=2", rounds=ROUNDS)
    peer = AltPeer(folder, problem, initial)
    played = []
    for _ in range(ROUNDS):
        uploads = []
        with be_quiet():
            for client in peer.clients:
                client.local_training(epochs=EPOCHS)
                uploads.append(client.get_lora_params()["params"])
        pairs = peer.server.aggregation(route_aggregation=False, params=uploads)
        models: Models = {}
        for number, client in enumerate(peer.clients):
            client.load_params(pairs[number])
            models.update(peer.name_model(number))
        played.append(models)
    return ours, played


# ---- FedSA-LoRA and FFA-LoRA


class LowRankLayer(nn.Module):
    """A frozen linear map with a low-rank pair, as a package adds it for the peer."""

    def __init__(self, layer: Any, initial: Mapping[str, Tensor]):
        super().__init__()
        self.frozen = layer.requires_grad_(False)
        self.lora_A = nn.Linear(FEATURES, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, HIDDEN, bias=False)
        self.lora_A.weight.data = initial["hidden.0.lora_A"][0].clone()
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the map's output and the addition."""
        return self.frozen(x) + ALPHA / RANK * self.lora_B(self.lora_A(x))


class LabelledNet(nn.Module):
    """The small network, which reads and answers as those of a package for texts."""

    def __init__(self, network: Any, initial: Mapping[str, Tensor]):
        super().__init__()
        self.hidden = LowRankLayer(network.base[1], initial)
        self.classifier = network.classifier

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        """Return logits and loss."""
        logits = self.classifier(torch.relu(self.hidden(input_ids.flatten(1))))
        loss = nn.functional.cross_entropy(logits, labels)
        return types.SimpleNamespace(logits=logits, loss=loss)


def make_lora_scope(folder: Path) -> dict[str, Any]:
    """Return the peer's trainer, aggregator and model, without its packages."""

    def leave_as_it_is(*_: Any) -> Any:
        return lambda function: function

    names = ("ROUTINE", "EPOCH", "BATCH")
    scope: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "logging": logging,
        "logger": logging.getLogger("peer"),
        "OrderedDict": OrderedDict,
        "BaseTrainer": object,
        "Aggregator": type("Aggregator", (), {}),
        "use_diff": lambda function: function,
        "lifecycle": leave_as_it_is,
        "LIFECYCLE": types.SimpleNamespace(**dict.fromkeys(names)),
        "CtxVar": lambda value, *_: value,
    }
    core, glue = folder / "federatedscope" / "core", folder / "federatedscope" / "glue"
    define_in(scope, core / "trainers" / "utils.py", "filter_by_specified_keywords")
    define_in(scope, core / "auxiliaries" / "utils.py", "param2tensor", "merge_param_dict")
    define_in(scope, core / "trainers" / "trainer.py", "Trainer")
    define_in(scope, core / "trainers" / "torch_trainer.py", "GeneralTorchTrainer")
    define_in(scope, glue / "trainer" / "trainer.py", "GLUETrainer")
    define_in(scope, glue / "model" / "adapter_builder.py", "AdapterModel")
    define_in(scope, glue / "model" / "model_builder.py", "get_llm")
    aggregators = core / "aggregators" / "clients_avg_aggregator.py"
    return define_in(scope, aggregators, "ClientsAvgAggregator")


def make_lora_options(is_frozen: bool, local_names: Sequence[str]) -> Any:
    """Return the peer's configuration: whether A is frozen, and what stays with the clients."""
    space = types.SimpleNamespace
    adapter = space(args=[{}], use=False)
    return space(
        model=space(type="small@huggingface_llm"),
        llm=space(adapter=adapter, deepspeed=space(use=False)),
        federate=space(
            freeze_A=is_frozen,
            method="fedavg",
            process_num=1,
            share_local_model=False,
            ignore_weight=False,
            use_ss=False,
        ),
        personalization=space(local_param=list(local_names), share_non_trainable_para=False),
    )


def train_lora(trainer: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Take an optimizer's steps by the peer's hooks."""
    context = trainer.ctx
    context.optimizer = torch.optim.SGD(list_trained(context.model), lr=LEARNING_RATE)
    for images, labels in [*batches] * EPOCHS:
        mask = torch.ones_like(labels)
        context.data_batch = {"input_ids": images, "label": labels, "attention_mask": mask}
        trainer._hook_on_batch_forward(context)
        context.loss_task = context.loss_batch
        trainer._hook_on_batch_backward(context)


def play_lora(
    folder: Path, problem: Problem, method: str, is_frozen: bool, local_names: Sequence[str]
) -> Pair:
    """Compare the clients' models; each has one of its own there, too."""
    from fedpfl.methods import METHODS

    with keep_drawn_state(METHODS[method]) as initial:
        ours = problem.play(f"method={method}", *ADAPTER, rounds=ROUNDS)
    # ---- Step 1: a trainer for each client.
    scope = make_lora_scope(folder)
    options = make_lora_options(is_frozen, local_names)
    scope["get_model_from_huggingface"] = lambda **_: LabelledNet(problem.make_network(), initial)
    trainers = []
    for _ in range(CLIENTS):
        trainer = scope["GLUETrainer"].__new__(scope["GLUETrainer"])
        trainer._cfg = options
        trainer.ctx = types.SimpleNamespace(
            cfg=options, model=scope["get_llm"](options), device="cpu", grad_clip=0, scheduler=None
        )
        trainers.append(trainer)
    server = scope["ClientsAvgAggregator"](config=options)
    # ---- Step 2: rounds.
    played = []
    for _ in range(ROUNDS):
        uploads = []
        for client, trainer in enumerate(trainers):
            train_lora(trainer, problem.batches(client))
            uploads.append((problem.size(client), trainer.get_model_para()))
        average = server.aggregate({"client_feedback": uploads})
        models: Models = {}
        for client, trainer in enumerate(trainers):
            trainer.update(dict(average))
            network = trainer.ctx.model.model
            entries = dict(zip(HEAD, network.classifier.parameters(), strict=True))
            for factor in ("lora_A", "lora_B"):
                entries[f"hidden.0.{factor}"] = getattr(network.hidden, factor).weight
            models.update(name_entries(f"{client}/", entries))
        played.append(models)
    return ours, played


# ---- SDFLoRA


def make_dual_network(module: Any, problem: Problem, initial: Mapping[str, Tensor]) -> Any:
    """Return the peer's network of two modules of half the rank, each weighed by a half.

    So weighed, both additions count as much as in fedpfl.
    """
    options = module.DualLoRAConfig(
        global_rank=RANK // 2,
        local_rank=RANK // 2,
        alpha=ALPHA,
        dropout=0.0,
        target_modules=["hidden"],
    )
    network = module.DualLoRAModel(NamedLayers(problem.make_network()), options)
    layer = network.dual_lora_layers["hidden"]
    halves = initial["hidden.0.lora_A"][0].split(RANK // 2)
    for factor, half in zip((layer.global_lora_A, layer.local_lora_A), halves, strict=True):
        factor.weight.data = half.clone()
    for weight in (layer.global_weight, layer.local_weight):
        weight.requires_grad_(False).zero_()
    network.base_model.fc.requires_grad_(True)
    return network


def play_sdflora(folder: Path, problem: Problem) -> Pair:
    """Compare the clients' models, the shared modules being averaged factor by factor."""
    from fedpfl.methods.sdflora import SDFLoRA

    settings = ("method.share=0.5", "method.merge=averaged")
    with keep_drawn_state(SDFLoRA) as initial:
        ours = problem.play("method=sdflora", *ADAPTER, *settings, rounds=ROUNDS)
    # ---- Step 1: the peer's networks and server.
    module = load_file("dual_lora_adapter", folder / "code" / "dual_lora_adapter.py")
    scope: dict[str, Any] = {"torch": torch, "F": nn.functional, "logger": logging.getLogger("p")}
    define_in(scope, folder / "code" / "dual_lora_aggregator.py", "DualLoRAAggregator")
    networks = [make_dual_network(module, problem, initial) for _ in range(CLIENTS)]
    server = scope["DualLoRAAggregator"]()
    # ---- Step 2: rounds.
    played = []
    for _ in range(ROUNDS):
        uploads = []
        for client, network in enumerate(networks):
            optimizer = torch.optim.SGD(list_trained(network), lr=LEARNING_RATE)
            for images, labels in problem.batches(client) * EPOCHS:
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(images), labels).backward()
                optimizer.step()
            uploads.append((client, (problem.size(client), network.get_global_state_dict())))
        with torch.no_grad():
            average = server.aggregate({"client_feedback": uploads})
        models: Models = {}
        for client, network in enumerate(networks):
            network.load_global_state_dict({name: average[name].clone() for name in average})
            models.update(name_dual_model(client, network))
        played.append(models)
    return ours, played


def name_dual_model(client: int, network: Any) -> Models:
    """Return a client's entries by fedpfl's names; the shared half of the rank is the first."""
    layer = network.dual_lora_layers["hidden"]
    entries = dict(zip(HEAD, network.base_model.fc.parameters(), strict=True))
    for factor, axis in (("lora_A", 0), ("lora_B", 1)):
        halves = [getattr(layer, f"{part}_{factor}").weight for part in ("global", "local")]
        entries[f"hidden.0.{factor}"] = torch.cat(halves, axis)
    return name_entries(f"{client}/", entries)


# ---- Ranks by client: a server is given clients' [A, B], and answers with theirs and what it folds


def train_pair(problem: Problem, client: int, values: Sequence[Tensor]) -> list[Tensor]:
    """Train A, B and the head, the first of the values being folded into the hidden layer."""
    hidden = problem.make_network().base[1].requires_grad_(False)
    a, b, *head = trained = [leaf.clone().requires_grad_() for leaf in values[1:]]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    for images, labels in problem.batches(client) * EPOCHS:
        optimizer.zero_grad()
        weight = hidden.weight + ALPHA / RANK * (values[0] + b @ a)
        features = torch.relu(F.linear(images.flatten(1), weight, hidden.bias))
        F.cross_entropy(F.linear(features, *head), labels).backward()
        optimizer.step()
    return [leaf.detach() for leaf in trained]


def play_ranked(folder: Path, problem: Problem, method: str, merge: Any, words: str) -> Pair:
    """Compare products and heads, which fedpfl's rule averages for the peer too."""
    from fedpfl.methods import METHODS

    ranks = [1, 2, RANK, 3]
    if method == "fedex_lora":
        ranks = [RANK] * CLIENTS
        problem = Problem(problem.folder, problem.engine, train_sizes=[48] * CLIENTS)
    with keep_drawn_state(METHODS[method]) as initial:
        ours = problem.play(f"method={method}", *ADAPTER, f"adapter.rank={ranks}", *words.split())
    for models in ours:
        for owner in map(str, range(CLIENTS)):
            b, a = (models[f"{owner}/hidden.0.lora_{factor}"][0] for factor in "BA")
            models[f"{owner}/product"] = b @ a + models.get(f"{owner}/hidden.0.lora_residue", 0)
    head, folded = [initial[name] for name in HEAD], torch.zeros(HIDDEN, FEATURES)
    pairs = [(initial["hidden.0.lora_A"][0, :rank], torch.zeros(HIDDEN, rank)) for rank in ranks]
    played = []
    for number in range(1, len(ours) + 1):
        for i in range(CLIENTS if method == "flora" else 0):
            generator = keys.Draws(SEED, "train", number).server(i)
            drawn = METHODS[method]().sample({"model": initial}, generator)["drawn"]
            pairs[i] = drawn["hidden.0.lora_A"][0, : ranks[i]], torch.zeros(HIDDEN, ranks[i])
        trained = [train_pair(problem, i, (folded, *pairs[i], *head)) for i in range(CLIENTS)]
        shares = torch.tensor(problem.shares())
        head = [
            torch.tensordot(shares, torch.stack([own[i] for own in trained]), 1) for i in (2, 3)
        ]
        pairs, folded = merge(folder, problem, [own[:2] for own in trained], folded)
        models = {}
        for client, (a, b) in enumerate(pairs):
            entries = {**dict(zip(HEAD, head, strict=True)), "product": b @ a + folded}
            models.update(name_entries(f"{client}/", entries))
        played.append(models)
    return ours, played


def merge_by_files(
    folder: Path, problem: Problem, pairs: Any, folded: Tensor, kind: str
) -> tuple[Any, Tensor]:
    """Let the authors of FlexLoRA decompose, or those of FLoRA stack or pad; they read files."""
    a_name, b_name = (f"hidden.lora_{factor}.local.weight" for factor in "AB")
    ranks, kept, is_flex = [len(a) for a, _ in pairs], dict[str, Tensor](), kind == "decompose"
    for client, (a, b) in enumerate(pairs):
        # FlexLoRA's scale of each client's rank is taken out.
        upload = {a_name: a, b_name: b * ranks[client] / 16 if is_flex else b}
        place = f"{client}/local_output_epoch_0" if is_flex else f"0/local_output_{client}"
        (problem.folder / place).mkdir(parents=True, exist_ok=True)
        torch.save(upload, problem.folder / place / "pytorch_model.bin")
    scope: dict[str, Any] = {"torch": torch, "os": os, "tqdm": list, "ZeroPad2d": nn.ZeroPad2d}
    scope.update(normalize=F.normalize, print=lambda *_: None)
    scope["set_peft_model_state_dict"] = lambda model, weights, name: kept.update(weights)
    given = range(CLIENTS), str(problem.folder), [problem.size(i) for i in range(CLIENTS)], 0
    code = folder / "fed_utils"
    if is_flex:
        define_in(scope, code / "model_aggregation.py", "FlexLoRA")
        define_in(scope, code / "adaptive_peft.py", "distribute_weight_fast")
        named = {f"Client_{i}": {"hidden": rank} for i, rank in enumerate(ranks)}
        sent = scope["distribute_weight_fast"](scope["FlexLoRA"](*given), {"alpha": 16, **named})
        return [(sent[f"{a_name}.{r}"], sent[f"{b_name}.{r}"] * 16 / r) for r in ranks], folded
    is_stacked = kind == "stack"
    define_in(scope, code / "model_aggregation.py", "FedAvg")
    scope["FedAvg"](None, *given, is_stacked, 0, True, ranks, not is_stacked, False)
    if is_stacked:
        stack = torch.load(problem.folder / "0" / "adapter_model.bin")
        return [(a, 0 * b) for a, b in pairs], folded + stack[b_name] @ stack[a_name]
    return [(kept[a_name][:r], kept[b_name][:, :r]) for r in ranks], folded


def merge_by_fedex(
    folder: Path, problem: Problem, pairs: Any, folded: Tensor
) -> tuple[Any, Tensor]:
    """Let FedEx-LoRA's authors merge; their frozen weights are [inputs, outputs]."""
    define_in(scope := {"torch": torch, "np": np}, folder / "fed_agg.py", "aggregate_models_ours")
    layer = nn.ModuleDict({"base_layer": nn.Linear(HIDDEN, FEATURES, bias=False)})
    layer["base_layer"].weight.data = ALPHA / RANK * folded.T
    for name, (inputs, outputs) in {"A": (FEATURES, RANK), "B": (RANK, HIDDEN)}.items():
        layer[f"lora_{name}"] = nn.ModuleDict({"default": nn.Linear(inputs, outputs, bias=False)})
    a_name, b_name = (f"layer.lora_{factor}.default.weight" for factor in "AB")
    uploads = [{a_name: a, b_name: b} for a, b in pairs]
    options = types.SimpleNamespace(lora_alpha=ALPHA, lora_r=RANK, rslora=False)
    network = nn.ModuleDict({"layer": layer}).requires_grad_(False)
    new = scope["aggregate_models_ours"](network, uploads, options).state_dict()
    return [(new[a_name], new[b_name])] * CLIENTS, new["layer.base_layer.weight"].T * RANK / ALPHA


RANKED = (
    ("flexlora", "alibaba/FederatedScope", "", "a scale for each rank", "decompose"),
    ("flora", "ATP-1010/FederatedLLM", "", "there is no head", "stack"),
    ("hetlora", "ATP-1010/FederatedLLM", "weighting=samples", "there is no head", "pad"),
    ("fedex_lora", "CERT-Lab/fedex-lora", "equal ranks and sizes", "frozen weights transposed", ""),
)


def list_comparisons() -> list[Comparison]:
    """Return what is compared of adapters."""
    ranked = []
    for method, repository, detail, undone, kind in RANKED:
        merge = partial(merge_by_files, kind=kind) if kind else merge_by_fedex
        words = f"method.{detail}" if "=" in detail else ""
        play = partial(play_ranked, method=method, merge=merge, words=words)
        ranked.append(Comparison(method, repository, detail, undone, play))
    lora = "Pengxin-Guo/FedSA-LoRA"
    shares_models = "all clients share one model object"
    return [
        *ranked,
        Comparison(
            "fedalt",
            "jmbian/FedALT",
            "",
            "there is no head; AdamW of a package, SGD here",
            play_fedalt,
        ),
        Comparison(
            "fedsa_lora",
            lora,
            "",
            shares_models,
            partial(
                play_lora,
                method="fedsa_lora",
                is_frozen=False,
                local_names=("lora_B", "classifier"),
            ),
        ),
        Comparison(
            "ffa_lora",
            lora,
            "",
            shares_models,
            partial(play_lora, method="ffa_lora", is_frozen=True, local_names=()),
        ),
        Comparison(
            "sdflora",
            "cliffsofthestream/SDFLoRA",
            "merge=averaged, half of the rank shared",
            "learns how to weigh modules: a half each",
            play_sdflora,
        ),
    ]
