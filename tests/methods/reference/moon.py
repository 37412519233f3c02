"""MOON's rounds as plain loops (arXiv:2103.16257, Algorithm 1; no term before a client has a
previous model).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load, train


def representation(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what enters the classifier."""
    seen: list[Tensor] = []
    handle = module.classifier.register_forward_hook(
        lambda _, inputs, output: seen.append(inputs[0])
    )
    logits = module(x)
    handle.remove()
    return logits, seen[0]


def still(s: Setting, weights: Weights) -> nn.Module:
    return load(s, weights).eval().requires_grad_(False)


def local(
    s: Setting, shared: Weights, previous: Weights | None, mu: float, tau: float, t: int, i: int
) -> Weights:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, z = representation(model, x)
        if previous is None:
            return F.cross_entropy(logits, y)
        others = [representation(still(s, weights), x)[1] for weights in (shared, previous)]
        cosines = [(z * other).sum(1) / z.norm(dim=1) / other.norm(dim=1) for other in others]
        pair = torch.stack(cosines, 1) / tau
        return F.cross_entropy(logits, y) + mu * F.cross_entropy(
            pair, torch.zeros(len(y), dtype=torch.long)
        )

    return train(s, shared, t, i, loss=loss)


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
