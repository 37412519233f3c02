"""Methods with sub-models, for the network conv (4 filters), perhaps BatchNorm, fc (12), head.

Sub-models are dense small networks: slices are copied in and out. Sources: arXiv:2403.11464
(FedSPU), 1812.07210 (federated dropout), 2102.13451 (FjORD), and the comparison versions of Hermes,
FedMP and PruneFL described in FedSPU's paper; 2010.01264 (HeteroFL: scaler, masked cross-entropy,
batch statistics in training), 2212.01548 (FedRolex), 2407.12729 (FlexFL), 2604.06631 (SubFLOT).
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch import Tensor, nn

from tests.methods.reference import plain
from tests.methods.reference.plain import HEAD, Result, Setting, Turn, Weights

Sets = tuple[list[int], list[int]]  # active channels, active hidden units
Choice = Callable[[int, int], Sets]  # by round and client


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


def grid(name: str, sets: Sets) -> tuple[Tensor, ...]:
    at = [torch.tensor(own) for own in index(name, sets)]
    return (at[0][:, None], at[1]) if len(at) == 2 else tuple(at)


def cut(weights: Weights, sets: Sets) -> Weights:
    """The small network's values."""
    return {name: value[grid(name, sets) or ...].clone() for name, value in weights.items()}


def grown(small: Weights, sets: Sets, into: Weights) -> Weights:
    """`into` with the small network's values in their places."""
    out = {name: value.clone() for name, value in into.items()}
    for name, value in small.items():
        out[name][grid(name, sets) or ...] = value
    return out


def narrow(module: nn.Module, sets: Sets) -> nn.Module:
    """The small dense network."""
    small, a, b = copy.deepcopy(module), len(sets[0]), len(sets[1])
    small.conv = nn.Conv2d(1, a, 3)
    if not isinstance(small.norm, nn.Identity):
        small.norm = nn.BatchNorm2d(a)
    small.fc, small.classifier = nn.Linear(9 * a, b), nn.Linear(b, 5)
    return small


def small_setting(s: Setting, sets: Sets) -> Setting:
    return plain.replace(s, module=narrow(s.module, sets))


def statistics(weights: Weights) -> Weights:
    return plain.pick(weights, lambda name: "running" in name or "tracked" in name)


def zeros(s: Setting) -> Weights:
    return {name: torch.zeros_like(value) for name, value in s.initial.items()}


def merged(
    s: Setting, old: Weights, models: dict[int, Weights], sets: dict[int, Sets], counts: Callable
) -> Weights:
    """Entry by entry over those who hold it, in float64; `counts(name, i)`: how much a client's
    entries count.
    """
    held = []
    for i in models:
        held.append({name: torch.zeros_like(value).double() for name, value in old.items()})
        for name, count in held[-1].items():
            if at := grid(name, sets[i]):
                count[at] = (torch.ones_like(count) * counts(name, i))[at]
    return plain.mean_by_entry(old, models.values(), held)


def play_small(
    s: Setting,
    sets: Choice,
    local: Callable[[Setting, Weights, Turn], Weights] = plain.train,
    receive: Callable[[Turn], Weights] = lambda turn: turn.shared,
    counts: Callable[[str, int], Any] | None = None,
    judge: Callable[[Setting, Weights, int], int] = plain.hits,
    untrained: Sets | Callable[[int], Sets] | None = None,
) -> Result:
    """Each client trains its small dense network; statistics stay with it.

    receive: what the small network is cut from, asked first. Personal: zeros around the small
    network; before it ever trained, the `untrained` part of the initial model, or all of it.
    """
    own, personal = {}, s.each(s.initial)
    if untrained:
        for i in s.everyone:
            part, frame = untrained(i), {**zeros(s), **statistics(s.initial)}
            personal[i] = grown(cut(s.initial, part), part, frame)
    by_samples = lambda name, i: len(s.clients[i].y)  # noqa: E731

    def begin(turn: Turn) -> tuple[Setting, Weights]:
        received = receive(turn)
        own[turn.i] = part = sets(turn.t, turn.i)
        return small_setting(s, part), cut({**received, **statistics(personal[turn.i])}, part)

    def train_small(starts: tuple[Setting, Weights], turn: Turn) -> tuple[Setting, Weights]:
        end = local(*starts, turn)
        frame = {**zeros(s), **statistics(personal[turn.i])}
        personal[turn.i] = grown(end, own[turn.i], frame)
        return starts[0], end

    def merge(shared: Weights, trained: dict[int, Any], t: int) -> Weights:
        return merged(s, shared, {i: personal[i] for i in trained}, own, counts or by_samples)

    return plain.play(
        s,
        train_small,
        begin,
        merge,
        personal=lambda turn: dict(personal[turn.i]),
        judge=lambda it, i: judge(*it, i),
    )


