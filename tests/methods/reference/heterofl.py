"""Rounds of HeteroFL and FedRolex as plain loops, with dense small networks.

Sources: arXiv:2010.01264 (HeteroFL: scaler, masked cross-entropy, batch statistics in training),
arXiv:2212.01548.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, train
from tests.methods.reference.submodels import Sets, cut, grid, grown, index, narrow, statistics


def small(s: Setting, sets: Sets, weights: Weights) -> nn.Module:
    model = narrow(s.module, sets)
    model.load_state_dict(weights)
    return model


def scaled(model: nn.Module, x: Tensor, rate: float) -> Tensor:
    """Logits in training, what the convolution gives divided by `rate`; statistics are those
    without.
    """
    z = model.conv(x)
    if isinstance(model.norm, nn.Identity):
        z = z / rate
    else:
        with torch.no_grad():
            model.norm(z)
        z = F.batch_norm(
            z / rate, None, None, model.norm.weight, model.norm.bias, True, eps=model.norm.eps
        )
    return model.classifier(torch.tanh(model.fc(F.avg_pool2d(torch.tanh(z), 2).flatten(1))))


def seen(s: Setting, i: int, masked: bool) -> Tensor:
    """Which classes the client trains on; all if this plays no part."""
    own = [c in s.clients[i].y.tolist() for c in range(5)]
    return torch.tensor(own) if masked else torch.ones(5, dtype=torch.bool)


def trained(
    s: Setting,
    sets: Sets,
    weights: Weights,
    t: int,
    i: int,
    rate: float | None,
    masked: bool,
    clip: float,
) -> Weights:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = scaled(model, x, rate) if rate else model(x)
        return F.cross_entropy(logits.masked_fill(~seen(s, i, masked), 0), y)

    def clip_gradient(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)

    narrowed = replace(s, module=narrow(s.module, sets))
    return train(narrowed, weights, t, i, loss=loss, after_gradient=clip_gradient if clip else None)


def judged(s: Setting, sets: Sets, weights: Weights, i: int, masked: bool) -> tuple[int, float]:
    """Hits and summed cross-entropy on the client's test data."""
    model, client = small(s, sets, weights).eval(), s.clients[i]
    with torch.no_grad():
        logits = model(client.test_x).masked_fill(~seen(s, i, masked), 0)
        loss = F.cross_entropy(logits, client.test_y, reduction="sum")
    return int((logits.argmax(1) == client.test_y).sum()), float(loss)


def merged(
    s: Setting,
    old: Weights,
    cohort: list[int],
    models: list[Weights],
    sets: list[Sets],
    equal: bool,
    masked: bool,
) -> Weights:
    """Entry by entry over those who hold it, and rows of the head over those who have the class, in
    float64.
    """
    out = {}
    for name, value in old.items():
        total, weight = (torch.zeros_like(value, dtype=torch.float64) for _ in range(2))
        for i, model, own in zip(cohort, models, sets, strict=True):
            if not index(name, own):
                continue
            counts = torch.zeros_like(value, dtype=torch.float64)
            counts[grid(name, own)] = 1 if equal else len(s.clients[i].y)
            if name.startswith("classifier"):
                counts[~seen(s, i, masked)] = 0
            total, weight = total + counts * model[name].double(), weight + counts
        out[name] = torch.where(weight > 0, total / weight.clamp(min=1), value.double()).to(
            value.dtype
        )
    return out


def play(
    s: Setting,
    sets: Callable[[int, int], Sets],
    rate: Callable[[int, int], float] | None = None,
    equal: bool = True,
    masked: bool = True,
    clip: float = 0.0,
) -> Result:
    """`sets(round, client)` and, with the scaler, `rate(round, client)`, rounds from 1. Personal:
    zeros around.
    """
    shared, result = s.initial, Result()
    local = [statistics(s.initial) for _ in s.clients]
    zeros = {name: torch.zeros_like(value) for name, value in shared.items()}
    personal = [
        grown(cut(s.initial, sets(1, i)), sets(1, i), {**zeros, **local[i]})
        for i in range(len(s.clients))
    ]
    for t, cohort in enumerate(s.cohorts, 1):
        before, after, chosen = [], [], []
        for i in cohort:
            own = sets(t, i)
            begin = cut({**shared, **local[i]}, own)
            end = trained(s, own, begin, t, i, rate and rate(t, i), masked, clip)
            before.append(judged(s, own, begin, i, masked)[0])
            after.append(judged(s, own, end, i, masked)[0])
            personal[i] = grown(end, own, {**zeros, **local[i]})
            local[i] = statistics(personal[i])
            chosen.append(own)
        shared = merged(s, shared, cohort, [personal[i] for i in cohort], chosen, equal, masked)
        result.shared.append(shared)
        result.personal.append([{**p} for p in personal])
        result.before.append(before)
        result.after.append(after)
    return result
