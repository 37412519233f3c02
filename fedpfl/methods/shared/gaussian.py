"""Classes as Gaussians of one covariance: linear discriminant analysis, statistics mixed.

z: features `[samples, features]`; y: labels `[samples]`; mean: `[classes, features]`; cov:
`[features, features]`; prior: `[classes]`. All in float64. Not for vmap: it branches, and asks
scipy.
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
    bias = prior.to(mean).log() - (mean * weight).sum(1) / 2
    return weight, bias


def shrink_covariance(cov: Tensor, eps: float) -> Tensor:
    """Return (1 - eps) cov + eps tr(cov) / d I."""
    scale = cov.diagonal().mean()
    identity = torch.eye(len(cov), dtype=cov.dtype, device=cov.device)
    return (1 - eps) * cov + eps * scale * identity


def class_frequencies(y: Tensor, classes: int, eps: float) -> Tensor:
    """Return each class's share of the samples plus `eps`, rescaled to the sum 1."""
    shares = torch.bincount(y, minlength=classes) / max(1, len(y)) + eps
    return shares / shares.sum()


def sum_rows_by_label(rows: Tensor, y: Tensor, classes: int) -> Tensor:
    """Add up `rows` `[samples, n]` by label, `[classes, n]`.

    It is a product with one-hot labels: `index_add_` has no order of summands on a GPU.
    """
    flags = y == torch.arange(classes, device=y.device)[:, None]
    return flags.to(rows.dtype) @ rows


def class_means(z: Tensor, y: Tensor, fallback: Tensor, min_samples: int) -> Tensor:
    """Average features by class, `[classes, features]`.

    A class with fewer than `min_samples` samples has its row of `fallback`.
    """
    counts = torch.bincount(y, minlength=len(fallback))
    sums = sum_rows_by_label(z, y, len(fallback))
    means = sums / counts.clamp(min=1)[:, None]
    return torch.where((counts >= min_samples)[:, None], means, fallback)


def estimate_covariance(centred: Tensor, ridge: float) -> Tensor:
    """Return the covariance of centred features, plus `ridge` I and 1e-4 in each entry.

    Where that is not positive definite, its eigenvalues are raised until it is.
    """
    count, width = centred.shape
    cov = centred.T @ centred / max(1, count - 1) + 1e-4
    cov = cov + ridge * torch.eye(width, dtype=cov.dtype, device=cov.device)
    is_indefinite = int(torch.linalg.cholesky_ex(cov).info) != 0
    if is_indefinite and bool(cov.isfinite().all()):
        values, vectors = torch.linalg.eigh(cov)
        cov = vectors * values.clamp(min=1e-8) @ vectors.T
    return cov


class MixtureTrial(NamedTuple):
    """A fold's validation samples and both statistics, where both covariances are diagonal.

    In this basis the loss of any mixture takes no linear system to solve.

    Attributes:
        ratio: the local covariance, where the global one is the identity, `[features]`.
        local: local means.
        shared: global means.
        z: features of the validation samples.
        y: their labels.
        log_prior: logarithms of the classes' shares.
    """

    ratio: Tensor
    local: Tensor
    shared: Tensor
    z: Tensor
    y: Tensor
    log_prior: Tensor

    @classmethod
    def prepare(
        cls,
        local: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        z: Tensor,
        y: Tensor,
        prior: Tensor,
    ) -> MixtureTrial:
        """Prepare validation samples `z`, `y` for any mixture of local and global statistics.

        With the shared cov = L L^T and L^-1 (local cov) L^-T = Q diag(ratio) Q^T, features and means
        are multiplied by Q^T L^-1.

        Args:
            local: the client's (mean, cov).
            shared: the global (mean, cov).
            z: features of the validation samples.
            y: their labels.
            prior: the classes' shares.

        Raises:
            LinAlgError: where the shared covariance is not positive definite.
        """
        local_mean, local_cov = local
        shared_mean, shared_cov = shared

        # ---- A basis in which both covariances are diagonal: shared = L L^T.
        factor = torch.linalg.cholesky(shared_cov)
        half = torch.linalg.solve_triangular(factor, local_cov, upper=False)
        whitened = torch.linalg.solve_triangular(factor, half.T, upper=False)
        ratio, basis = torch.linalg.eigh(whitened)

        # ---- Features and means in this basis.
        def change_basis(rows: Tensor) -> Tensor:
            whitened_rows = torch.linalg.solve_triangular(factor, rows.T, upper=False).T
            return whitened_rows @ basis

        return cls(
            ratio=ratio,
            local=change_basis(local_mean),
            shared=change_basis(shared_mean),
            z=change_basis(z),
            y=y,
            log_prior=prior.log(),
        )

    def loss(self, beta: Tensor) -> Tensor:
        """Add up the cross-entropy of the validation samples for one mixture.

        beta: the weights `[2]` of local mean and local covariance.
        """
        mean_share = beta[0]
        cov_share = beta[1]
        mean = mean_share * self.local + (1 - mean_share) * self.shared
        # Both covariances are diagonal here, so that their mixture is inverted by a division.
        weight = mean / (cov_share * self.ratio + 1 - cov_share)
        logits = self.z @ weight.T - (weight * mean).sum(1) / 2 + self.log_prior
        return F.cross_entropy(logits, self.y, reduction="sum")


def minimize_in_box(loss: Callable[[Tensor], Tensor], size: int, like: Tensor) -> Tensor | None:
    """Minimise a loss over [0, 1]^size by L-BFGS-B; return None without a finite loss.

    Ten steps are taken from the centre. The point has the type and device of `like`.
    """
    from scipy import optimize  # takes a while to import

    def value_and_slope(numbers: Any) -> tuple[float, Any]:
        point = torch.tensor(
            numbers,
            dtype=like.dtype,
            device=like.device,
            requires_grad=True,
        )
        with torch.enable_grad():
            value = loss(point)
        (slope,) = torch.autograd.grad(value, point)
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
    # In an order by label, a rank is the position less where the class begins.
    order = y.argsort(stable=True)
    counts = torch.bincount(y)
    class_offsets = (counts.cumsum(0) - counts)[y[order]]
    rank = torch.empty_like(y)
    rank[order] = torch.arange(len(y), device=y.device) - class_offsets
    return rank


def pack_symmetric(cov: Tensor) -> Tensor:
    """Return the lower triangle of a symmetric matrix as a vector."""
    rows, columns = torch.tril_indices(
        len(cov),
        len(cov),
        device=cov.device,
    )
    return cov[rows, columns]


def unpack_symmetric(triangle: Tensor) -> Tensor:
    """Return the symmetric matrix of a lower triangle, undoing `pack_symmetric`."""
    count = triangle.shape[-1]
    width = (math.isqrt(8 * count + 1) - 1) // 2
    rows, columns = torch.tril_indices(
        width,
        width,
        device=triangle.device,
    )
    # For each entry of the matrix its position in the triangle; (i, j) and (j, i) share one.
    index = torch.zeros(
        width,
        width,
        dtype=torch.int64,
        device=triangle.device,
    )
    numbers = torch.arange(count, device=triangle.device)
    index[rows, columns] = numbers
    index[columns, rows] = numbers
    return triangle[index]
