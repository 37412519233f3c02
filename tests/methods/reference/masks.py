"""Methods whose clients keep entries of their own.

Sources: arXiv:2604.16574 (FedOBP, whose clients choose q as the docstring has it), NeurIPS 2023,
vol. 36, pages 72181-72192 (FedDPA), 2404.02478 (FedSelect), update-magnitude personalisation, IEEE
Transactions on Mobile Computing, 2025 (SeqFedEDT), 2510.16065 (FedPURIN), 2309.11103 (FedCAC).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference import plain
from tests.methods.reference.plain import HEAD, Order, Result, Setting, Turn, Weights

Masks = dict[str, Tensor]


def ranked(scores: Weights) -> np.ndarray:
    return np.sort(np.concatenate([leaf.numpy().ravel() for leaf in scores.values()]))


def above_quantile(scores: Weights, q: float, result: Result) -> Masks:
    """Whose score is above the interpolated quantile. Notes how many, and how clearly."""
    order = ranked(scores)
    threshold = np.quantile(order, q, method="linear")
    above, below = order[order > threshold], order[order <= threshold]
    result.counts.append(len(above))
    if len(above):
        result.margins.append(float((above[0] - below[-1]) / above[0]))
    return {k: leaf > threshold for k, leaf in scores.items()}


def where(masks: Masks, own: Weights, other: Weights) -> Weights:
    return {k: torch.where(mask, own[k], other[k]) for k, mask in masks.items()}


def no_masks(s: Setting) -> Masks:
    return {k: torch.zeros_like(s.initial[k], dtype=torch.bool) for k in s.names}


def fedobp(s: Setting, method: Any) -> Result:
    """Eqs. 7 to 9 and 19; the average of the scores moves when a client takes part."""
    m, result, own, past = method, Result(), s.each(s.initial), {}
    starts: dict[int, Weights] = {}
    scored = [k for k in s.names if k in HEAD or not m.classifier_only]

    def scores_of(turn: Turn) -> Weights:
        scores = {}
        for k in scored:
            distance = (own[turn.i][k] - turn.shared[k]).double()
            worth = distance if m.score == "obp" else own[turn.i][k].double()
            now = (distance * worth).abs()
            if m.score == "gradient":  # with cold_start=initial
                start = starts.get(turn.i, turn.shared)
                now = (own[turn.i][k] - start[k]).double().abs()
            scores[k] = (1 - m.ema) * now + m.ema * past.get(turn.i, {}).get(k, now)
        return scores

    def mix(turn: Turn) -> Weights:
        """Keep the client's entries whose score is above the quantile."""
        scores, masks = scores_of(turn), {}
        for group in [scored] if m.scope == "all" else [[k] for k in scored]:
            masks |= above_quantile({k: scores[k] for k in group}, m.q, result)
        return {**turn.shared, **where(masks, own[turn.i], turn.shared)}

    def begin(turn: Turn) -> Weights:
        start, past[turn.i] = mix(turn), scores_of(turn)
        starts[turn.i] = start
        return start

    def extras(_: Any) -> dict[str, Weights]:
        return {"own": plain.stack({k: w[k] for k in scored} for w in own.values())}

    return plain.play(s, None, begin, personal=mix, extras=extras, result=result, own=own)


