"""APPLE's rounds as plain loops (arXiv:2110.08394): the update of both kinds of numbers written
out.
"""

import copy
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, hits, load, minibatches


@dataclass
class Relations(Result):
    """Beside each client's v_i: cores and p, after every round."""

    cores: list[list[Weights]] = field(default_factory=list)
    p: list[list[list[float]]] = field(default_factory=list)


def combined(p: torch.Tensor, cores: list[Weights], parameters: list[str]) -> Weights:
    return {
        k: sum(float(p[j]) * w[k].double() for j, w in enumerate(cores)).float() for k in parameters
    }


def local(
    s: Setting,
    cores: list[Weights],
    buffers: Weights,
    p,
    p0,
    t: int,
    i: int,
    rate: float,
    penalty: float,
):
    """Simultaneous SGD with momentum on core i and p; `cores` of others hold still."""
    first, names = p.clone(), [k for k, _ in s.module.named_parameters()]
    cores = [copy.deepcopy(core) for core in cores]
    slow_w, slow_p = {k: torch.zeros_like(cores[i][k]) for k in names}, torch.zeros_like(p)
    for x, y in minibatches(s, t, i, range(s.epochs)):
        model = load(s, combined(p, cores, names) | buffers).train()
        F.cross_entropy(model(x), y).backward()
        g = {k: x.grad for k, x in model.named_parameters()}
        buffers = {k: b.clone() for k, b in model.named_buffers()}
        slope = torch.tensor(
            [sum(float((g[k].double() * w[k].double()).sum()) for k in names) for w in cores]
        )
        slope = slope.double() + penalty * (p - p0)
        for k in names:
            slow_w[k] = s.momentum * slow_w[k] + float(p[i]) * g[k] + s.weight_decay * cores[i][k]
            cores[i][k] = cores[i][k] - s.lr * slow_w[k]
        slow_p = s.momentum * slow_p + rate * slope + s.weight_decay * (p - first)
        p = p - s.lr * slow_p
    return cores[i], buffers, p


def apple(
    s: Setting, rate: float, mu: float, schedule: str, until: float, rounds: int
) -> Relations:
    result, names = Relations(), [k for k, _ in s.module.named_parameters()]
    sizes = torch.tensor([len(client.y) for client in s.clients]).double()
    p0 = sizes / sizes.sum()
    p = [p0.clone() for _ in s.clients]
    cores = [{k: s.initial[k] for k in names} for _ in s.clients]
    buffers = [{k: v for k, v in s.initial.items() if k not in names} for _ in s.clients]

    def model(i: int) -> Weights:
        return combined(p[i], cores, names) | buffers[i]

    for t, cohort in enumerate(s.cohorts, 1):
        r, last = t - 1, until * rounds
        falling = (
            (math.cos(math.pi * r / last) + 1) / 2 if schedule == "cosine" else 0.001 ** (r / last)
        )
        penalty = mu * falling if r < last else 0.0
        result.before.append([hits(s, model(i), i) for i in cohort])
        received, hit = list(cores), []
        for i in cohort:
            core, buffers[i], p[i] = local(s, received, buffers[i], p[i], p0, t, i, rate, penalty)
            mine = [core if j == i else w for j, w in enumerate(received)]
            hit.append(hits(s, combined(p[i], mine, names) | buffers[i], i))
            cores[i] = core
        result.after.append(hit)
        result.personal.append([model(i) for i in range(len(s.clients))])
        result.cores.append(list(cores))
        result.p.append([own.tolist() for own in p])
    return result
