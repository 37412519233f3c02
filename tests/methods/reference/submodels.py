"""Rounds of methods with sub-models as plain loops, for the network conv (4 filters), perhaps
BatchNorm, fc (12), head.

Sub-models are dense small networks: slices are copied in and out. FedSPU trains the full network
and puts frozen
entries back after every step. Sources: arXiv:2403.11464 (FedSPU), arXiv:1812.07210 (federated
dropout), arXiv:2102.13451 (FjORD), and the comparison versions of Hermes, FedMP and PruneFL
described in FedSPU's paper.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.plain import Result, Setting, Weights, hits, load, train

Sets = tuple[list[int], list[int]]  # active channels, active hidden units

FULL: Sets = (list(range(4)), list(range(12)))


def index(name: str, sets: Sets) -> tuple[list[int], ...]:
    """Which rows and columns of a tensor belong to the sub-model; empty for counters."""
    channels, units = sets
    columns = [9 * c + k for c in channels for k in range(9)]
    if name.endswith("num_batches_tracked"):
        return ()
    return {
        "conv.weight": (channels, [0]),
        "fc.weight": (units, columns),
        "fc.bias": (units,),
        "classifier.weight": (list(range(5)), units),
        "classifier.bias": (list(range(5)),),
    }.get(name, (channels,))


def grid(name: str, sets: Sets):
    at = index(name, sets)
    return (
        (torch.tensor(at[0])[:, None], torch.tensor(at[1]))
        if len(at) == 2
        else (torch.tensor(at[0]),)
    )


def cut(weights: Weights, sets: Sets) -> Weights:
    """The small network's values."""
    return {
        n: v[grid(n, sets)].clone() if index(n, sets) else v.clone() for n, v in weights.items()
    }


def grown(small: Weights, sets: Sets, into: Weights) -> Weights:
    """`into` with the small network's values in their places."""
    out = {name: value.clone() for name, value in into.items()}
    for name, value in small.items():
        if index(name, sets):
            out[name][grid(name, sets)] = value
        else:
            out[name] = value.clone()
    return out


def narrow(module: nn.Module, sets: Sets) -> nn.Module:
    """The small dense network."""
    small = copy.deepcopy(module)
    a, b = len(sets[0]), len(sets[1])
    small.conv = nn.Conv2d(1, a, 3)
    if not isinstance(small.norm, nn.Identity):
        small.norm = nn.BatchNorm2d(a)
    small.fc, small.classifier = nn.Linear(9 * a, b), nn.Linear(b, 5)
    return small


def merged(
    s: Setting, old: Weights, cohort: list[int], models: list[Weights], sets: list[Sets]
) -> Weights:
    """Entry by entry, the mean over the clients that hold it, by samples, in float64."""
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in old.items()}
    weight = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in old.items()}
    for i, model, own in zip(cohort, models, sets, strict=True):
        for name in old:
            if index(name, own):
                at = grid(name, own)
                total[name][at] += len(s.clients[i].y) * model[name][at].double()
                weight[name][at] += len(s.clients[i].y)
    return {
        name: torch.where(weight[name] > 0, total[name] / weight[name], value.double()).to(
            value.dtype
        )
        for name, value in old.items()
    }


def statistics(weights: Weights) -> Weights:
    return {
        name: value for name, value in weights.items() if "running" in name or "tracked" in name
    }


def dense(
    s: Setting,
    sets: Callable[[int, int], Sets],
    begins: Callable[[int, int, Weights], Weights] = lambda t, i, shared: shared,
) -> Result:
    """Each client trains its small dense network, every round with the neurons `sets(round,
    client)`.

    begins: what the small network is cut from, asked first. Personal: zeros around the small
    network. Statistics stay local.
    """
    shared, result = s.initial, Result()
    local = [statistics(s.initial) for _ in s.clients]
    personal: list[Weights] = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        ends, chosen, before, after = [], [], [], []
        for i in cohort:
            received = begins(t, i, shared)
            own = sets(t, i)
            small = replace(s, module=narrow(s.module, own))
            begin = cut({**received, **local[i]}, own)
            end = train(small, begin, t, i)
            before.append(hits(small, begin, i))
            after.append(hits(small, end, i))
            zeros = {name: torch.zeros_like(value) for name, value in shared.items()}
            personal[i] = grown(end, own, {**zeros, **local[i]})
            local[i] = statistics(personal[i])
            ends.append(personal[i])
            chosen.append(own)
        shared = merged(s, shared, cohort, ends, chosen)
        result.shared.append(shared)
        result.personal.append([{**p} for p in personal])
        result.before.append(before)
        result.after.append(after)
    return result


