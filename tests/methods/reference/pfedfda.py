"""pFedFDA's rounds as plain loops (arXiv:2411.00329): every mixture of covariances is solved anew."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn

from tests.methods.reference import plain
from tests.methods.reference.plain import HEAD, Result, Setting, Turn, Weights

EPS, CLASSES = 1e-4, 5


def lda(mean: Tensor, cov: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    d = len(cov)
    sigma = (1 - EPS) * cov + EPS * (torch.trace(cov) / d) * torch.eye(d, dtype=torch.float64)
    weight = torch.linalg.solve(sigma, mean.T).T
    return weight, -0.5 * (mean * weight).sum(1) + prior.log()


def class_prior(y: Tensor) -> Tensor:
    frequency = torch.stack([(y == c).double().mean() for c in range(CLASSES)]) + EPS
    return frequency / frequency.sum()


def covariance(z: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    scatter = sum(torch.outer(row - mean[c], row - mean[c]) for row, c in zip(z, y, strict=True))
    return scatter / max(1, len(z) - 1) + torch.eye(z.shape[1], dtype=torch.float64) + 1e-4


def means(z: Tensor, y: Tensor, otherwise: Tensor, least: int) -> Tensor:
    rows = [z[y == c] for c in range(len(otherwise))]
    pairs = zip(rows, otherwise, strict=True)
    return torch.stack([own.mean(0) if len(own) >= least else other for own, other in pairs])


def objective(
    z: Tensor, y: Tensor, prior: Tensor, mean: Tensor, cov: Tensor, folds: int
) -> Callable[[Tensor], Tensor] | None:
    """The summed held-out cross-entropy as a function of beta, or None without any class of so many
    samples.
    """
    counts = torch.bincount(y, minlength=len(prior))
    z, y = z[counts[y] >= folds], y[counts[y] >= folds]
    if not len(y):
        return None
    fold = torch.stack([(y[:j] == c).sum() % folds for j, c in enumerate(y)])
    parts = []
    for k in range(folds):
        is_training, is_held = fold != k, fold == k
        mu = means(z[is_training], y[is_training], mean, 1)
        own = covariance(z[is_training], y[is_training], mu)
        parts.append((mu, own, z[is_held], y[is_held]))

    def value(b: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for mu, own, x, label in parts:
            mixed = b[0] * mu + (1 - b[0]) * mean, b[1] * own + (1 - b[1]) * cov
            weight, bias = lda(*mixed, prior)
            total = total + F.cross_entropy(x @ weight.T + bias, label, reduction="sum")
        return total

    return value


def fit_statistics(
    z: Tensor, y: Tensor, prior: Tensor, mean: Tensor, cov: Tensor, least: int
) -> tuple[Tensor, Tensor]:
    value, beta = objective(z, y, prior, mean, cov, 2), torch.zeros(2, dtype=torch.float64)
    if value is not None:

        def numbers(b: Any) -> tuple[float, Any]:
            at = torch.tensor(b, requires_grad=True)
            loss = value(at)
            return loss.item(), torch.autograd.grad(loss, at)[0].numpy()

        how = {"jac": True, "bounds": [(0, 1), (0, 1)], "options": {"maxiter": 10}}
        beta = torch.tensor(minimize(numbers, [0.5, 0.5], method="L-BFGS-B", **how).x)
    mu = means(z, y, mean, least)
    own = covariance(z, y, mu)
    return beta[0] * mu + (1 - beta[0]) * mean, beta[1] * own + (1 - beta[1]) * cov


def pfedfda(s: Setting, mean: Tensor) -> Result:
    """Statistics travel in single precision."""
    priors = {i: class_prior(client.y) for i, client in enumerate(s.clients)}

    def with_head(weights: Weights, mean: Tensor, cov: Tensor, i: int) -> Weights:
        pair = lda(mean.double(), cov.double(), priors[i])
        return weights | {name: leaf.float() for name, leaf in zip(HEAD, pair, strict=True)}

    def begin(turn: Turn) -> Weights:
        """The global statistics' head, by the client's prior."""
        server = turn.shared
        return with_head(server["body"], server["mean"], server["cov"], turn.i)

    def local(w: Weights, turn: Turn) -> dict[str, Any]:
        server, batches_seen = turn.shared, []
        model = plain.load(s, w).train()
        model.classifier.requires_grad_(False)

        def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            z = plain.features(model, x)
            batches_seen.append((z.detach().double(), y))
            return F.cross_entropy(model.classifier(z), y)

        plain.fit(s, model, plain.minibatches(s, turn, range(s.epochs)), loss)
        end = {"body": plain.values_of(model)}
        if not batches_seen:
            return end | plain.pick(server, lambda part: part != "body")
        z, y = (torch.cat(rows) for rows in zip(*batches_seen, strict=True))
        global_statistics = server["mean"].double(), server["cov"].double()
        new, cov = fit_statistics(z, y, priors[turn.i], *global_statistics, 1)
        return end | {"mean": new.float(), "cov": cov.float()}

    def personal(turn: Turn) -> dict[str, Tensor]:
        client, server = s.clients[turn.i], turn.shared
        z = plain.features(plain.still(s, server["body"]), client.x).double()
        global_statistics = server["mean"].double(), server["cov"].double()
        found = fit_statistics(z, client.y, priors[turn.i], *global_statistics, 3)
        model = plain.still(s, with_head(server["body"], *found, turn.i))
        return {"logits": model(client.test_x)}

    def judge(report: Any, i: int) -> int:
        x, y = s.clients[i].test_x, s.clients[i].test_y
        return plain.count_hits(
            report["logits"] if "logits" in report else plain.still(s, report)(x), y
        )

    return plain.play(
        s,
        local,
        begin,
        personal=personal,
        after=lambda i, end: end["body"],
        judge=judge,
        shared={"body": s.initial, "mean": mean, "cov": torch.eye(mean.shape[1])},
        is_everyone_judged=True,
    )
