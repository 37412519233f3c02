"""Per-FedAvg's rounds as plain loops (arXiv:2002.07948, Algorithm 1), explicit updates of one
module's weights.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Client, Result, Setting, Weights, average, hits, load


def gradient(model: nn.Module, weights: Weights, client: Client, batch: Tensor) -> Weights:
    """At other weights; the module keeps its own, and its statistics have moved."""
    own = {k: p.detach().clone() for k, p in model.named_parameters()}
    with torch.no_grad():
        for k, p in model.named_parameters():
            p.copy_(weights[k])
    model.zero_grad()
    F.cross_entropy(model(client.x[batch]), client.y[batch]).backward()
    grads = {k: p.grad.clone() for k, p in model.named_parameters()}
    with torch.no_grad():
        for k, p in model.named_parameters():
            p.copy_(own[k])
    return grads


def unmoved(model: nn.Module, weights: Weights, client: Client, batch: Tensor) -> Weights:
    """The same on a copy, whose statistics are thrown away."""
    return gradient(copy.deepcopy(model), weights, client, batch)


def local(
    s: Setting, shared: Weights, t: int, i: int, hf: bool, alpha: float, beta: float, delta: float
) -> Weights:
    model, client = load(s, shared).train(), s.clients[i]
    need = 3 if hf else 2
    for epoch in range(s.epochs):
        minibatches = [
            b for b in s.order(t, i, epoch, len(client.y)).split(s.batch_size) if len(b) > 1
        ]
        while len(minibatches) >= need:
            now, minibatches = minibatches[:need], minibatches[need:]
            w = {k: p.detach().clone() for k, p in model.named_parameters()}
            first = unmoved(model, w, client, now[0])
            direction = gradient(model, {k: w[k] - alpha * first[k] for k in w}, client, now[1])
            if hf:
                up = unmoved(model, {k: w[k] + delta * direction[k] for k in w}, client, now[2])
                down = unmoved(model, {k: w[k] - delta * direction[k] for k in w}, client, now[2])
                direction = {k: direction[k] - alpha * (up[k] - down[k]) / (2 * delta) for k in w}
            with torch.no_grad():
                for k, p in model.named_parameters():
                    p -= beta * direction[k]
    return copy.deepcopy(model.state_dict())


def adapted(s: Setting, shared: Weights, t: int, i: int, alpha: float, steps: int) -> Weights:
    """Plain steps on the first minibatches of `s.order` (round t), with the statistics of `shared`."""
    model, client = load(s, shared).train(), s.clients[i]
    weights = {k: p.detach().clone() for k, p in model.named_parameters()}
    epoch, minibatches = 0, []
    for _ in range(steps if len(client.y) > 1 else 0):
        while not minibatches:
            minibatches = [
                b for b in s.order(t, i, epoch, len(client.y)).split(s.batch_size) if len(b) > 1
            ]
            epoch += 1
        g = unmoved(model, weights, client, minibatches.pop(0))
        weights = {k: w - alpha * g[k] for k, w in weights.items()}
    return {**shared, **weights}


def per_fedavg(s: Setting, hf: bool, alpha: float, beta: float, delta: float) -> Result:
    result, shared = Result(), s.initial
    parameters = [k for k, _ in s.module.named_parameters()]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained = [local(s, shared, t, i, hf, alpha, beta, delta) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        for k in parameters:
            shared[k] = (sum(w[k].double() for w in trained) / len(cohort)).float()
        result.shared.append(shared)
        result.personal.append([shared] * len(s.clients))
    return result
