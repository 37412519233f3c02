"""Rounds of FlexFL (arXiv:2407.12729) as plain loops, with dense small networks."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, hits, train
from tests.methods.reference.submodels import Sets, cut, grown, merged, narrow, statistics


def levels(
    s: Setting, apoz: tuple[float, float], targets: tuple[float, ...], tolerance: float
) -> list[Sets]:
    """Prefix sets by the search over whole gammas, scalars counted in real networks; nearest if
    none is close.
    """
    sizes = {"conv": 4, "fc": 12}
    scalars = [sum(p.numel() for p in getattr(s.module, name).parameters()) for name in sizes]
    scalars[0] += sum(p.numel() for p in s.module.norm.parameters())
    worth = [
        1 - a * math.log(p) / math.log(max(scalars)) for a, p in zip(apoz, scalars, strict=True)
    ]
    whole = sum(p.numel() for p in s.module.parameters())
    found = []
    for target in targets:
        tried = []
        for gamma in range(1, 10001):
            shares = [min(max(100 * own / gamma, 0.01), 1.0) for own in worth]
            kept = [
                max(1, math.floor(share * size + 1e-9))
                for share, size in zip(shares, sizes.values(), strict=True)
            ]
            sets = list(range(kept[0])), list(range(kept[1]))
            apart = sum(p.numel() for p in narrow(s.module, sets).parameters()) / whole - target
            tried.append((abs(apart), sets))
            if abs(apart) <= tolerance:
                tried = tried[-1:]
                break
            if apart < 0:
                break
        found.append(
            min(tried, key=lambda one: one[0])[1]
            if target < 1
            else (list(range(4)), list(range(12)))
        )
    return found


def trained(
    s: Setting,
    nested: list[Sets],
    level: int,
    weights: Weights,
    t: int,
    i: int,
    gamma: float,
    temperature: float,
) -> Weights:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        total = F.cross_entropy(logits, y)
        for lower in range(level):
            teacher = narrow(s.module, nested[lower])
            teacher.load_state_dict(cut(model.state_dict(), nested[lower]))
            soft = (teacher.train()(x).detach() / temperature).softmax(1)
            hard = (logits / temperature).log_softmax(1)
            total = total + gamma / level * temperature**2 * (soft * (soft.log() - hard)).mean()
        return total

    return train(replace(s, module=narrow(s.module, nested[level])), weights, t, i, loss=loss)


def play(
    s: Setting,
    nested: list[Sets],
    sent: Callable[[int, int], int],
    device: Callable[[int], int],
    gamma: float,
    temperature: float,
) -> Result:
    """`sent(round, client)`, rounds from 1; personal: zeros around the small network."""
    shared, result = s.initial, Result()
    local = [statistics(s.initial) for _ in s.clients]
    zeros = {name: torch.zeros_like(value) for name, value in shared.items()}
    personal = [
        grown(cut(s.initial, nested[device(i)]), nested[device(i)], {**zeros, **local[i]})
        for i in range(len(s.clients))
    ]
    for t, cohort in enumerate(s.cohorts, 1):
        before, after, chosen = [], [], []
        for i in cohort:
            level = min(sent(t, i), device(i))
            own = nested[level]
            module = narrow(s.module, own)
            begin = cut({**shared, **local[i]}, own)
            end = trained(s, nested, level, begin, t, i, gamma, temperature)
            small = replace(s, module=module)
            before.append(hits(small, begin, i))
            after.append(hits(small, end, i))
            personal[i] = grown(end, own, {**zeros, **local[i]})
            local[i] = statistics(personal[i])
            chosen.append(own)
        shared = merged(s, shared, cohort, [personal[i] for i in cohort], chosen)
        result.shared.append(shared)
        result.personal.append([{**p} for p in personal])
        result.before.append(before)
        result.after.append(after)
    return result
