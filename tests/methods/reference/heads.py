"""Methods with heads of each client's own, as plain loops over clients.

Sources: arXiv:2107.00778 (FedRoD), arXiv:2406.04596 (FLUTE), arXiv:2306.11867 (FedPAC).
"""

import copy
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.methods.reference.plain import (
    Result,
    Setting,
    Weights,
    average,
    load,
    minibatches,
    train,
)

HEAD = ("classifier.weight", "classifier.bias")


def features(model, x: Tensor) -> Tensor:
    x = F.avg_pool2d(torch.tanh(model.norm(model.conv(x))), 2)
    return torch.tanh(model.fc(x.flatten(1)))


def sgd(s: Setting, parameters, lr: float | None = None):
    lr = s.lr if lr is None else lr
    return torch.optim.SGD(parameters, lr=lr, momentum=s.momentum, weight_decay=s.weight_decay)


def own_head(weights: Weights) -> Weights:
    return {k: weights[k].clone() for k in HEAD}


def score(logits: Tensor, y: Tensor) -> int:
    return int((logits.argmax(1) == y).sum())


def fedrod(s: Setting, gamma: float, classes: int) -> tuple[Result, list[list[Weights]]]:
    """And every client's personal head after each round; {} until it was trained."""
    result, shared, kept = Result(), s.initial, []
    heads: list[Weights] = [{} for _ in s.clients]

    def hits(weights: Weights, head: Weights, i: int) -> int:
        model = load(s, weights).eval()
        with torch.no_grad():
            z = features(model, s.clients[i].test_x)
            logits = model.classifier(z)
            if head:
                logits = logits + z @ head["classifier.weight"].T + head["classifier.bias"]
        return score(logits, s.clients[i].test_y)

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(shared, heads[i], i) for i in cohort])
        trained = []
        for i in cohort:
            model, extra = load(s, shared), torch.nn.Linear(12, classes)
            model.train()
            extra.load_state_dict(
                {k.split(".")[1]: v for k, v in (heads[i] or own_head(s.initial)).items()}
            )
            generic, personal = sgd(s, model.parameters()), sgd(s, extra.parameters())
            counts = torch.tensor([float((s.clients[i].y == c).sum()) for c in range(classes)])
            steps = 0
            for x, y in minibatches(s, t, i, range(s.epochs)):
                z = features(model, x)
                logits = model.classifier(z)
                weights = counts**gamma
                # -sum log of n^gamma e^logit over its sum, written out
                exponentials = weights * logits.exp()
                loss = -(exponentials[range(len(y)), y] / exponentials.sum(1)).log().mean()
                generic.zero_grad()
                loss.backward()
                both = logits.detach() + extra(z.detach())
                personal.zero_grad()
                F.cross_entropy(both, y).backward()
                generic.step()
                personal.step()
                steps += 1
            if steps:
                heads[i] = {f"classifier.{k}": v.clone() for k, v in extra.state_dict().items()}
            trained.append(copy.deepcopy(model.state_dict()))
        result.after.append([hits(w, heads[i], i) for i, w in zip(cohort, trained, strict=True)])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([])
        kept.append(list(heads))
    return result, kept


def collapse(weight: Tensor, present: Tensor) -> Tensor:
    c = len(weight)
    gram = weight @ weight.T
    u = present.float()
    target = (torch.eye(c) - torch.ones(c, c) / c) / (c - 1) ** 0.5 * torch.outer(u, u)
    return torch.linalg.norm(gram / torch.linalg.norm(gram) - target)


def flute(
    s: Setting, l1: float, l2: float, l3: float, server_lr: float, rep_epochs: int, classes: int
) -> Result:
    result = Result()
    shared = {k: v for k, v in s.initial.items() if k not in HEAD}
    heads = [own_head(s.initial) for _ in s.clients]
    present = [
        torch.tensor([bool((client.y == c).any()) for c in range(classes)]) for client in s.clients
    ]

    def hits(weights: Weights, i: int) -> int:
        with torch.no_grad():
            return score(load(s, weights).eval()(s.clients[i].test_x), s.clients[i].test_y)

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits({**shared, **heads[i]}, i) for i in cohort])
        trained = []
        for i in cohort:
            model = load(s, {**shared, **heads[i]})
            optimizer = sgd(
                s, model.parameters()
            )  # one for both phases: the head's momentum goes on
            for last, epochs in (
                (False, range(s.epochs - rep_epochs)),
                (True, range(s.epochs - rep_epochs, s.epochs)),
            ):
                model.train(last)
                for k, p in model.named_parameters():
                    p.requires_grad_(last or k in HEAD)
                for x, y in minibatches(s, t, i, epochs):
                    z = features(model, x)
                    weight = model.classifier.weight
                    loss = F.cross_entropy(model.classifier(z), y) + l1 * collapse(
                        weight, present[i]
                    )
                    loss = loss + l2 * torch.linalg.norm(weight) ** 2
                    if last:
                        loss = loss + l3 * torch.linalg.norm(z) ** 2
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
            trained.append(copy.deepcopy(model.state_dict()))
        result.after.append([hits(w, i) for i, w in zip(cohort, trained, strict=True)])
        for i, w in zip(cohort, trained, strict=True):
            heads[i] = own_head(w)
            weight = heads[i]["classifier.weight"].requires_grad_()
            (slope,) = torch.autograd.grad(collapse(weight, present[i]) / len(cohort), weight)
            heads[i]["classifier.weight"] = (weight - server_lr * slope).detach()
        shared = {k: v for k, v in average(s, cohort, trained).items() if k in shared}
        result.shared.append(shared)
        result.personal.append([{**shared, **head} for head in heads])
    return result


