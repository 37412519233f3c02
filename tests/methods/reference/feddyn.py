"""FedDyn's rounds as plain loops (arXiv:2111.04263, Algorithm 1), by clients' g_i = -alpha lam_i
and the server's h.
"""

import torch
from torch import nn

from tests.methods.reference.plain import Result, Setting, Weights, hits, train


def local(s: Setting, shared: Weights, g: Weights, alpha: float, t: int, i: int) -> Weights:
    """SGD on L(x) - <g, x> + alpha/2 |x - shared|^2, gradients by hand."""

    def add_terms(model: nn.Module) -> None:
        for name, p in model.named_parameters():
            p.grad += alpha * (p.detach() - shared[name]) - g[name]

    return train(s, shared, t, i, after_gradient=add_terms)


def feddyn(s: Setting, alpha: float, judge: str = "cloud") -> tuple[Result, list[list[Weights]]]:
    """Also every client's g_i after every round. `personal` is the model that `judge` names."""
    result, shared, clients = Result(), s.initial, len(s.clients)
    zeros = {k: torch.zeros_like(v) for k, v in shared.items()}
    h, g, gradients = zeros, [zeros for _ in s.clients], []
    latest = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, shared, i) for i in cohort])
        for i in cohort:
            latest[i] = local(s, shared, g[i], alpha, t, i)
            g[i] = {k: g[i][k] - alpha * (latest[i][k] - shared[k]) for k in shared}
        result.after.append([hits(s, latest[i], i) for i in cohort])
        h = {
            k: h[k] - alpha / clients * sum(latest[i][k] - shared[k] for i in cohort)
            for k in shared
        }
        mean = {k: sum(latest[i][k].double() for i in cohort).float() / len(cohort) for k in shared}
        shared = {k: mean[k] - h[k] / alpha for k in shared}
        everyone = {k: sum(own[k].double() for own in latest).float() / clients for k in shared}
        result.shared.append(shared)
        result.personal.append(
            [{"cloud": shared, "cohort": mean, "all": everyone}[judge]] * clients
        )
        gradients.append(list(g))
    return result, gradients
