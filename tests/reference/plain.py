"""The rounds of FedAvg, FedOBP, FedPer, Ditto and Local-Only as plain loops over clients, from their papers.

One model, `torch.optim.SGD`, nothing shared with the package. Batch orders and cohorts are inputs.
Sources: arXiv:1602.05629 (FedAvg), arXiv:2604.16574 eqs. 7-9, 19, 21 (FedOBP), arXiv:1912.00818 (FedPer),
arXiv:2012.04221 (Ditto).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = dict[str, Tensor]


@dataclass
class Client:
    """Normalised images and labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass
class Setting:
    """Everything that is given. `order(round, client, epoch, samples)` is a permutation; rounds count from 1."""

    module: nn.Module
    clients: list[Client]
    cohorts: list[list[int]]
    order: Callable[[int, int, int, int], Tensor]
    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float

    @property
    def initial(self) -> Weights:
        return copy.deepcopy(self.module.state_dict())


@dataclass
class Result:
    """After every round: the global weights and every client's personal weights; per round and cohort member: hits."""

    shared: list[Weights] = field(default_factory=list)
    personal: list[list[Weights]] = field(default_factory=list)
    before: list[list[int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    """Relative distance between the scores on both sides of each threshold."""
    counts: list[int] = field(default_factory=list)
    """Personal entries at each selection of a training client."""


def train(
    s: Setting, weights: Weights, t: int, i: int, epochs: int | None = None, near: Weights | None = None, lam=0.0
):
    """LocalTrain; with `near` the gradient of lam/2 |v - near|^2 is added."""
    model = copy.deepcopy(s.module)
    model.load_state_dict(weights)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
    client = s.clients[i]
    for epoch in range(s.epochs if epochs is None else epochs):
        order = s.order(t, i, epoch, len(client.y))
        for first in range(0, len(order), s.batch_size):
            batch = order[first : first + s.batch_size]
            if len(batch) == 1:
                continue
            optimizer.zero_grad()
            F.cross_entropy(model(client.x[batch]), client.y[batch]).backward()
            if near is not None:
                for name, p in model.named_parameters():
                    p.grad += lam * (p.detach() - near[name])
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def hits(s: Setting, weights: Weights, i: int) -> int:
    model = copy.deepcopy(s.module)
    model.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        return int((model(s.clients[i].test_x).argmax(1) == s.clients[i].test_y).sum())


def average(s: Setting, cohort: list[int], uploads: list[Weights]) -> Weights:
    """Sum a_i theta_i, in float64."""
    total = sum(len(s.clients[i].y) for i in cohort)
    return {
        name: sum(len(s.clients[i].y) / total * u[name].double() for i, u in zip(cohort, uploads, strict=True)).float()
        for name in uploads[0]
    }


def fedavg(s: Setting) -> Result:
    result, shared = Result(), s.initial
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained = [train(s, shared, t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
    return result


def fedobp(s: Setting, q: float) -> Result:
    result, shared = Result(), s.initial
    own = [s.initial for _ in s.clients]

    def merged(i: int) -> tuple[Weights, int]:
        scores = {k: (own[i][k].numpy() - shared[k].numpy()).astype(np.float64) ** 2 for k in shared}
        everything = np.sort(np.concatenate([score.ravel() for score in scores.values()]))
        threshold = np.quantile(everything, q, method="linear")
        above, below = everything[everything > threshold], everything[everything <= threshold]
        if len(above) and len(below):
            result.margins.append(float((above[0] - below[-1]) / above[0]))
        chosen = {k: torch.from_numpy(score > threshold) for k, score in scores.items()}
        return {k: torch.where(chosen[k], own[i][k], shared[k]) for k in shared}, len(above)

    for t, cohort in enumerate(s.cohorts, 1):
        starts = []
        for i in cohort:
            start, count = merged(i)
            starts.append(start)
            result.counts.append(count)
        result.before.append([hits(s, w, i) for i, w in zip(cohort, starts, strict=True)])
        for i, start in zip(cohort, starts, strict=True):
            own[i] = train(s, start, t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, [own[i] for i in cohort])
        result.shared.append(shared)
        result.personal.append([merged(i)[0] for i in range(len(s.clients))])
    return result


def fedper(s: Setting, head: tuple[str, ...]) -> Result:
    result, shared = Result(), s.initial
    heads = [{k: s.initial[k] for k in head} for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, {**shared, **heads[i]}, i) for i in cohort])
        trained = [train(s, {**shared, **heads[i]}, t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        for i, w in zip(cohort, trained, strict=True):
            heads[i] = {k: w[k] for k in head}
        shared = {**average(s, cohort, trained), **{k: s.initial[k] for k in head}}
        result.shared.append(shared)
        result.personal.append([{**shared, **h} for h in heads])
    return result


def ditto(s: Setting, lam: float, personal_epochs: int) -> Result:
    result, shared = Result(), s.initial
    own = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, own[i], i) for i in cohort])
        trained = [train(s, shared, t, i) for i in cohort]
        for i in cohort:
            own[i] = train(s, own[i], t, i, personal_epochs, near=shared, lam=lam)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append(list(own))
    return result


def local_only(s: Setting) -> Result:
    result = Result()
    own = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, own[i], i) for i in cohort])
        for i in cohort:
            own[i] = train(s, own[i], t, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        result.shared.append({})
        result.personal.append(list(own))
    return result
