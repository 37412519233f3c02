"""FedAS as plain loops over clients (CVPR 2024): alignment with torch's SGD on a copy of the
received body.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.reference.heads import HEAD, features, load, score
from tests.methods.reference.plain import Result, Setting, Weights, train


def hits(s: Setting, weights: Weights, i: int) -> int:
    with torch.no_grad():
        return score(load(s, weights).eval()(s.clients[i].test_x), s.clients[i].test_y)


def prototypes(s: Setting, weights: Weights, i: int) -> dict[int, Tensor]:
    client = s.clients[i]
    with torch.no_grad():
        z = features(load(s, weights).eval(), client.x)
    return {c: z[client.y == c].mean(0) for c in client.y.unique().tolist()}


def aligned(
    s: Setting,
    weights: Weights,
    targets: dict[int, Tensor],
    orders: list[Tensor],
    i: int,
    lr: float,
    means: bool,
) -> Weights:
    client, model = s.clients[i], load(s, weights).eval()
    optimizer = torch.optim.SGD([p for k, p in model.named_parameters() if k not in HEAD], lr=lr)
    for order in orders:
        for rows in order.split(s.batch_size):
            if len(rows) == 1:
                continue
            z, y = features(model, client.x[rows]), client.y[rows]
            loss = torch.zeros(())
            for c in y.unique().tolist():
                mine = z[y == c].mean(0, keepdim=True) if means else z[y == c]
                loss = loss + F.mse_loss(mine, targets[c].expand_as(mine))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def fisher(s: Setting, weights: Weights, i: int) -> float:
    client, model, total = s.clients[i], load(s, weights).eval(), 0.0
    for x, y in zip(client.x.split(s.batch_size), client.y.split(s.batch_size), strict=True):
        picked = model(x).log_softmax(1)[range(len(y)), y]
        grads = torch.autograd.grad(-picked.mean(), list(model.parameters()))
        total += sum(float(g.double().square().sum()) for g in grads)
    return total


def fedas(
    s: Setting,
    lr: float,
    epochs: int,
    first: str,
    align: str,
    weights: str,
    judge: str,
    order: Callable[[int, int, int, int], Tensor],
) -> Result:
    """`order` deals the samples of the alignment. `shared` has the body and whatever else is in a
    state dict.
    """
    result, shared = Result(), s.initial
    models: list[Weights | None] = [None for _ in s.clients]
    private = [k for k in s.initial if k in HEAD or "running" in k or "batches" in k]

    def received(i: int) -> Weights:
        old = models[i] or s.initial
        return {**shared, **{k: old[k] for k in private}}

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, received(i), i) for i in cohort])
        trained = []
        for i in cohort:
            start = received(i)
            if models[i] or first != "skip":
                old = models[i] or (s.initial if first == "init" else start)
                orders = [order(t, i, epoch, len(s.clients[i].y)) for epoch in range(epochs)]
                start = aligned(s, start, prototypes(s, old, i), orders, i, lr, align == "means")
            trained.append(train(s, start, t, i))
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        shares = [float(len(s.clients[i].y)) for i in cohort]
        if weights == "fisher":
            shares = [fisher(s, w, i) for i, w in zip(cohort, trained, strict=True)]
        shares = [share / sum(shares) for share in shares]
        shared = {
            k: sum(a * w[k].double() for a, w in zip(shares, trained, strict=True)).float()
            for k in shared
        }
        for i, w in zip(cohort, trained, strict=True):
            models[i] = w
        result.shared.append(shared)
        every = range(len(s.clients))
        result.personal.append(
            [(models[i] or s.initial) if judge == "stored" else received(i) for i in every]
        )
    return result