def fedspu(s: Setting, sets: Choice) -> Result:
    """The full network trains, and frozen entries are put back after every step."""
    own, personal = {}, s.each(s.initial)

    def begin(turn: Turn) -> Weights:
        own[turn.i] = sets(turn.t, turn.i)
        old, part = personal[turn.i], own[turn.i]
        return grown(cut(turn.shared, part), part, old) | statistics(old)

    def local(w: Weights, turn: Turn) -> Weights:
        masks = {name: torch.zeros_like(w[name], dtype=torch.bool) for name in s.names}
        for name, mask in masks.items():
            mask[grid(name, own[turn.i])] = True
        return plain.train(s, w, turn, after_step=plain.put_back(masks, w))

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        return merged(s, shared, trained, own, lambda name, i: len(s.clients[i].y))

    return plain.play(s, local, begin, merge, own=personal)


def ranked(
    s: Setting, i: int, weights: Weights, score: str, lr: float, order: Tensor, k: tuple[int, int]
) -> Sets:
    """The neurons that a client keeps after one epoch of plain SGD on a copy, from the order of
    that epoch.
    """
    model, client = plain.load(s, weights).train(), s.clients[i]
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for batch in order.split(s.batch_size):
        if len(batch) > 1:
            model.zero_grad()
            F.cross_entropy(model(client.x[batch]), client.y[batch]).backward()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    sums[name] += p.grad
                    p -= lr * p.grad
    kept = []
    for layer, count in zip(("conv.weight", "fc.weight"), k, strict=True):
        values = (sums[layer] if score == "gradient" else model.state_dict()[layer]).flatten(1)
        norm = values.abs().sum(1) if score == "l1" else values.pow(2).sum(1).sqrt()
        kept.append(sorted(norm.argsort(descending=True, stable=True)[:count].tolist()))
    return kept[0], kept[1]


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
        norm = model.norm
        z = F.batch_norm(z / rate, None, None, norm.weight, norm.bias, True, eps=norm.eps)
    return model.classifier(torch.tanh(model.fc(F.avg_pool2d(torch.tanh(z), 2).flatten(1))))


def seen_classes(s: Setting, i: int, is_masked: bool = True) -> Tensor:
    """Which classes the client trains on; all if this plays no part."""
    return (torch.bincount(s.clients[i].y, minlength=5) > 0) | (not is_masked)


def heterofl(s: Setting, method: Any, sets: Choice, rate: Callable, untrained: Choice) -> Result:
    """`rate(round, client)` with the scaler. Rows of the head are averaged over those who have the
    class.
    """
    m, is_masked = method, method.masked

    def local(small: Setting, w: Weights, turn: Turn) -> Weights:
        absent = ~seen_classes(s, turn.i, is_masked)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = scaled(model, x, rate(turn.t, turn.i)) if m.scaler else model(x)
            return F.cross_entropy(logits.masked_fill(absent, 0), y)

        return plain.train(small, w, turn, loss=loss)

    def counts(name: str, i: int) -> Any:
        count = 1.0 if m.weighting == "equal" else len(s.clients[i].y)
        if not name.startswith("classifier"):
            return count
        rows = seen_classes(s, i, is_masked) * count
        return rows[:, None] if name.endswith("weight") else rows

    def judge(small: Setting, weights: Weights, i: int) -> int:
        logits = plain.still(small, weights)(s.clients[i].test_x)
        masked_logits = logits.masked_fill(~seen_classes(s, i, is_masked), 0)
        return plain.count_hits(masked_logits, s.clients[i].test_y)

    values = {"counts": counts, "judge": judge, "untrained": lambda i: untrained(1, i)}
    return play_small(s, sets, local, **values)


