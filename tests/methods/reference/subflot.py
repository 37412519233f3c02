"""SubFLOT (arXiv:2604.06631) as plain loops, for the network conv (4 filters), perhaps BatchNorm,
fc (12), head.

Sub-models are small dense networks. A match is a linear program, whatever the mode; a mixture is a
sum of products.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import linprog

from tests.methods.reference.plain import Result, Setting, Weights, hits, train
from tests.methods.reference.submodels import Sets, cut, grown, narrow, statistics

Arrays = dict[str, np.ndarray]


def match(cost: np.ndarray, mode: str) -> np.ndarray:
    """one: as many pairs as fit, of least cost; balanced: uniform marginals, columns divided by
    their sums.
    """
    s, t = cost.shape
    gives, gets = np.zeros((s, s * t)), np.zeros((t, s * t))
    for i in range(s):
        for j in range(t):
            gives[i, i * t + j] = gets[j, i * t + j] = 1
    if mode == "balanced":
        rules = {"A_eq": np.concatenate([gives, gets]), "b_eq": [1 / s] * s + [1 / t] * t}
    elif s >= t:
        rules = {"A_ub": gives, "b_ub": [1] * s, "A_eq": gets, "b_eq": [1] * t}
    else:
        rules = {"A_ub": gets, "b_ub": [1] * t, "A_eq": gives, "b_eq": [1] * s}
    plan = linprog(cost.ravel(), **rules).x.reshape(s, t)
    plan[plan < 1e-9] = 0
    for j in range(t):
        if plan[:, j].sum() > 0:
            plan[:, j] /= plan[:, j].sum()
    return plan


def distances(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    return np.array([[np.sqrt(((x - y) ** 2).sum()) for y in b] for x in a])


def align(source: Weights, target: Weights, mode: str) -> tuple[Arrays, Arrays]:
    """The source's values in the target's places, and ones where something arrived."""
    a = {name: value.double().numpy() for name, value in source.items()}
    b = {name: value.double().numpy() for name, value in target.items()}
    channels, units, wide, high = (
        len(a["conv.bias"]),
        len(a["fc.bias"]),
        len(b["conv.bias"]),
        len(b["fc.bias"]),
    )

    first = match(
        distances(
            [np.append(a["conv.weight"][o].ravel(), a["conv.bias"][o]) for o in range(channels)],
            [np.append(b["conv.weight"][k].ravel(), b["conv.bias"][k]) for k in range(wide)],
        ),
        mode,
    )
    inputs = np.zeros((units, 9 * wide))
    for j in range(wide):
        for c in range(channels):
            for k in range(9):
                inputs[:, 9 * j + k] += first[c, j] * a["fc.weight"][:, 9 * c + k]
    here = [9 * j + k for j in range(wide) if first[:, j].sum() > 0 for k in range(9)]
    second = match(
        distances(
            [np.append(inputs[o][here], a["fc.bias"][o]) for o in range(units)],
            [np.append(b["fc.weight"][k][here], b["fc.bias"][k]) for k in range(high)],
        ),
        mode,
    )
    out, there = {}, {}
    for name in a:
        if name.startswith(("conv", "norm")):
            out[name], there[name] = np.zeros_like(b[name]), np.zeros_like(b[name])
            for j in range(wide):
                for c in range(channels):
                    out[name][j] += first[c, j] * a[name][c]
                there[name][j] = first[:, j].sum() > 0
    out["fc.weight"], out["fc.bias"] = second.T @ inputs, second.T @ a["fc.bias"]
    out["classifier.weight"], out["classifier.bias"] = (
        a["classifier.weight"] @ second,
        a["classifier.bias"],
    )
    reached = second.sum(0) > 0
    columns = np.isin(np.arange(9 * wide), here)
    there["fc.weight"], there["fc.bias"] = np.outer(reached, columns), reached
    there["classifier.weight"], there["classifier.bias"] = np.outer(np.ones(5), reached), np.ones(5)
    return out, there


def leading(sets: Sets) -> Sets:
    return list(range(len(sets[0]))), list(range(len(sets[1])))


def in_front(source: Weights, target: Weights) -> tuple[Arrays, Arrays]:
    """The source's values in the first places, and ones there."""
    out = {name: np.zeros(value.shape) for name, value in target.items()}
    there = {name: np.zeros(value.shape) for name, value in target.items()}
    for name, value in source.items():
        place = tuple(slice(size) for size in value.shape)
        out[name][place], there[name][place] = value.double().numpy(), 1
    return out, there


def subflot(
    s: Setting,
    first_choice: Callable[[int, int], Sets],
    rate: Callable[[int], float],
    alpha: float,
    lam: float,
    mode: str,
    otp: bool = True,
    ota: bool = True,
) -> tuple[Result, int]:
    """`first_choice(round, client)`: the neurons that a new client begins with. Statistics stay
    with the client.

    otp, ota: False takes the first neurons of every layer instead.

    Also how many extractions were not those of the client's own positions.
    """
    shared = {name: value for name, value in s.initial.items() if name not in statistics(s.initial)}
    result, elsewhere = Result(), 0
    local = [statistics(s.initial) for _ in s.clients]
    personal: list[Weights] = [s.initial for _ in s.clients]
    history: dict[int, Weights] = {}
    sets: dict[int, Sets] = {}
    for t, cohort in enumerate(s.cohorts, 1):
        before, after, trained = [], [], {}
        for i in cohort:
            if i not in history:
                sets[i] = first_choice(t, i)
                begin = cut(shared, sets[i])
            else:
                moved = {
                    name: value.numpy() for name, value in cut(shared, leading(sets[i])).items()
                }
                if otp:
                    moved, _ = align(shared, history[i], mode)
                begin = {
                    name: torch.from_numpy(
                        alpha * moved[name] + (1 - alpha) * old.double().numpy()
                    ).float()
                    for name, old in history[i].items()
                }
                by_place = cut(shared, sets[i])
                elsewhere += any(
                    np.abs(moved[name] - by_place[name].numpy()).max() > 1e-4 for name in moved
                )
            small = replace(s, module=narrow(s.module, sets[i]))
            begin = {**begin, **cut(local[i], sets[i])}
            end = train(small, begin, t, i, near=begin, lam=2 * lam * rate(i))
            before.append(hits(small, begin, i))
            after.append(hits(small, end, i))
            zeros = {name: torch.zeros_like(value) for name, value in shared.items()}
            personal[i] = grown(end, sets[i], {**zeros, **local[i]})
            local[i] = statistics(personal[i])
            trained[i] = {name: end[name] for name in shared}
        total = {name: np.zeros(value.shape) for name, value in shared.items()}
        weight = {name: np.zeros(value.shape) for name, value in shared.items()}
        for i in cohort:
            moved, there = align(trained[i], shared, mode) if ota else in_front(trained[i], shared)
            for name in shared:
                total[name] += len(s.clients[i].y) * there[name] * moved[name]
                weight[name] += len(s.clients[i].y) * there[name]
            history[i] = trained[i]
        shared = {
            name: torch.from_numpy(
                np.where(
                    weight[name] > 0,
                    total[name] / np.maximum(weight[name], 1),
                    value.double().numpy(),
                )
            ).float()
            for name, value in shared.items()
        }
        result.shared.append(shared)
        result.personal.append([{**p} for p in personal])
        result.before.append(before)
        result.after.append(after)
    return result, elsewhere
