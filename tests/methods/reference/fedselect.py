"""FedSelect's rounds as plain loops (arXiv:2404.02478), and update-magnitude personalisation's."""

import copy
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, hits, load, train

Masks = dict[str, np.ndarray]


def names(s: Setting) -> list[str]:
    return [name for name, _ in s.module.named_parameters()]


def alternate(
    s: Setting, weights: Weights, masks: Masks, t: int, i: int, personal_order, lr_v, lr_u
) -> Weights:
    """LocalAlt: two optimizers, of which each is made to leave the other's entries and their
    momentum alone.
    """
    model = load(s, weights).train()
    client = s.clients[i]
    passes = [
        (personal_order, {k: torch.from_numpy(masks[k]) for k in names(s)}, lr_v),
        (s.order, {k: torch.from_numpy(~masks[k]) for k in names(s)}, lr_u),
    ]
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=lr, momentum=s.momentum, weight_decay=s.weight_decay)
        for _, _, lr in passes
    ]
    for epoch in range(s.epochs):
        for (order, moving, _), optimizer in zip(passes, optimizers, strict=True):
            if not any(m.any() for m in moving.values()):
                continue
            for batch in order(t, i, epoch, len(client.y)).split(s.batch_size):
                if len(batch) == 1:
                    continue
                held = {k: p.detach().clone() for k, p in model.named_parameters()}
                optimizer.zero_grad()
                F.cross_entropy(model(client.x[batch]), client.y[batch]).backward()
                optimizer.step()
                with torch.no_grad():
                    for k, p in model.named_parameters():
                        p.copy_(torch.where(moving[k], p, held[k]))
                        optimizer.state[p]["momentum_buffer"] *= moving[k]
    return copy.deepcopy(model.state_dict())


def grown(
    s: Setting, result: Result, masks: Masks, distance: dict, p: float, alpha: float, scope: str
) -> Masks:
    """The next masks. `distance`: how far each entry of each weight moved."""
    new = {k: m.copy() for k, m in masks.items()}
    weights = [k for k in names(s) if k.endswith(".weight")]
    for group in [weights] if scope == "all" else [[k] for k in weights]:
        mask = np.concatenate([masks[k].ravel() for k in group])
        moved = np.concatenate([distance[k].ravel() for k in group])
        if mask.mean() >= alpha:
            continue
        free = np.flatnonzero(~mask)
        count = len(free) - round((1 - p) * len(free))
        ranked = free[np.argsort(-moved[free], kind="stable")]
        if 0 < count < len(free) and moved.any():
            result.margins.append(float(moved[ranked[count - 1]] - moved[ranked[count]]))
        mask[ranked[:count]] = True
        result.counts.append(int(mask.sum()))
        at = 0
        for k in group:
            new[k] = mask[at : at + new[k].size].reshape(new[k].shape)
            at += new[k].size
    return new


def mean(
    s: Setting, shared: Weights, models: list[Weights], masks: list[Masks], share: list[float]
) -> Weights:
    """Entry by entry over the models whose mask is false there."""
    merged = {}
    for k in names(s):
        total, weight = np.zeros(shared[k].shape), np.zeros(shared[k].shape)
        for model, mask, part in zip(models, masks, share, strict=True):
            total += np.where(mask[k], 0.0, part * model[k].double().numpy())
            weight += np.where(mask[k], 0.0, part)
        value = np.where(
            weight > 0, total / np.where(weight > 0, weight, 1.0), shared[k].double().numpy()
        )
        merged[k] = torch.from_numpy(value).float()
    return {**shared, **merged}


def fedselect(
    s: Setting,
    personal_order: Callable,
    p: float,
    alpha: float,
    delta: str = "round",
    every: int = 3,
    scope: str = "tensor",
    lr_v: float | None = None,
    lr_u: float | None = None,
) -> Result:
    result, shared = Result(), s.initial
    none = {k: np.zeros(v.shape, dtype=bool) for k, v in s.initial.items()}
    kept, judged = [s.initial for _ in s.clients], [s.initial for _ in s.clients]
    reference, played = [s.initial for _ in s.clients], [0 for _ in s.clients]
    masks = [none for _ in s.clients]

    def start(i: int) -> Weights:
        own = {
            k: torch.where(torch.from_numpy(masks[i][k]), kept[i][k], shared[k]) for k in names(s)
        }
        return {**kept[i], **own}  # whose statistics are the client's

    for t, cohort in enumerate(s.cohorts, 1):
        starts = {i: start(i) for i in cohort}
        result.before.append([hits(s, starts[i], i) for i in cohort])
        old = {i: masks[i] for i in cohort}
        for i in cohort:
            end = judged[i] = alternate(
                s, starts[i], masks[i], t, i, personal_order, lr_v or s.lr, lr_u or s.lr
            )
            since = starts[i] if delta == "round" else reference[i]
            distance = {k: (end[k] - since[k]).abs().numpy() for k in names(s)}
            if delta == "round" or (played[i] > 0 and played[i] % every == 0):
                masks[i] = grown(s, result, masks[i], distance, p, alpha, scope)
                reference[i] = end
            played[i] += 1
        result.after.append([hits(s, judged[i], i) for i in cohort])
        shared = mean(
            s, shared, [judged[i] for i in cohort], [old[i] for i in cohort], [1.0] * len(cohort)
        )
        for i in cohort:
            mixed = {
                k: torch.where(torch.from_numpy(old[i][k]), judged[i][k], shared[k])
                for k in names(s)
            }
            kept[i] = {**judged[i], **mixed}
        result.shared.append({k: shared[k] for k in names(s)})
        result.personal.append(list(judged))
    return result


def pspfl(s: Setting, q: float, upload: str) -> Result:
    result, shared = Result(), s.initial
    own: list[Weights | None] = [None for _ in s.clients]
    before = [s.initial for _ in s.clients]
    statistics = [{k: v for k, v in s.initial.items() if k not in names(s)} for _ in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        masks, hit = [], []
        for i in cohort:
            mask = {k: np.zeros(shared[k].shape, dtype=bool) for k in names(s)}
            last = own[i]
            if last is not None:
                moved = {k: (last[k] - before[i][k]).abs().numpy() for k in names(s)}
                everything = np.sort(np.concatenate([m.ravel() for m in moved.values()]))
                at = int(np.floor(q * (len(everything) - 1)))
                mask = {k: m > everything[at] for k, m in moved.items()}
                if everything.any():
                    result.margins.append(float(everything[at + 1] - everything[at]))
                result.counts.append(int(sum(m.sum() for m in mask.values())))
            masks.append(mask)
            start = {
                k: torch.where(torch.from_numpy(mask[k]), (last or shared)[k], shared[k])
                for k in names(s)
            }
            before[i] = {**start, **statistics[i]}
            hit.append(hits(s, before[i], i))
        result.before.append(hit)
        trained = [train(s, before[i], t, i) for i in cohort]
        for i, end in zip(cohort, trained, strict=True):
            own[i], statistics[i] = end, {k: end[k] for k in statistics[i]}
        result.after.append([hits(s, end, i) for i, end in zip(cohort, trained, strict=True)])
        nothing = [{k: np.zeros(shared[k].shape, dtype=bool) for k in names(s)}] * len(cohort)
        samples = [float(len(s.clients[i].y)) for i in cohort]
        shared = mean(s, shared, trained, masks if upload == "shared" else nothing, samples)
        result.shared.append({k: shared[k] for k in names(s)})
        result.personal.append(
            [last or {**shared, **stats} for last, stats in zip(own, statistics, strict=True)]
        )
    return result
