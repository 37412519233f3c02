"""FedALA's rounds as plain loops (arXiv:2212.01197)."""

import statistics

import torch
import torch.nn.functional as F

from tests.methods.reference.plain import Result, Setting, Weights, average, hits, load, train


def learn(
    s: Setting,
    shared: Weights,
    own: Weights,
    weights: Weights,
    first: bool,
    i: int,
    order,
    share,
    eta,
    top,
):
    """The weights after learning; `order`: of the client's samples."""
    client = s.clients[i]
    chosen = order[: int(share * len(order))]
    batches = [b for b in chosen.split(s.batch_size) if len(b) > 1]
    losses: list[float] = []
    weights = {k: v.clone() for k, v in weights.items()}
    if not batches:
        return weights, False
    while len(losses) < 100:
        for batch in batches:
            model = load(
                s, {**shared, **{k: own[k] + (shared[k] - own[k]) * weights[k] for k in top}}
            ).eval()
            loss = F.cross_entropy(model(client.x[batch]), client.y[batch])
            loss.backward()
            for k, p in model.named_parameters():
                if k in top:
                    weights[k] = torch.clamp(weights[k] - eta * p.grad * (shared[k] - own[k]), 0, 1)
        losses.append(loss.item())
        if not first or (len(losses) > 10 and statistics.pstdev(losses[-10:]) < 0.1):
            break
    return weights, True


def fedala(s: Setting, layers: tuple[str, ...], share: float, eta: float, draw, adapt) -> Result:
    """`layers`: prefixes of the top. `draw(t, i)`, `adapt(t, i)`: orders of the samples, in round t
    and after it.
    """
    result, shared = Result(), s.initial
    top = [k for k in shared if k.startswith(layers)]
    own: dict[int, Weights] = {}
    weights = [{k: torch.ones_like(shared[k]) for k in top} for _ in s.clients]
    settled = [False for _ in s.clients]

    def merged(i: int, order) -> tuple[Weights, Weights, bool]:
        if i not in own:
            return shared, weights[i], False
        new, done = learn(s, shared, own[i], weights[i], not settled[i], i, order, share, eta, top)
        start = {**shared, **{k: own[i][k] + (shared[k] - own[i][k]) * new[k] for k in top}}
        return start, new, done

    for t, cohort in enumerate(s.cohorts, 1):
        starts = {}
        for i in cohort:
            starts[i], weights[i], done = merged(i, draw(t, i))
            settled[i] = settled[i] or done
        result.before.append([hits(s, starts[i], i) for i in cohort])
        trained = [train(s, starts[i], t, i) for i in cohort]
        result.after.append([hits(s, w, i) for i, w in zip(cohort, trained, strict=True)])
        own |= dict(zip(cohort, trained, strict=True))
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([merged(i, adapt(t, i))[0] for i in range(len(s.clients))])
    return result
