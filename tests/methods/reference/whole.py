"""Two methods whole, to be read: FedOBP (arXiv:2604.16574 eqs. 7-9, 19, 21) and SCAFFOLD
(arXiv:1910.06378, option II).
"""

import copy

import numpy as np
import torch
import torch.nn.functional as F

from tests.methods.reference.plain import (
    WATCHED,
    Result,
    Setting,
    Turn,
    Weights,
    average,
    hits,
    train,
    values_of,
)


def fedobp(s: Setting, q: float) -> Result:
    result, shared = Result(), s.initial
    own = [s.initial for _ in s.clients]

    def merged(i: int) -> tuple[Weights, int]:
        """Keep the client's entries whose score is above the quantile; count them."""
        scores = {
            k: (own[i][k].numpy() - shared[k].numpy()).astype(np.float64) ** 2 for k in shared
        }
        everything = np.sort(np.concatenate([score.ravel() for score in scores.values()]))
        threshold = np.quantile(everything, q, method="linear")
        above, below = everything[everything > threshold], everything[everything <= threshold]
        if len(above) and len(below):
            result.margins.append(float((above[0] - below[-1]) / above[0]))
        chosen = {k: torch.from_numpy(score > threshold) for k, score in scores.items()}
        return {k: torch.where(chosen[k], own[i][k], shared[k]) for k in shared}, len(above)

    for t, cohort in enumerate(s.cohorts, 1):
        starts = {}
        for i in cohort:
            starts[i], count = merged(i)
            result.counts.append(count)
        result.before.append([hits(s, starts[i], i) for i in cohort])
        for i in cohort:
            own[i] = train(s, starts[i], Turn(t, i, shared))
        result.after.append([hits(s, own[i], i) for i in cohort])
        shared = average(s, {i: own[i] for i in cohort})
        result.shared.append(shared)
        result.personal.append({i: merged(i)[0] for i in WATCHED})
    return result


def scaffold(s: Setting, server_lr: float) -> Result:
    """By the formula, which holds without momentum and weight decay."""
    result, shared = Result(), s.initial
    zeros = {k: torch.zeros_like(v) for k, v in shared.items()}
    control, own = zeros, [zeros for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained, changes = [], []
        for i in cohort:
            steps, model, client = 0, copy.deepcopy(s.module), s.clients[i]
            model.load_state_dict(shared)
            for epoch in range(s.epochs):
                for batch in s.order(t, i, epoch, len(client.y)).split(s.batch_size):
                    if len(batch) == 1:
                        continue
                    loss = F.cross_entropy(model(client.x[batch]), client.y[batch])
                    grads = torch.autograd.grad(loss, list(model.parameters()))
                    with torch.no_grad():
                        for (k, p), g in zip(model.named_parameters(), grads, strict=True):
                            p -= s.lr * (g + control[k] - own[i][k])
                    steps += 1
            end = values_of(model)
            trained.append(end)
            new = own[i]
            if steps:
                gradient = {k: (shared[k] - end[k]) / (steps * s.lr) for k in shared}
                new = {k: own[i][k] - control[k] + gradient[k] for k in shared}
            changes.append({k: new[k] - own[i][k] for k in shared})
            own[i] = new
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        m, n = len(cohort), len(s.clients)
        shared = {k: v + server_lr * sum(w[k] - v for w in trained) / m for k, v in shared.items()}
        control = {k: v + sum(change[k] for change in changes) / n for k, v in control.items()}
        result.shared.append(shared)
        result.personal.append([shared] * n)
    return result