def best_mixture(quadratic: Tensor) -> Tensor:
    """Over the simplex, by trying every support."""
    n, best, least = len(quadratic), None, float("inf")
    quadratic = quadratic + 1e-12 * torch.eye(
        n, dtype=torch.float64
    )  # a client of one sample has no variance
    for size in range(1, n + 1):
        for support in combinations(range(n), size):
            part = quadratic[list(support)][:, list(support)]
            shares = torch.linalg.solve(part, torch.ones(size, dtype=torch.float64))
            shares = shares / shares.sum()
            value = float(shares @ part @ shares)
            if (shares >= 0).all() and value < least:
                least, best = value, torch.zeros(n, dtype=torch.float64)
                best[list(support)] = shares
    return best


def fedpac(
    s: Setting, lam: float, head_epochs: int, body_epochs: int, head_lr: float, classes: int
) -> Result:
    """`margins`: how far shares lie from the limit below which they are dropped."""
    result = Result()
    shared = {k: v for k, v in s.initial.items() if k not in HEAD}
    heads = [own_head(s.initial) for _ in s.clients]
    prototypes: dict[int, Tensor] = {}

    def hits(weights: Weights, i: int) -> int:
        with torch.no_grad():
            return score(load(s, weights).eval()(s.clients[i].test_x), s.clients[i].test_y)

    def class_means(weights: Weights, i: int) -> tuple[dict[int, Tensor], Tensor]:
        with torch.no_grad():
            z = features(load(s, weights).eval(), s.clients[i].x)
        return {c: z[s.clients[i].y == c].mean(0) for c in s.clients[i].y.unique().tolist()}, z

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits({**shared, **heads[i]}, i) for i in cohort])
        trained, statistics, variances, new = [], [], [], []
        for i in cohort:
            y = s.clients[i].y
            means, z = class_means({**shared, **heads[i]}, i)
            h, v = torch.zeros(classes, 12, dtype=torch.float64), 0.0
            for c, mean in means.items():
                share = float((y == c).double().mean())
                h[c] = share * mean.double()
                square = (z[y == c].double() ** 2).sum(1).mean()
                v += float(share * square - share**2 * (mean.double() ** 2).sum())
            statistics.append(h)
            variances.append(v / len(y))
            at = copy.copy(s)
            at.lr = head_lr
            weights = train(
                at,
                {**shared, **heads[i]},
                t,
                i,
                head_epochs,
                moving=lambda k: k in HEAD,
                still=True,
            )

            def aligned(model, x, label, means=means, known=prototypes):
                z = features(model, x)
                loss = F.cross_entropy(model.classifier(z), label)
                if not known:
                    return loss
                target = torch.stack([known.get(int(c), means[int(c)]) for c in label])
                return loss + lam * F.mse_loss(z, target)

            body = {"moving": lambda k: k not in HEAD, "first": head_epochs, "loss": aligned}
            trained.append(train(s, weights, t, i, body_epochs, **body))
            new.append(class_means(trained[-1], i)[0])
        result.after.append([hits(w, i) for i, w in zip(cohort, trained, strict=True)])
        sizes = [
            {c: int((s.clients[i].y == c).sum()) for c in own}
            for i, own in zip(cohort, new, strict=True)
        ]
        prototypes = {
            c: sum(n[c] * own[c] for n, own in zip(sizes, new, strict=True) if c in own)
            / sum(n[c] for n in sizes if c in n)
            for c in range(classes)
            if any(c in own for own in new)
        }
        for k, i in enumerate(cohort):
            apart = [(statistics[k] - other).flatten() for other in statistics]
            quadratic = torch.tensor(
                [[float(a @ b) for b in apart] for a in apart], dtype=torch.float64
            )
            quadratic += torch.diag(torch.tensor(variances, dtype=torch.float64))
            shares = best_mixture(quadratic)
            result.margins += (shares - 1e-3).abs().tolist()
            shares = torch.where(shares < 1e-3, 0, shares)
            shares = shares / shares.sum()
            heads[i] = {
                name: sum(
                    a * w[name].double() for a, w in zip(shares, trained, strict=True)
                ).float()
                for name in HEAD
            }
        shared = {k: v for k, v in average(s, cohort, trained).items() if k in shared}
        result.shared.append(shared)
        result.personal.append([{**shared, **head} for head in heads])
    return result
