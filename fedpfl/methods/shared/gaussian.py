"""Classes as Gaussians of one covariance: discriminant analysis, and local statistics mixed with
global ones.

z: features `[samples, features]`; y: labels `[samples]`; mean: `[classes, features]`; cov:
`[features, features]`;
prior: `[classes]`. All in float64. Not for vmap: it branches, and asks scipy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def lda_head(mean: Tensor, cov: Tensor, prior: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight `[classes, features]` and bias `[classes]` of linear discriminant analysis."""
    weight = torch.linalg.solve(shrink_covariance(cov, eps), mean.T).T
    return weight, prior.to(mean).log() - (mean * weight).sum(1) / 2


def shrink_covariance(cov: Tensor, eps: float) -> Tensor:
    """Return (1 - eps) cov + eps tr(cov) / d I."""
    scale = cov.diagonal().mean()
    return (1 - eps) * cov + eps * scale * torch.eye(len(cov), dtype=cov.dtype, device=cov.device)


def class_frequencies(y: Tensor, classes: int, eps: float) -> Tensor:
    """Return each class's share of the samples plus `eps`, rescaled to the sum 1."""
    shares = torch.bincount(y, minlength=classes) / max(1, len(y)) + eps
    return shares / shares.sum()


def class_means(z: Tensor, y: Tensor, otherwise: Tensor, least: int) -> Tensor:
    """Average features by class `[classes, features]`; with fewer than `least` samples it is
    `otherwise`'s row.
    """
    counts = torch.bincount(y, minlength=len(otherwise))
    means = torch.zeros_like(otherwise).index_add_(0, y, z) / counts.clamp(min=1)[:, None]
    return torch.where((counts >= least)[:, None], means, otherwise)


def estimate_covariance(centred: Tensor, ridge: float) -> Tensor:
    """Estimate it from centred features, plus `ridge` I and 1e-4 in each entry, and make it
    positive definite.
    """
    count, width = centred.shape
    cov = centred.T @ centred / max(1, count - 1) + 1e-4
    cov = cov + ridge * torch.eye(width, dtype=cov.dtype, device=cov.device)
    if int(torch.linalg.cholesky_ex(cov).info) and bool(cov.isfinite().all()):
        values, vectors = torch.linalg.eigh(cov)
        cov = vectors * values.clamp(min=1e-8) @ vectors.T
    return cov


class MixtureTrial(NamedTuple):
    """Hold held-out features, and local and global means, in the basis where both covariances are
    diagonal.
    """

    ratio: Tensor
    local: Tensor
    shared: Tensor
    z: Tensor
    y: Tensor
    log_prior: Tensor

    @classmethod
    def of(
        cls,
        local: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        z: Tensor,
        y: Tensor,
        prior: Tensor,
    ) -> MixtureTrial:
        """Prepare held-out `z`, `y` for any mixture of `local` and `shared` statistics, each (mean,
        cov).

        With the shared cov = L L^T and L^-1 (local cov) L^-T = Q diag(ratio) Q^T, Q^T L^-1 times
        features and means. Raises LinAlgError where the shared one is not positive definite.
        """
        factor = torch.linalg.cholesky(shared[1])
        half = torch.linalg.solve_triangular(factor, local[1], upper=False)
        ratio, basis = torch.linalg.eigh(torch.linalg.solve_triangular(factor, half.T, upper=False))

        def turned(rows: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(factor, rows.T, upper=False).T @ basis

        return cls(ratio, turned(local[0]), turned(shared[0]), turned(z), y, prior.log())

    def loss(self, beta: Tensor) -> Tensor:
        """Add up the cross-entropy of the held-out samples for weights `[2]` of local mean and
        covariance.
        """
        mean = beta[0] * self.local + (1 - beta[0]) * self.shared
        weight = mean / (beta[1] * self.ratio + 1 - beta[1])
        logits = self.z @ weight.T - (weight * mean).sum(1) / 2 + self.log_prior
        return F.cross_entropy(logits, self.y, reduction="sum")


def minimize_in_box(loss: Callable[[Tensor], Tensor], size: int, like: Tensor) -> Tensor | None:
    """Return the point of [0, 1]^size where ten steps of L-BFGS-B from its centre end; None without
    a finite loss.
    """
    from scipy import optimize  # takes a while to import

    def value_and_slope(point: Any) -> tuple[float, Any]:
        at = torch.tensor(point, dtype=like.dtype, device=like.device, requires_grad=True)
        with torch.enable_grad():
            value = loss(at)
        (slope,) = torch.autograd.grad(value, at)
        return value.item(), slope.cpu().numpy()

    result = optimize.minimize(
        value_and_slope,
        [0.5] * size,
        method="L-BFGS-B",
        jac=True,
        bounds=[(0, 1)] * size,
        options={"maxiter": 10},
    )
    return torch.tensor(result.x).to(like) if math.isfinite(result.fun) else None


def ranks_in_class(y: Tensor) -> Tensor:
    """Count for each sample the earlier ones of the same label, `[samples]`."""
    order = y.argsort(stable=True)
    counts = torch.bincount(y)
    first = (counts.cumsum(0) - counts)[y[order]]
    rank = torch.empty_like(y)
    rank[order] = torch.arange(len(y), device=y.device) - first
    return rank


def pack_symmetric(cov: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix, a vector of d (d + 1) / 2 numbers."""
    rows, columns = torch.tril_indices(len(cov), len(cov), device=cov.device)
    return cov[rows, columns]


def unpack_symmetric(triangle: Tensor) -> Tensor:
    """Undo `packed`."""
    width = (math.isqrt(8 * triangle.shape[-1] + 1) - 1) // 2
    rows, columns = torch.tril_indices(width, width, device=triangle.device)
    place = torch.zeros(width, width, dtype=torch.int64, device=triangle.device)
    place[rows, columns] = place[columns, rows] = torch.arange(
        triangle.shape[-1], device=triangle.device
    )
    return triangle[place]