def fedspu(
    s: Setting, sets: Callable[[int, int], Sets], lam: float | None = None
) -> tuple[Result, list[dict[int, float]], list[set[int]]]:
    """FedSPU; with `lam` also, after every round, clients' last losses for early stopping, and who
    has stopped.

    Cohorts are given: who has stopped must not be in them any more.
    """
    shared, result, losses, gone = s.initial, Result(), [], []
    last: dict[int, float] = {}
    stopped: set[int] = set()
    personal: list[Weights] = [s.initial for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        ends, chosen, before, after = [], [], [], []
        assert not stopped & set(cohort)
        for i in cohort:
            own = sets(t, i)
            begin = grown(cut(shared, own), own, personal[i]) | statistics(personal[i])
            end, mean_loss = frozen_training(s, begin, t, i, own)
            before.append(hits(s, begin, i))
            after.append(hits(s, end, i))
            personal[i] = end
            ends.append(end)
            chosen.append(own)
            if lam is not None:
                loss = lam * mean_loss + (1 - lam) * held_out_loss(s, end, i)
                if loss > last.get(i, math.inf):
                    stopped.add(i)
                last[i] = loss
        shared = merged(s, shared, cohort, ends, chosen)
        result.shared.append(shared)
        result.personal.append([{**p} for p in personal])
        result.before.append(before)
        result.after.append(after)
        losses.append(dict(last))
        gone.append(set(stopped))
    return result, losses, gone


def frozen_training(
    s: Setting, weights: Weights, t: int, i: int, own: Sets
) -> tuple[Weights, float]:
    """LocalTrain on the entries of `own`, the others put back after each step; mean loss over all
    samples seen.
    """
    losses: list[tuple[float, int]] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        value = F.cross_entropy(model(x), y)
        losses.append((float(value.detach()) * len(y), len(y)))
        return value

    def put_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, p in model.named_parameters():
            free = torch.zeros_like(p, dtype=torch.bool)
            free[grid(name, own)] = True
            p.copy_(torch.where(free, p, weights[name]))

    end = train(s, weights, t, i, loss=loss, after_step=put_back)
    return end, sum(total for total, _ in losses) / max(1, sum(count for _, count in losses))


def held_out_loss(s: Setting, weights: Weights, i: int) -> float:
    model = load(s, weights).eval()
    if not len(s.clients[i].test_y):
        return 0.0
    with torch.no_grad():
        return float(F.cross_entropy(model(s.clients[i].test_x), s.clients[i].test_y))


def ranked(
    s: Setting, i: int, weights: Weights, score: str, lr: float, order: Tensor, k: tuple[int, int]
) -> Sets:
    """The neurons that a client keeps after one epoch of plain SGD on a copy, from the order of
    that epoch.
    """
    model = load(s, weights).train()
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in order.split(s.batch_size):
        if len(batch) > 1:
            model.zero_grad()
            F.cross_entropy(model(s.clients[i].x[batch]), s.clients[i].y[batch]).backward()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    sums[name] += p.grad
                    p -= lr * p.grad
    found = []
    for layer, count in zip(("conv.weight", "fc.weight"), k, strict=True):
        values = (sums[layer] if score == "gradient" else model.state_dict()[layer]).flatten(1)
        norm = values.abs().sum(1) if score == "l1" else values.pow(2).sum(1).sqrt()
        found.append(sorted(sorted(range(len(norm)), key=lambda j, n=norm: -float(n[j]))[:count]))
    return found[0], found[1]
