"""MOON's rounds as plain loops (arXiv:2103.16257, Algorithm 1; no term before a client has a previous model)."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average, hits


def representation(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what enters the classifier."""
    seen: list[Tensor] = []
    handle = module.classifier.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    logits = module(x)
    handle.remove()
    return logits, seen[0]


def still(s: Setting, weights: Weights) -> nn.Module:
    model = copy.deepcopy(s.module)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def local(s: Setting, shared: Weights, previous: Weights | None, mu: float, tau: float, t: int, i: int) -> Weights:
    model, client = copy.deepcopy(s.module), s.clients[i]
    model.load_state_dict(shared)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
    for epoch in range(s.epochs):
        for batch in s.order(t, i, epoch, len(client.y)).split(s.batch_size):
            if len(batch) == 1:
                continue
            x, y = client.x[batch], client.y[batch]
            logits, z = representation(model, x)
            loss = F.cross_entropy(logits, y)
            if previous is not None:
                positive = (z * representation(still(s, shared), x)[1]).sum(1)
                positive = positive / z.norm(dim=1) / representation(still(s, shared), x)[1].norm(dim=1)
                negative = (z * representation(still(s, previous), x)[1]).sum(1)
                negative = negative / z.norm(dim=1) / representation(still(s, previous), x)[1].norm(dim=1)
                pair = torch.stack([positive, negative], 1) / tau
                loss = loss + mu * F.cross_entropy(pair, torch.zeros(len(y), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def moon(s: Setting, mu: float, tau: float) -> Result:
    """`personal` has the previous models."""
    result, shared = Result(), s.initial
    previous: list[Weights | None] = [None for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        for i in cohort:
            previous[i] = local(s, shared, previous[i], mu, tau, t, i)
        result.after.append([hits(s, previous[i], i) for i in cohort])
        shared = average(s, cohort, [previous[i] for i in cohort])
        result.shared.append(shared)
        result.personal.append([own if own is not None else s.initial for own in previous])
    return result
