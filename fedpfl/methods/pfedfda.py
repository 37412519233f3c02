"""pFedFDA: a common feature extractor under a generative classifier that each client fits to its own features."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.methods.shared.method import Method, Phase


@dataclass(frozen=True)
class PFedFDA(Method):
    """pFedFDA (McLaughlin and Su, NeurIPS 2024, arXiv:2411.00329, Algorithm 1).

    Features of class c are taken as Gaussian with mean mu_c and a covariance Sigma common to all classes, so the best
    head is linear discriminant analysis: W = Sigma^-1 mu, bias = -mu Sigma^-1 mu / 2 + log prior. Clients train the
    body under the global head with their own prior, estimate mu and Sigma from the features seen on the way, and mix
    them with the global ones by the two weights beta whose cross-validated loss is least. They are evaluated, whether
    sampled or not, by such a head fitted to the features of their training data.

    eps: shrinkage of Sigma towards a multiple of the identity, and added to the prior.
    folds: of the cross-validation. single_beta: one weight for both.
    cov_reg: multiple of the identity added to an estimated Sigma; 1 as in the official code, whose further 1e-4 in
        every entry is added too.
    variant: `as_published`: what FL-bench, and so FedOBP's tables, ran under this name: FedAvg, and for evaluation a
        head from statistics mixed with ones that stay at their random initial values.
    Linear algebra is in float64. All of this happens client by client.
    """

    eps: float = 1e-4
    folds: int = 2
    single_beta: bool = False
    cov_reg: float = 1.0
    variant: Literal["paper", "as_published"] = "paper"

    def __post_init__(self):
        super().__post_init__()
        self.check(0 < self.eps < 1, "eps", "above 0 and below 1")
        self.check(self.folds >= 2, "folds", "2 or more")
        self.check(self.cov_reg >= 0, "cov_reg", "0 or more")

    @property
    def _shared(self) -> tuple[str, ...]:
        return ("body", "head") if self.variant == "as_published" else ("body", "mean", "cov")

    def init(self, params, parts):
        """Draw means uniformly from [0, 1); the covariance is the identity. The head is trained `as_published` only."""
        weight = params[parts.head[0]]
        generator = torch.Generator().manual_seed(parts.seed)
        server = {
            "body": tree.named(params, parts.body),
            "head": tree.named(params, parts.head),
            "mean": torch.rand(weight.shape, generator=generator).to(weight.device),
            "cov": packed(torch.eye(weight.shape[1], device=weight.device)),
        }
        return server, {"beta": torch.full((2,), 0.5, device=weight.device)}

    def before_training(self, net, shard, server, client):
        """Return the client's class frequencies."""
        return {"prior": self._prior(shard.data.y, len(server["mean"]))}

    def download(self, server, client):
        """Return body and statistics (as published: body and head)."""
        return tree.named(server, self._shared)

    def start(self, server, client):
        """Return the body under the global head with the client's prior."""
        head = server["head"] if self.variant == "as_published" else self._head(server, client["prior"])
        return {**server["body"], **head}

    def phases(self, server, client, params, epochs):
        """Train the body, and keep the features."""
        if self.variant == "as_published":
            return [Phase(epochs)]
        return [Phase(epochs, {name: name in server["body"] for name in params}, keeps=True)]

    def loss(self, net, params, batch, server, client):
        """Return cross-entropy and, to keep, the features."""
        logits, features = net.features(params, batch.x)
        loss = batch.cross_entropy(logits)
        return loss if self.variant == "as_published" else (loss, {"z": features.detach(), "y": batch.y})

    def after_training(self, net, shard, params, kept, server, client):
        """Return statistics of the features that training went through."""
        if self.variant == "as_published":
            return {}
        if not kept:  # no step was made
            return {"mean": server["mean"], "cov": server["cov"], "beta": client["beta"]}
        mean, cov, beta = self._fit(kept["z"], kept["y"], client["prior"], server, client["beta"], least=1)
        return {"mean": mean.float(), "cov": packed(cov).float(), "beta": beta.float()}

    def finish(self, server, client, start, end):
        """Return body and statistics (as published: body and head); the last beta stays."""
        trained = {part: tree.named(end, server[part]) for part in ("body", "head")}
        return tree.named({**client, **trained}, self._shared), {"beta": client["beta"]}

    def aggregate(self, server, uploads, clients, weight):
        """Average what came."""
        return {**server, **tree.mean(uploads, weight)}, clients

    def before_evaluation(self, net, shard, server, client):
        """Return a head for the latest body, fitted to the features of the client's training data."""
        z = shard.features(net.still(), {**server["body"], **server["head"]})
        prior = self._prior(shard.data.y, len(server["mean"]))
        mean, cov, _ = self._fit(z, shard.data.y, prior, server, client["beta"], least=self.folds + 1)
        return {"head": self._named(lda(mean, cov, prior, self.eps), server)}

    def personal(self, server, client):
        """Return the latest body under the fitted head; where none was fitted, the global one with a uniform prior."""
        head = client.get("head") or self._head(server, torch.full_like(server["mean"][:, 0], 1 / len(server["mean"])))
        return {**server["body"], **head}

    def _fit(self, z, y, prior, server, beta, least):
        """Return means `[classes, features]`, covariance and beta for a client's features `z` `[samples, features]`.

        least: samples that a class needs for a mean of its own. beta: where the search fails.
        """
        z, shared = z.double(), (server["mean"].double(), unpacked(server["cov"]).double())
        beta = self._search(z, y, prior.double(), *shared, beta.double())
        own = class_means(z, y, shared[0], least)
        cov = self._covariance(z - own[y])
        return beta[0] * own + (1 - beta[0]) * shared[0], beta[1] * cov + (1 - beta[1]) * shared[1], beta

    def _search(self, z: Tensor, y: Tensor, prior: Tensor, mean: Tensor, cov: Tensor, beta: Tensor) -> Tensor:
        """Find the weights `[2]` of local means and covariance with the least cross-validated loss; else `beta`.

        Classes with fewer samples than folds are left out; without any class the weights are zero.
        """
        enough = torch.bincount(y, minlength=len(prior))[y] >= self.folds
        z, y = z[enough], y[enough]
        if not len(y):
            return torch.zeros_like(beta)
        fold = _ranks(y) % self.folds
        try:
            trials = [
                _Trial.of(
                    *self._shrunk(z[fold != k], y[fold != k], mean, cov), mean, z[fold == k], y[fold == k], prior.log()
                )
                for k in range(self.folds)
            ]
        except torch.linalg.LinAlgError:
            return beta

        def loss(weights: Tensor) -> Tensor:
            return torch.stack([trial.loss(weights.expand(2)) for trial in trials]).sum()

        def value_and_slope(weights: Any) -> tuple[float, Any]:
            at = torch.tensor(weights, dtype=z.dtype, device=z.device, requires_grad=True)
            with torch.enable_grad():
                value = loss(at)
            (slope,) = torch.autograd.grad(value, at)
            return value.item(), slope.cpu().numpy()

        from scipy import optimize  # takes a while to import

        size = 1 if self.single_beta else 2
        found = optimize.minimize(
            value_and_slope, [0.5] * size, method="L-BFGS-B", jac=True, bounds=[(0, 1)] * size, options={"maxiter": 10}
        )
        return torch.tensor(found.x).to(z).expand(2) if math.isfinite(found.fun) else beta

    def _shrunk(self, z: Tensor, y: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = class_means(z, y, mean, 1)
        return own, shrunk(self._covariance(z - own[y]), self.eps), shrunk(cov, self.eps)

    def _covariance(self, centred: Tensor) -> Tensor:
        """Estimate it from centred features `[samples, features]`: regularised, and made positive definite."""
        count, width = centred.shape
        cov = centred.T @ centred / max(1, count - 1) + 1e-4
        cov = cov + self.cov_reg * torch.eye(width, dtype=cov.dtype, device=cov.device)
        if int(torch.linalg.cholesky_ex(cov).info) and bool(cov.isfinite().all()):
            values, vectors = torch.linalg.eigh(cov)
            cov = vectors * values.clamp(min=1e-8) @ vectors.T
        return cov

    def _prior(self, y: Tensor, classes: int) -> Tensor:
        frequency = torch.bincount(y, minlength=classes) / max(1, len(y)) + self.eps
        return frequency / frequency.sum()

    def _head(self, server, prior):
        mean, cov = server["mean"].double(), unpacked(server["cov"]).double()
        return self._named(lda(mean, cov, prior, self.eps), server)

    @staticmethod
    def _named(head, server):
        return {name: value.float() for name, value in zip(server["head"], head, strict=True)}


class _Trial(NamedTuple):
    """Hold test features, and local and global means, in the basis where both covariances are diagonal."""

    ratio: Tensor
    own: Tensor
    mean: Tensor
    z: Tensor
    y: Tensor
    log_prior: Tensor

    @classmethod
    def of(
        cls, own: Tensor, cov: Tensor, shared: Tensor, mean: Tensor, z: Tensor, y: Tensor, log_prior: Tensor
    ) -> "_Trial":
        """With shared = L L^T and L^-1 cov L^-T = Q diag(ratio) Q^T, take Q^T L^-1 times features and means."""
        factor = torch.linalg.cholesky(shared)
        half = torch.linalg.solve_triangular(factor, cov, upper=False)
        ratio, basis = torch.linalg.eigh(torch.linalg.solve_triangular(factor, half.T, upper=False))

        def turned(rows: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(factor, rows.T, upper=False).T @ basis

        return cls(ratio, turned(own), turned(mean), turned(z), y, log_prior)

    def loss(self, beta):
        """Add up the cross-entropy of the held-out samples for weights `[2]` of local means and covariance."""
        mean = beta[0] * self.own + (1 - beta[0]) * self.mean
        weight = mean / (beta[1] * self.ratio + 1 - beta[1])
        logits = self.z @ weight.T - (weight * mean).sum(1) / 2 + self.log_prior
        return F.cross_entropy(logits, self.y, reduction="sum")


def lda(mean: Tensor, cov: Tensor, prior: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight `[classes, features]` and bias `[classes]` of linear discriminant analysis."""
    weight = torch.linalg.solve(shrunk(cov, eps), mean.T).T
    return weight, prior.to(mean).log() - (mean * weight).sum(1) / 2


def shrunk(cov: Tensor, eps: float) -> Tensor:
    """Return (1 - eps) cov + eps tr(cov) / d I."""
    scale = cov.diagonal().mean()
    return (1 - eps) * cov + eps * scale * torch.eye(len(cov), dtype=cov.dtype, device=cov.device)


def class_means(z: Tensor, y: Tensor, otherwise: Tensor, least: int) -> Tensor:
    """Average features by class `[classes, features]`; with fewer than `least` samples it is `otherwise`'s row."""
    counts = torch.bincount(y, minlength=len(otherwise))
    means = torch.zeros_like(otherwise).index_add_(0, y, z) / counts.clamp(min=1)[:, None]
    return torch.where((counts >= least)[:, None], means, otherwise)


def packed(cov: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix, a vector of d (d + 1) / 2 numbers."""
    rows, columns = torch.tril_indices(len(cov), len(cov), device=cov.device)
    return cov[rows, columns]


def unpacked(triangle: Tensor) -> Tensor:
    """Undo `packed`."""
    width = (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2
    rows, columns = torch.tril_indices(width, width, device=triangle.device)
    place = torch.zeros(width, width, dtype=torch.int64, device=triangle.device)
    place[rows, columns] = place[columns, rows] = torch.arange(triangle.shape[-1], device=triangle.device)
    return triangle[place]


def _ranks(y: Tensor) -> Tensor:
    """Count for each sample the earlier ones of the same label, `[samples]`."""
    order = y.argsort(stable=True)
    counts = torch.bincount(y)
    first = (counts.cumsum(0) - counts)[y[order]]
    ranks = torch.empty_like(y)
    ranks[order] = torch.arange(len(y), device=y.device) - first
    return ranks
