"""pFedFDA's rounds as plain loops (arXiv:2411.00329): every mixture of covariances is solved anew."""

import copy

import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

from tests.methods.reference.plain import Setting, Weights, minibatches

EPS = 1e-4


def lda(mean: Tensor, cov: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    d = len(cov)
    sigma = (1 - EPS) * cov + EPS * (torch.trace(cov) / d) * torch.eye(d, dtype=torch.float64)
    weight = torch.stack([torch.linalg.solve(sigma, m) for m in mean])
    return weight, torch.stack(
        [-0.5 * m @ w + p.log() for m, w, p in zip(mean, weight, prior, strict=True)]
    )


def prior(y: Tensor, classes: int) -> Tensor:
    frequency = torch.stack([(y == c).double().mean() for c in range(classes)]) + EPS
    return frequency / frequency.sum()


def covariance(z: Tensor, y: Tensor, mean: Tensor) -> Tensor:
    scatter = sum(torch.outer(row - mean[c], row - mean[c]) for row, c in zip(z, y, strict=True))
    return scatter / max(1, len(z) - 1) + torch.eye(z.shape[1], dtype=torch.float64) + 1e-4


def means(z: Tensor, y: Tensor, otherwise: Tensor, least: int) -> Tensor:
    rows = []
    for c in range(len(otherwise)):
        own = z[y == c]
        rows.append(own.mean(0) if len(own) >= least else otherwise[c])
    return torch.stack(rows)


def objective(z: Tensor, y: Tensor, pi: Tensor, mu_g: Tensor, cov_g: Tensor, folds: int):
    """The summed held-out cross-entropy as a function of beta, or None without any class of so many
    samples.
    """
    counts = [int((y == c).sum()) for c in range(len(pi))]
    kept = [i for i in range(len(y)) if counts[y[i]] >= folds]
    if not kept:
        return None
    z, y = z[kept], y[kept]
    seen, fold = [0] * len(pi), []
    for c in y.tolist():
        fold.append(seen[c] % folds)
        seen[c] += 1
    fold = torch.tensor(fold)
    parts = []
    for k in range(folds):
        train, held = fold != k, fold == k
        mu = means(z[train], y[train], mu_g, 1)
        parts.append((mu, covariance(z[train], y[train], mu), z[held], y[held]))

    def value(beta: Tensor) -> Tensor:
        b = beta
        total = torch.zeros((), dtype=torch.float64)
        for mu, cov, x, label in parts:
            weight, bias = lda(b[0] * mu + (1 - b[0]) * mu_g, b[1] * cov + (1 - b[1]) * cov_g, pi)
            total = total + F.cross_entropy(x @ weight.T + bias, label, reduction="sum")
        return total

    return value


def fit(
    z: Tensor, y: Tensor, pi: Tensor, mu_g: Tensor, cov_g: Tensor, least: int
) -> tuple[Tensor, Tensor, Tensor]:
    value = objective(z, y, pi, mu_g, cov_g, 2)
    beta = torch.zeros(2, dtype=torch.float64)
    if value is not None:

        def numbers(b):
            at = torch.tensor(b, requires_grad=True)
            loss = value(at)
            return loss.item(), torch.autograd.grad(loss, at)[0].numpy()

        bounds = [(0, 1), (0, 1)]
        found = minimize(
            numbers, [0.5, 0.5], jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 10}
        )
        beta = torch.tensor(found.x)
    mu = means(z, y, mu_g, least)
    cov = covariance(z, y, mu)
    return beta[0] * mu + (1 - beta[0]) * mu_g, beta[1] * cov + (1 - beta[1]) * cov_g, beta


class Model:
    """A body and a head apart, by the names of the setting's module."""

    def __init__(self, s: Setting, weights: Weights):
        self.module = copy.deepcopy(s.module)
        self.module.load_state_dict(weights)

    def features(self, x: Tensor) -> Tensor:
        m = self.module
        x = F.avg_pool2d(torch.tanh(m.norm(m.conv(x))), 2)
        return torch.tanh(m.fc(x.flatten(1)))

    def set_head(self, weight: Tensor, bias: Tensor) -> None:
        with torch.no_grad():
            self.module.classifier.weight.copy_(weight)
            self.module.classifier.bias.copy_(bias)


def pfedfda(
    s: Setting, mu_g: Tensor, classes: int
) -> tuple[list[dict[str, Tensor]], list[list[Tensor]]]:
    """After each round the server's body, means and covariance; every client's logits on its test
    images.
    """
    shared = s.initial
    mu_g = mu_g.double()
    cov_g = torch.eye(mu_g.shape[1], dtype=torch.float64)
    servers, logits = [], []
    priors = [prior(client.y, classes) for client in s.clients]
    for t, cohort in enumerate(s.cohorts, 1):
        bodies, mus, covs = [], [], []
        for i in cohort:
            client, model = s.clients[i], Model(s, shared)
            model.set_head(*lda(mu_g, cov_g, priors[i]))
            body = [p for k, p in model.module.named_parameters() if not k.startswith("classifier")]
            optimizer = torch.optim.SGD(
                body, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay
            )
            zs, ys = [], []
            for x, y in minibatches(s, t, i, range(s.epochs)):
                z = model.features(x)
                zs.append(z.detach().double())
                ys.append(y)
                optimizer.zero_grad()
                F.cross_entropy(model.module.classifier(z), y).backward()
                optimizer.step()
            bodies.append({k: v.clone() for k, v in model.module.state_dict().items()})
            mu, cov = mu_g, cov_g
            if zs:
                mu, cov, _ = fit(torch.cat(zs), torch.cat(ys), priors[i], mu_g, cov_g, 1)
            mus.append(mu.float().double())
            covs.append(cov.float().double())
        shares = [len(s.clients[i].y) for i in cohort]
        shares = [n / sum(shares) for n in shares]
        shared = {
            k: sum(a * b[k].double() for a, b in zip(shares, bodies, strict=True)).float()
            for k in shared
        }
        mu_g = sum(a * mu for a, mu in zip(shares, mus, strict=True))
        cov_g = sum(a * cov for a, cov in zip(shares, covs, strict=True))
        servers.append({"body": shared, "mean": mu_g.float(), "cov": cov_g.float()})
        logits.append([])
        for i, client in enumerate(s.clients):
            model = Model(s, shared)
            model.module.eval()
            with torch.no_grad():
                z = model.features(client.x).double()
            mu, cov, _ = fit(
                z, client.y, priors[i], mu_g.float().double(), cov_g.float().double(), 3
            )
            model.set_head(*lda(mu, cov, priors[i]))
            with torch.no_grad():
                logits[-1].append(model.module(client.test_x))
        mu_g, cov_g = mu_g.float().double(), cov_g.float().double()
    return servers, logits