def flexfl_levels(
    s: Setting, apoz: tuple[float, float], targets: tuple[float, ...], tolerance: float
) -> list[Sets]:
    """Prefix sets by the search over whole gammas, scalars counted in real networks; nearest if
    none is close.
    """
    sizes = {"conv": 4, "fc": 12}
    scalars = [sum(p.numel() for p in getattr(s.module, name).parameters()) for name in sizes]
    scalars[0] += sum(p.numel() for p in s.module.norm.parameters())
    logs = [math.log(count) / math.log(max(scalars)) for count in scalars]
    worth = [1 - a * log for a, log in zip(apoz, logs, strict=True)]
    whole = sum(p.numel() for p in s.module.parameters())
    kept = []
    for target in targets:
        candidates = []
        for gamma in range(1, 10001) if target < 1 else []:
            shares = [min(max(100 * own / gamma, 0.01), 1.0) for own in worth]
            pairs = zip(shares, sizes.values(), strict=True)
            a, b = (max(1, math.floor(share * size + 1e-9)) for share, size in pairs)
            sets = list(range(a)), list(range(b))
            apart = sum(p.numel() for p in narrow(s.module, sets).parameters()) / whole - target
            candidates.append((abs(apart), sets))
            if abs(apart) <= tolerance:
                candidates = candidates[-1:]
            if apart < 0 or (len(candidates) == 1 and abs(apart) <= tolerance):
                break
        full = (0.0, (list(range(4)), list(range(12))))
        kept.append(min(candidates or [full], key=lambda one: one[0])[1])
    return kept


def flexfl(s: Setting, nested: list[Sets], sent: Any, device: Any, method: Any) -> Result:
    """`sent(round, client)`, `device(client)`: levels, of which the lower one is trained."""

    def level_of(t: int, i: int) -> int:
        return min(sent(t, i), device(i))

    def local(small: Setting, w: Weights, turn: Turn) -> Weights:
        level, heat = level_of(turn.t, turn.i), method.temperature

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            logits = model(x)
            total, hard = F.cross_entropy(logits, y), (logits / heat).log_softmax(1)
            for lower in nested[:level]:
                small = small_setting(s, lower)
                teacher = plain.load(small, cut(model.state_dict(), lower)).train()
                soft = (teacher(x).detach() / heat).softmax(1)
                apart = (soft * (soft.log() - hard)).mean()
                total = total + method.gamma / level * heat**2 * apart
            return total

        return plain.train(small, w, turn, loss=loss)

    sets = lambda t, i: nested[level_of(t, i)]  # noqa: E731
    return play_small(s, sets, local, untrained=lambda i: nested[device(i)])


Arrays = dict[str, np.ndarray]


def match(cost: np.ndarray, mode: str) -> np.ndarray:
    """one: as many pairs as fit, of least cost; balanced: uniform marginals, columns divided by
    their sums. A linear program, whatever the mode.
    """
    s, t = cost.shape
    gives, gets = np.kron(np.eye(s), np.ones(t)), np.kron(np.ones(s), np.eye(t))
    if mode == "balanced":
        rules = {"A_eq": np.concatenate([gives, gets]), "b_eq": [1 / s] * s + [1 / t] * t}
    elif s >= t:
        rules = {"A_ub": gives, "b_ub": [1] * s, "A_eq": gets, "b_eq": [1] * t}
    else:
        rules = {"A_ub": gets, "b_ub": [1] * t, "A_eq": gives, "b_eq": [1] * s}
    plan = linprog(cost.ravel(), **rules).x.reshape(s, t)
    plan[plan < 1e-9] = 0
    return plan / np.where(plan.sum(0) > 0, plan.sum(0), 1)


def match_rows(a: tuple[np.ndarray, np.ndarray], b: Any, mode: str) -> np.ndarray:
    """Match neurons by their weights and biases."""
    one, other = (np.column_stack([w.reshape(len(w), -1), bias]) for w, bias in (a, b))
    return match(np.linalg.norm(one[:, None] - other[None], axis=2), mode)


