"""FedPHP's rounds as plain loops (ECML PKDD 2021; transfer and momentum as in the authors' code)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.methods.reference.moon import representation, still
from tests.methods.reference.plain import Result, Setting, Weights, average, hits, train


def mmd(f: Tensor, g: Tensor) -> Tensor:
    """Five Gaussian kernels around the mean squared distance, pair by pair."""
    both = torch.cat([f, g]).double()  # small differences of kernels near 1
    gaps = torch.stack([((row - both) ** 2).sum(1) for row in both])
    n = len(both)
    width = float(gaps.detach().sum()) / (n * n - n) + 1e-8
    kernel = sum(torch.exp(-gaps / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))
    own = len(f)
    return (
        (kernel[:own, :own] + kernel[own:, own:] - kernel[:own, own:] - kernel[own:, :own])
        .mean()
        .float()
    )


def local(
    s: Setting, shared: Weights, teacher: Weights, transfer: str, lam: float, t: int, i: int
) -> Weights:
    wise = still(s, teacher)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits, f = representation(model, x)
        wanted, g = representation(wise, x)
        extra = (
            mmd(f, g) if transfer == "mmd" else F.cross_entropy(logits, F.softmax(wanted / 4, 1))
        )
        return (1 - lam) * F.cross_entropy(logits, y) + lam * extra

    return train(s, shared, t, i, loss=loss)


def fedphp(s: Setting, transfer: str, lam: float, highest: float, planned: int) -> Result:
    """`planned`: the rounds of the whole run."""
    result, shared = Result(), s.initial
    inherited, count = [s.initial for _ in s.clients], [0 for _ in s.clients]

    def judged(i: int) -> Weights:
        return inherited[i] if count[i] else shared

    for t, cohort in enumerate(s.cohorts, 1):
        result.before.append([hits(s, judged(i), i) for i in cohort])
        trained = [local(s, shared, inherited[i], transfer, lam, t, i) for i in cohort]
        expected = max(int(len(cohort) / len(s.clients) * planned), 1)
        for i, w in zip(cohort, trained, strict=True):
            mu = min(highest * count[i] / expected, highest)
            mixed = {k: mu * inherited[i][k] + (1 - mu) * w[k] for k in w}
            inherited[i] = {k: v.to(w[k].dtype) for k, v in mixed.items()}
            count[i] += 1
        result.after.append([hits(s, inherited[i], i) for i in cohort])
        shared = average(s, cohort, trained)
        result.shared.append(shared)
        result.personal.append([judged(i) for i in range(len(s.clients))])
    return result
