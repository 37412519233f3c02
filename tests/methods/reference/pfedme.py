"""pFedMe's rounds as plain loops (arXiv:2006.08848, Algorithm 1), one module for th, explicit
updates.
"""

import copy

import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load, minibatches


def local(
    s: Setting,
    shared: Weights,
    t: int,
    i: int,
    lam: float,
    inner_steps: int,
    delta: float,
    eta: float,
    mu: float,
) -> tuple[Weights, Weights]:
    """The client's copy of w (with the statistics of th's passes) and th."""
    model = load(s, shared).train()
    w = {k: p.detach().clone() for k, p in model.named_parameters()}
    for x, y in minibatches(s, t, i, range(s.epochs)):
        for _ in range(inner_steps):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for k, p in model.named_parameters():
                    p -= delta * (p.grad + lam * (p - w[k]) + mu * p)
        with torch.no_grad():
            for k, p in model.named_parameters():
                w[k] = w[k] - eta * lam * (w[k] - p)
    th = copy.deepcopy(model.state_dict())
    return {**th, **w}, th


def pfedme(s: Setting, beta: float, uniform: bool, **values) -> Result:
    """`personal` holds th's parameters and the server's statistics."""
    result, shared = Result(), s.initial
    own: list[Weights | None] = [None] * len(s.clients)
    parameters = [k for k, _ in s.module.named_parameters()]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        trained, after = [], []
        for i in cohort:
            w, th = local(s, shared, t, i, **values)
            trained.append(w)
            after.append(hits(s, th, i))
            own[i] = {k: th[k] for k in parameters}
        result.after.append(after)
        mean = average(s, cohort, trained)
        for k in parameters:
            if uniform:
                mean[k] = (sum(w[k].double() for w in trained) / len(cohort)).float()
            mean[k] = (1 - beta) * shared[k] + beta * mean[k]
        shared = mean
        result.shared.append(shared)
        result.personal.append([{**shared, **(th or {})} for th in own])
    return result