def fedobp_choosing(s: Setting, method: Any) -> Result:
    """Nan is what a client does not receive. `margins`: between losses; `extras`: who chose what."""
    result, own, chosen, several = Result(), s.each(s.initial), {}, method.q
    entries = sum(leaf.numel() for leaf in s.initial.values())
    rank = {q: int(np.floor(q * (entries - 1) + 1e-9)) for q in several}

    def scores_of(i: int, other: Weights) -> Weights:
        return {k: (own[i][k] - other[k]).double() ** 2 for k in other}

    def begin(turn: Turn) -> Weights:
        """Step 1, at the server; then the client, which has only what it received."""
        i, client, best = turn.i, s.clients[turn.i], None
        scores = scores_of(i, turn.shared)
        threshold = ranked(scores)[rank[max(several)]]
        downloaded = {
            k: torch.where(scores[k] > threshold, torch.nan, v) for k, v in turn.shared.items()
        }
        scores = {k: v.nan_to_num(nan=torch.inf) for k, v in scores_of(i, downloaded).items()}
        order = ranked(scores)
        for q in sorted(several, reverse=True):
            personal_mask = {
                k: (scores[k] > order[rank[q]]) | downloaded[k].isnan() for k in downloaded
            }
            model = where(personal_mask, own[i], downloaded)
            logits = plain.still(s, model)(client.held_x).double()
            right = plain.count_hits(logits, client.held_y)
            loss = float(F.cross_entropy(logits, client.held_y, reduction="sum"))
            is_tie = best is not None and right == best[0]
            if is_tie and any((model[k] != best[2][k]).any() for k in downloaded):
                result.margins += [abs(loss - best[1])] * min(1, len(client.held_y))
            if best is None or (right, -loss) > (best[0], -best[1]):
                best = right, loss, model, q
        chosen[i] = best[3]
        return best[2]

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        now = torch.tensor([chosen[i] for i in trained], dtype=torch.double)
        shares = [float((now == q).double().mean()) for q in several]
        result.extras.append({"q": now, "shares": torch.tensor(shares)})
        return plain.average(s, trained)

    return plain.play(s, None, begin, merge, begin, result=result, own=own)


def fisher(s: Setting, weights: Weights, i: int, size: int = 1) -> Weights:
    """Mean squared gradients, of so many samples at once."""
    model, client = plain.load(s, weights).eval(), s.clients[i]
    total = {k: torch.zeros_like(p) for k, p in model.named_parameters()}
    batches = list(zip(client.x.split(size), client.y.split(size), strict=True))
    for x, y in batches:
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for k, g in zip(total, slopes, strict=True):
            total[k] += g**2 / len(batches)
    return total


def feddpa(s: Setting, method: Any, order: Order) -> Result:
    """By its values, in two phases; `order`: of the personal one."""
    m, result, own, scores = method, Result(), s.each(s.initial), {}

    def choose(i: int) -> Masks:
        masks = no_masks(s)
        for k, score in scores.get(i, {}).items():
            f = score.double().numpy()
            f = (f - f.min()) / (f.max() - f.min())
            result.margins.append(float(np.abs(f - m.threshold).min()))
            masks[k] = torch.from_numpy(f > m.threshold)
        return masks

    def train_masked(
        w: Weights, turn: Turn, masks: Masks, penalty: Callable, own: Setting
    ) -> Weights:
        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            pairs = [(p, turn.shared[k]) for k, p in model.named_parameters()]
            distance = [torch.linalg.vector_norm(p - b) for p, b in pairs if (p != b).any()]
            return F.cross_entropy(model(x), y) + penalty(sum(distance, torch.zeros(())))

        return plain.train(own, w, turn, loss=loss, after_step=plain.put_back(masks, w))

    def begin(turn: Turn) -> Weights:
        return where(choose(turn.i), own[turn.i], turn.shared)

    def local(w: Weights, turn: Turn) -> Weights:
        i, masks, other = turn.i, choose(turn.i), plain.replace(s, order=order)
        shared = {k: ~mask for k, mask in masks.items()}
        w = train_masked(w, turn, masks, lambda d: m.lam1 / 2 * d, other)
        w = train_masked(w, turn, shared, lambda d: m.lam2 / 2 * abs(d - m.clip), s)
        own[i], scores[i] = w, fisher(s, w, i)
        return w

    return plain.play(s, local, begin, result=result)


def sparse_mean(s: Setting, shared: Weights, models: list, masks: list, share: list) -> Weights:
    """Entry by entry over the models whose mask is false there."""
    pairs = list(zip(masks, share, strict=True))
    counts = [{k: part * (~mask[k]).double() for k in s.names} for mask, part in pairs]
    return plain.mean_by_entry(shared, models, counts)