def align(source: Weights, target: Weights, mode: str) -> tuple[Arrays, Arrays]:
    """The source's values in the target's places, and ones where something arrived."""
    a = {name: value.double().numpy() for name, value in source.items()}
    b = {name: value.double().numpy() for name, value in target.items()}
    first = match_rows(*((own["conv.weight"], own["conv.bias"]) for own in (a, b)), mode)
    units = len(a["fc.bias"])
    inputs = a["fc.weight"].reshape(units, -1, 9)
    inputs = np.einsum("cj,uck->ujk", first, inputs).reshape(units, -1)
    columns = np.repeat(first.sum(0) > 0, 9)
    pairs_of_rows = [(inputs[:, columns], a["fc.bias"]), (b["fc.weight"][:, columns], b["fc.bias"])]
    second = match_rows(*pairs_of_rows, mode)
    out, arrived = {}, {}
    for name in a:
        if name.startswith(("conv", "norm")):
            out[name] = np.einsum("cj,c...->j...", first, a[name])
            reached = (first.sum(0) > 0).reshape(-1, *[1] * (b[name].ndim - 1))
            arrived[name] = np.ones_like(b[name]) * reached
    reached = second.sum(0) > 0
    out |= {"fc.weight": second.T @ inputs, "fc.bias": second.T @ a["fc.bias"]}
    arrived |= {"fc.weight": np.outer(reached, columns), "fc.bias": reached}
    out |= {HEAD[0]: a[HEAD[0]] @ second, HEAD[1]: a[HEAD[1]]}
    arrived |= {HEAD[0]: np.outer(np.ones(5), reached), HEAD[1]: np.ones(5)}
    return out, arrived


def in_front(source: Weights, target: Weights) -> tuple[Arrays, Arrays]:
    """The source's values in the first places, and ones there."""
    out = {name: np.zeros(value.shape) for name, value in target.items()}
    arrived = {name: np.zeros(value.shape) for name, value in target.items()}
    for name, value in source.items():
        place = tuple(slice(size) for size in value.shape)
        out[name][place], arrived[name][place] = value.double().numpy(), 1
    return out, arrived


def subflot(s: Setting, first: Choice, rate: Callable[[int], float], method: Any) -> Result:
    """`first(round, client)`: the neurons that a new client begins with. `counts`: how many
    extractions were not those of the client's own positions.
    """
    m, result, history = method, Result(), dict[int, Weights]()
    sets, personal = dict[int, Sets](), s.each(s.initial)
    names = [name for name in s.initial if name not in statistics(s.initial)]

    def extract(shared: Weights, i: int) -> Weights:
        leading = list(range(len(sets[i][0]))), list(range(len(sets[i][1])))
        extracted = {name: value.double().numpy() for name, value in cut(shared, leading).items()}
        if m.otp:
            extracted, _ = align(shared, history[i], m.mode)
        by_place = cut(shared, sets[i])
        apart = [np.abs(extracted[name] - by_place[name].numpy()).max() for name in extracted]
        result.counts += [1] * int(max(apart) > 1e-4)
        old = {name: value.double().numpy() for name, value in history[i].items()}
        mixed = {name: m.alpha * extracted[name] + (1 - m.alpha) * old[name] for name in old}
        return {name: torch.from_numpy(value).float() for name, value in mixed.items()}

    def begin(turn: Turn) -> tuple[Setting, Weights]:
        i = turn.i
        if i not in history:
            sets[i] = first(turn.t, i)
        starts = extract(turn.shared, i) if i in history else cut(turn.shared, sets[i])
        return small_setting(s, sets[i]), starts | cut(statistics(personal[i]), sets[i])

    def local(starts: tuple[Setting, Weights], turn: Turn) -> tuple[Setting, Weights]:
        i, (small, w) = turn.i, starts
        end = plain.train(small, w, turn, anchor=w, lam=2 * m.lam * rate(i))
        personal[i] = grown(end, sets[i], {**zeros(s), **statistics(personal[i])})
        return small, end

    def merge(shared: Weights, trained: dict[int, Any], t: int) -> Weights:
        total, weight = in_front({}, shared)
        for i, (_, end) in trained.items():
            history[i] = {name: end[name] for name in names}
            aligned = align(history[i], shared, m.mode) if m.ota else in_front(history[i], shared)
            for name in shared:
                count = len(s.clients[i].y) * aligned[1][name]
                total[name] += count * aligned[0][name]
                weight[name] += count
        new = {k: total[k] / np.maximum(weight[k], 1) for k in shared}
        pairs = {k: np.where(weight[k] > 0, new[k], shared[k].double().numpy()) for k in shared}
        return {k: torch.from_numpy(value).float() for k, value in pairs.items()}

    return plain.play(
        s,
        local,
        begin,
        merge,
        personal=lambda turn: dict(personal[turn.i]),
        judge=lambda it, i: plain.hits(*it, i),
        shared={name: s.initial[name] for name in names},
        result=result,
    )
