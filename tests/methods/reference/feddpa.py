"""FedDPA's rounds as plain loops (NeurIPS 2023, vol. 36, pages 72181-72192), Fisher values sample
by sample.
"""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load, train


def fisher(s: Setting, weights: Weights, i: int) -> Weights:
    model = load(s, weights).eval()
    client, total = s.clients[i], {k: torch.zeros_like(v) for k, v in weights.items()}
    for x, y in zip(client.x, client.y, strict=True):
        grads = torch.autograd.grad(
            F.cross_entropy(model(x[None]), y[None]), list(model.parameters())
        )
        for (k, _), g in zip(model.named_parameters(), grads, strict=True):
            total[k] += g**2
    return {k: v / len(client.y) for k, v in total.items()}


def chosen(
    s: Setting, result: Result, scores: Weights | None, rule: str, threshold: float
) -> dict[str, torch.Tensor]:
    masks = {k: torch.zeros_like(v, dtype=torch.bool) for k, v in s.initial.items()}
    if scores is None:
        return masks
    for k, score in scores.items():
        f = score.double().numpy()
        f = (f - f.min()) / (f.max() - f.min())
        limit = threshold if rule == "value" else np.sort(f.ravel())[int(threshold * (f.size - 1))]
        if rule == "value":
            result.margins.append(float(np.abs(f - limit).min()))
        else:
            result.margins.append(float((f[f > limit].min() - limit) / f[f > limit].min()))
        masks[k] = torch.from_numpy(f > limit)
    return masks


def masked(
    s: Setting, weights: Weights, shared: Weights, t: int, i: int, masks, penalty
) -> Weights:
    """Epochs of SGD on the entries of `masks`; the others and their momentum are put back after
    every step.
    """

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        moved = [(p, shared[k]) for k, p in model.named_parameters() if (p != shared[k]).any()]
        distances = [torch.linalg.vector_norm(p - other) for p, other in moved]
        return F.cross_entropy(model(x), y) + penalty(sum(distances, torch.zeros(())))

    def put_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k, p in model.named_parameters():
            p.copy_(torch.where(masks[k], p, weights[k]))
            optimizer.state[p]["momentum_buffer"] *= masks[k]

    return train(s, weights, t, i, loss=loss, after_step=put_back)


def feddpa(
    s: Setting, rule: str, threshold: float, lams: tuple[float, float, float] | None, personal_order
) -> Result:
    """`lams`: lam1, lam2 and the clip of two phases, or None for joint training."""
    result, shared = Result(), s.initial
    other = dataclasses.replace(s, order=personal_order)
    own, scores = [s.initial for _ in s.clients], [None for _ in s.clients]

    def start(i: int):
        masks = chosen(s, result, scores[i], rule, threshold)
        return masks, {k: torch.where(masks[k], own[i][k], shared[k]) for k in shared}

    for t, cohort in enumerate(s.cohorts, 1):
        starts = {i: start(i) for i in cohort}
        result.before.append([hits(s, starts[i][1], i) for i in cohort])
        for i in cohort:
            masks, weights = starts[i]
            if lams is None:
                weights = train(s, weights, t, i)
            else:
                inverse = {k: ~m for k, m in masks.items()}
                weights = masked(other, weights, shared, t, i, masks, lambda d: lams[0] / 2 * d)
                weights = masked(
                    s, weights, shared, t, i, inverse, lambda d: lams[1] / 2 * abs(d - lams[2])
                )
            own[i], scores[i] = weights, fisher(s, weights, i)
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, cohort, [own[i] for i in cohort])
        result.shared.append(shared)
        result.personal.append([start(i)[1] for i in range(len(s.clients))])
    return result