def fedselect(s: Setting, method: Any, order: Order) -> Result:
    """`order`: of personal passes."""
    m, result, none = method, Result(), no_masks(s)
    kept_models, trained_models, reference = s.each(s.initial), s.each(s.initial), s.each(s.initial)
    played, masks, old_masks = s.each(0), s.each(none), {}

    def alternate(weights: Weights, masks: Masks, turn: Turn) -> Weights:
        """Two optimizers, of which each is made to leave the other's entries and their momentum
        alone.
        """
        model = plain.load(s, weights).train()
        inverse = {k: ~mask for k, mask in masks.items()}
        passes = [(order, masks, m.lr_v or s.lr), (s.order, inverse, m.lr_u or s.lr)]
        values = {"momentum": s.momentum, "weight_decay": s.weight_decay}
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr, **values) for *_, lr in passes]
        for epoch in range(s.epochs):
            for (dealt, moving_masks, _), optimizer in zip(passes, optimizers, strict=True):
                if not any(mask.any() for mask in moving_masks.values()):
                    continue
                after_step = plain.put_back(moving_masks, plain.values_of(model))
                for x, y in plain.minibatches(plain.replace(s, order=dealt), turn, [epoch]):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    with torch.no_grad():
                        after_step(model, optimizer)
        return plain.values_of(model)

    def grow(masks: Masks, moved: Weights) -> Masks:
        new, weights = dict(masks), [k for k in s.names if k.endswith(".weight")]
        for group in [weights] if m.scope == "all" else [[k] for k in weights]:
            mask = torch.cat([masks[k].flatten() for k in group]).numpy()
            distance = torch.cat([moved[k].flatten() for k in group]).numpy()
            if mask.mean() >= m.alpha:
                continue
            free = np.flatnonzero(~mask)
            count = len(free) - round((1 - m.p) * len(free))
            worth = -distance if m.personalise == "least" else distance
            first = free[np.argsort(-worth[free], kind="stable")]
            if 0 < count < len(free) and distance.any():
                result.margins.append(float(worth[first[count - 1]] - worth[first[count]]))
            mask[first[:count]] = True
            result.counts.append(int(mask.sum()))
            pieces = torch.from_numpy(mask).split([masks[k].numel() for k in group])
            new |= {k: own.view_as(masks[k]) for k, own in zip(group, pieces, strict=True)}
        return new

    def begin(turn: Turn) -> Weights:
        """Statistics are the client's."""
        return {**kept_models[turn.i], **where(masks[turn.i], kept_models[turn.i], turn.shared)}

    def local(w: Weights, turn: Turn) -> Weights:
        i, old_masks[turn.i] = turn.i, masks[turn.i]
        end = alternate(w, masks[i], turn)
        is_round = m.delta == "round"
        reference_model = w if is_round else reference[i]
        if is_round or (played[i] > 0 and played[i] % m.every == 0):
            masks[i] = grow(masks[i], {k: (end[k] - reference_model[k]).abs() for k in s.names})
            reference[i] = end
        played[i] += 1
        return end

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        models = list(trained.values())
        new = sparse_mean(s, shared, models, [old_masks[i] for i in trained], [1.0] * len(models))
        for i, end in trained.items():
            kept_models[i] = {**end, **where(old_masks[i], end, new)}
        return new

    return plain.play(s, local, begin, merge, result=result, own=trained_models)


def pspfl(s: Setting, method: Any) -> Result:
    result, own, before, masks = Result(), {}, s.each(s.initial), {}

    def begin(turn: Turn) -> Weights:
        i, masks[turn.i] = turn.i, no_masks(s)
        last = own.get(i, s.initial)
        if i in own:
            moved = {k: (last[k] - before[i][k]).abs() for k in s.names}
            masks[i] = above_quantile(moved, method.q, result)
        before[i] = {**last, **where(masks[i], last, turn.shared)}
        return before[i]

    def merge(shared: Weights, trained: dict[int, Weights], t: int) -> Weights:
        nothing = [no_masks(s)] * len(trained)
        frozen = [masks[i] for i in trained] if method.upload == "shared" else nothing
        samples = [float(len(s.clients[i].y)) for i in trained]
        return sparse_mean(s, shared, list(trained.values()), frozen, samples)

    def personal(turn: Turn) -> Weights:
        shared = {k: turn.shared[k] for k in s.names}
        return own.get(turn.i, {**s.initial, **shared})

    return plain.play(s, None, begin, merge, personal, result=result, own=own)


