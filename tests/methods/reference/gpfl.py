"""GPFL as plain loops over clients (arXiv:2308.10279): the valve and the embeddings are torch
modules.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.heads import HEAD, features, load, minibatches, own_head, score
from tests.methods.reference.plain import Result, Setting, Weights


class Extra(nn.Module):
    """The conditional valve and the class embeddings."""

    def __init__(self, classes: int, width: int):
        super().__init__()
        self.embeddings = nn.Embedding(classes, width)
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))

    def valve(self, z: Tensor, condition: Tensor) -> Tensor:
        return torch.relu(z * (self.gamma(condition) + 1) + self.beta(condition))


def average(s: Setting, cohort: list[int], uploads: list[Weights]) -> Weights:
    sizes = [len(s.clients[i].y) for i in cohort]
    return {
        k: sum(n / sum(sizes) * u[k].double() for n, u in zip(sizes, uploads, strict=True)).float()
        for k in uploads[0]
    }


def gpfl(
    s: Setting, extra: Weights, lam: float, mu: float, guidance: str, classes: int
) -> tuple[list[Weights], list[Weights], list[list[Weights]], list[list[Tensor]], Result]:
    """`extra`: initial values of Extra. After each round: body, extra, heads, every client's logits
    on test images.
    """
    result, shared, heads = Result(), s.initial, [own_head(s.initial) for _ in s.clients]
    width = extra["embeddings.weight"].shape[1]
    share = [torch.stack([(c.y == k).float().mean() for k in range(classes)]) for c in s.clients]
    bodies, extras, kept, logits = [], [], [], []

    def module(values: Weights) -> Extra:
        made = Extra(classes, width)
        made.load_state_dict(values)
        return made

    def told(weights: Weights, values: Weights, condition: Tensor, i: int) -> Tensor:
        model, more = load(s, weights).eval(), module(values)
        with torch.no_grad():
            return model.classifier(more.valve(features(model, s.clients[i].test_x), condition))

    for t, cohort in enumerate(s.cohorts, 1):
        frozen = extra["embeddings.weight"].clone()
        common = frozen.mean(0)
        own = {i: sum(a * row for a, row in zip(share[i], frozen, strict=True)) for i in cohort}
        before = [told({**shared, **heads[i]}, extra, own[i], i) for i in cohort]
        result.before.append(
            [score(out, s.clients[i].test_y) for i, out in zip(cohort, before, strict=True)]
        )
        trained, more = [], []
        for i in cohort:
            model, valve = load(s, {**shared, **heads[i]}).train(), module(extra)
            settings = {"lr": s.lr, "momentum": s.momentum}
            optimizers = [
                torch.optim.SGD(model.parameters(), weight_decay=s.weight_decay, **settings),
                torch.optim.SGD(valve.parameters(), weight_decay=s.weight_decay + mu, **settings),
            ]
            for x, y in minibatches(s, t, i, range(s.epochs)):
                z = features(model, x)
                personal, generic = valve.valve(z, own[i]), valve.valve(z, common)
                cosines = torch.stack(
                    [
                        F.cosine_similarity(generic, row.expand_as(generic))
                        for row in valve.embeddings.weight
                    ],
                    1,
                )
                apart = generic - frozen[y]
                far = (
                    torch.linalg.norm(apart)
                    if guidance == "frobenius"
                    else torch.linalg.norm(apart, dim=1).mean()
                )
                loss = (
                    F.cross_entropy(model.classifier(personal), y)
                    + F.cross_entropy(cosines, y)
                    + lam * far
                )
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            trained.append(copy.deepcopy(model.state_dict()))
            more.append(copy.deepcopy(valve.state_dict()))
        after = [told(w, e, own[i], i) for i, w, e in zip(cohort, trained, more, strict=True)]
        result.after.append(
            [score(out, s.clients[i].test_y) for i, out in zip(cohort, after, strict=True)]
        )
        for i, w in zip(cohort, trained, strict=True):
            heads[i] = {k: w[k] for k in HEAD}
        shared, extra = average(s, cohort, trained), average(s, cohort, more)
        bodies.append({k: v for k, v in shared.items() if k not in HEAD})
        extras.append(extra)
        kept.append(list(heads))
        now = [share[i] @ extra["embeddings.weight"] for i in range(len(s.clients))]
        logits.append(
            [told({**shared, **heads[i]}, extra, now[i], i) for i in range(len(s.clients))]
        )
    return bodies, extras, kept, logits, result
