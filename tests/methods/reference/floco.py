"""FLOCO's and FLOCO+'s rounds as plain loops (arXiv:2403.03333), simplex and projection written
out.
"""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.reference.plain import Result, Setting, Weights, average

WEIGHT = "classifier.weight"


def simplex(point: np.ndarray, z: float) -> np.ndarray:
    falling, total, rho = sorted(point, reverse=True), 0.0, 0
    for j, value in enumerate(falling, 1):
        if value - (sum(falling[:j]) - z) / j > 0:
            rho, total = j, sum(falling[:j])
    return np.maximum(point - (total - z) / rho, 0)


def centres(points: np.ndarray, count: int) -> np.ndarray:
    centred = points - points.mean(0)
    gram_values, vectors = np.linalg.eigh(centred @ centred.T)
    kappa = np.zeros((len(points), count))
    for k in range(min(count, len(points))):
        score = vectors[:, -1 - k] * math.sqrt(max(gram_values[-1 - k], 0))
        loading = centred.T @ score
        kappa[:, k] = score * np.sign(loading[np.abs(loading).argmax()])
    best, least = None, math.inf
    for z in np.linspace(1e-4, 1, 1000):
        beta = np.stack([simplex(own, z) for own in kappa])
        beta /= beta.sum(1, keepdims=True)
        total = 0.0
        for i in range(len(beta)):
            for j in range(i):
                total += 1 / max(np.linalg.norm(beta[i] - beta[j]), 1e-4) ** 2
        energy = math.log(2 * total / (len(beta) * (len(beta) - 1)))
        if energy < least:
            best, least = beta, energy
    return best


def floco(
    s: Setting, ends: Tensor, tau: int, rho: float, random, gather_order, gather_random, plus=None
) -> Result:
    """`ends` `[M, C, d]`: the initial endpoints. `random(t, i, epoch, steps)`: uniform numbers
    `[steps, M + 1]`.

    plus: (epochs, lam) of FLOCO+, on the same batches and points; epochs at most the local ones.
    """
    m = len(ends)
    result, shared = Result(), {**s.initial, WEIGHT: ends}
    betas: list[Tensor | None] = [None for _ in s.clients]
    private: list[Weights] = [dict(shared) for _ in s.clients]

    def point(numbers: Tensor, beta: Tensor | None) -> Tensor:
        if beta is None:
            drawn = torch.tensor([-math.log(1 - float(u)) for u in numbers[:m]])
            return drawn / drawn.sum()
        u = 2 * numbers[:m] - 1
        return beta + rho * numbers[m] * u / u.abs().sum()

    def forward(weights: Weights, alpha: Tensor, x: Tensor) -> Tensor:
        head = sum(a * end for a, end in zip(alpha, weights[WEIGHT], strict=True))
        return torch.func.functional_call(s.module, {**weights, WEIGHT: head}, (x,))

    def model(i: int) -> tuple[Weights, Tensor]:
        alpha = betas[i] if betas[i] is not None else torch.full((m,), 1 / m)
        return (private[i] if plus else shared), alpha

    def hits(weights: Weights, alpha: Tensor, i: int) -> int:
        with torch.no_grad():
            return int(
                (
                    forward(weights, alpha, s.clients[i].test_x).argmax(1) == s.clients[i].test_y
                ).sum()
            )

    def train(
        start: Weights,
        t: int,
        i: int,
        order,
        draw,
        epochs: int,
        near: Weights | None = None,
        lam=0.0,
    ) -> Weights:
        weights = {k: v.clone().requires_grad_() for k, v in start.items()}
        optimizer = torch.optim.SGD(
            weights.values(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay
        )
        client = s.clients[i]
        for epoch in range(epochs):
            batches = [
                b for b in order(t, i, epoch, len(client.y)).split(s.batch_size) if len(b) > 1
            ]
            for batch, numbers in zip(batches, draw(t, i, epoch, len(batches)), strict=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(
                    forward(weights, point(numbers, betas[i]), client.x[batch]), client.y[batch]
                )
                loss.backward()
                if near is not None:
                    for k, p in weights.items():
                        p.grad += lam * (p.detach() - near[k])
                optimizer.step()
        return {k: v.detach() for k, v in weights.items()}

    for t, cohort in enumerate(s.cohorts, 1):
        if t - 1 == tau:
            everyone = [
                train(shared, t, i, gather_order, gather_random, s.epochs)[WEIGHT]
                .flatten()
                .double()
                .numpy()
                for i in range(len(s.clients))
            ]
            betas = [torch.from_numpy(beta).float() for beta in centres(np.stack(everyone), m)]
        result.before.append([hits(*model(i), i) for i in cohort])
        trained = [train(shared, t, i, s.order, random, s.epochs) for i in cohort]
        if plus:
            for i in cohort:
                private[i] = train(
                    private[i], t, i, s.order, random, plus[0], near=shared, lam=plus[1]
                )
        for k, i in enumerate(cohort):
            weights, alpha = model(i)
            result.after.append(hits(weights if plus else trained[k], alpha, i))
        shared = average(s, cohort, trained)
        result.shared.append(copy.deepcopy(shared))
        final = []
        for i in range(len(s.clients)):
            weights, alpha = model(i)
            final.append(
                {**weights, WEIGHT: sum(a * e for a, e in zip(alpha, weights[WEIGHT], strict=True))}
            )
        result.personal.append(final)
    return result