def seqfededt(s: Setting, method: Any, turns: Callable[[int, int], list[int]]) -> Result:
    """turns: `turns(round, clients)`, the places of a cohort in their order."""
    result, own = Result(), dict[int, Weights]()
    scored = [k for k in s.names if k in HEAD or not method.classifier_only]

    def begin(turn: Turn) -> Weights:
        """Statistics are the client's."""
        scores, old = {}, own.get(turn.i, s.initial)
        for k in scored:
            w, last = turn.shared[k].double(), old[k].double()
            distance = (w - last) ** 2 if method.score == "squared" else abs(w - last)
            scores[k] = abs(last) * distance if method.score == "importance" else distance
        masks = above_quantile(scores, method.q, result)
        return {**old, **turn.shared, **where(masks, old, turn.shared)}

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        (end,) = trained.values()
        return plain.pick(end, lambda name: name in s.names)

    return plain.play(
        s,
        None,
        begin,
        merge,
        personal=lambda turn: own.get(turn.i, {**s.initial, **turn.shared}),
        own=own,
        shared=plain.pick(s.initial, lambda name: name in s.names),
        groups=lambda t, cohort: [[cohort[place]] for place in turns(t, len(cohort))],
        result=result,
    )


def highest(score: Tensor, tau: float, eps: float, margins: list[float]) -> Tensor:
    """One tensor's mask, from its sorted scores."""
    ordered = sorted(score.flatten().tolist(), reverse=True)
    q = int(tau * len(ordered) + 1e-9)
    if q == 0:
        return torch.zeros(score.shape, dtype=torch.bool)
    h = ordered[q - 1]
    if h <= eps and any(value > eps for value in ordered):
        h = min(value for value in ordered if value > eps)
    below = [value for value in ordered if value < h]
    if below:
        margins.append((h - below[0]) / h)
    return score >= h


def fedpurin(s: Setting, method: Any) -> Result:
    """FedPURIN and FedCAC. `extras`: how many collaborate with each of the cohort, and how many
    entries are critical.
    """
    m, is_cac = method, not hasattr(method, "hessian")
    has_all = is_cac or m.include_norm
    names = [name for name in s.names if has_all or not name.startswith("norm")]
    is_delta, has_hessian = is_cac or m.score == "delta", not is_cac and m.hessian
    is_dense = is_cac or m.judge == "dense"
    result, model, judged = Result(), s.each(s.initial), s.each(s.initial)
    reply, mask = s.each(s.initial), s.each(no_masks(s))

    def begin(turn: Turn) -> Weights:
        i = turn.i
        mixed = {k: torch.where(mask[i][k], reply[i][k], turn.shared[k]) for k in names}
        return {**model[i], **mixed}

    def local(w: Weights, turn: Turn) -> Weights:
        i, last = turn.i, {k: torch.zeros_like(w[k]) for k in s.names}

        def keep_gradient(module: nn.Module) -> None:
            last.update({k: p.grad.clone() for k, p in module.named_parameters()})

        model[i] = end = plain.train(s, w, turn, after_gradient=keep_gradient)
        for k in names:
            product = (end[k] - w[k] if is_delta else last[k]) * end[k]
            worth = -product + product**2 / 2 if has_hessian else product
            mask[i][k] = highest(worth.abs(), m.tau, m.cutoff, result.margins)
        sparse = {k: end[k] * mask[i][k] for k in names}
        judged[i] = end if is_dense else {**end, **sparse}
        return {k: end[k] for k in names} if is_cac else sparse

    def merge(_: Any, trained: dict[int, Weights], t: int) -> Weights:
        bits = {i: torch.cat([mask[i][k].flatten() for k in names]).double() for i in trained}
        overlap = {}
        for i, j in ((i, j) for i in trained for j in trained if i != j):
            size, distance = float(bits[i].sum()), float((bits[i] - bits[j]).abs().sum())
            overlap[i, j] = 1 - distance / (2 * size) if size else 0.0
        middle, most = sum(overlap.values()) / len(overlap), max(overlap.values())
        threshold, partners = middle + t / m.beta * (most - middle), []
        if t != m.beta:
            near = min(abs(value - threshold) for value in overlap.values()) / most
            result.margins.append(1.0 if near > 1e-9 else 0.0)
        for i in trained:
            group = [j for j in trained if j == i or overlap[i, j] >= threshold - 1e-12]
            partners.append(len(group) - 1)
            reply[i] = plain.mean(trained[j] for j in group)
        counts = [int(own.sum()) for own in bits.values()]
        result.extras.append({"partners": torch.tensor(partners), "counts": torch.tensor(counts)})
        return plain.average(s, trained)

    personal = lambda turn: judged[turn.i]  # noqa: E731
    after = lambda i, _: judged[i]  # noqa: E731
    return plain.play(s, local, begin, merge, personal, after, result=result)
