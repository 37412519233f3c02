"""How much a client's own value of an entry matters, and which entries are therefore personal.

A score is a tree of non-negative tensors; the mask of personal entries is everything strictly above
the q-quantile.
Source: X. Chen et al., FedOBP, arXiv:2604.16574, section III and eqs. 5-8, 19.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree


def obp_score(model: Tree, server: Tree) -> Tree:
    """Return the Optimal-Brain-Damage score (theta_i - theta_g)^2 (eq. 19)."""
    return tree.map(lambda own, shared: (own - shared).square(), model, server)


def published_obp_score(model: Tree, server: Tree) -> Tree:
    """Return |(theta_i - theta_g) * theta_i|, the earlier score behind the authors' published
    result files.
    """
    return tree.map(lambda own, shared: ((own - shared) * own).abs(), model, server)


def movement_score(start: Tree, end: Tree) -> Tree:
    """Return |theta_start - theta_end|, how far the last local training went (eq. 5; FedSelect,
    PSPFL).
    """
    return tree.map(lambda before, after: (before - after).abs(), start, end)


def rescale_scores(scores: Tree) -> Tree:
    """Rescale each tensor to [0, 1]; a constant one becomes zero, where the published code divides
    0 by 0.
    """

    def rescale(leaf: Tensor) -> Tensor:
        low, span = leaf.amin(), leaf.amax() - leaf.amin()
        return torch.where(span > 0, (leaf - low) / torch.where(span > 0, span, 1), 0)

    return tree.map(rescale, scores)


def quantile_rank(q: float, n: int) -> int:
    """Return the q-quantile's index among n sorted entries: floor(q (n - 1)) in float64, or a very
    near integer.
    """
    exact = q * (n - 1)
    nearest = round(exact)
    return nearest if abs(exact - nearest) <= max(1e-9, n * 2.0**-52) else math.floor(exact)


def personal_count(q: float, n: int) -> int:
    """Count how many of n distinct scores lie strictly above the q-quantile (reproduces Table II)."""
    return n - 1 - quantile_rank(q, n)


def mask_above_quantile(scores: Tree, q: float, norm: str = "none") -> Tree:
    """Select the entries whose score lies strictly above the q-quantile of all entries (eqs. 7 and
    8).

    norm: `layer` rescales each tensor before; `global` is increasing and cannot change the mask, so
    it is `none`: rounding could only merge neighbours. An order statistic gives the mask of an
    interpolated quantile, exactly and for any number of entries.
    """
    if norm == "layer":
        scores = rescale_scores(scores)
    threshold = order_statistic(tree.ravel(scores), q)
    return tree.map(lambda leaf: leaf > threshold, scores)


def order_statistic(values: Tensor, q: float) -> Tensor:
    """Return the q-quantile of `values` `[n]`: the entry at `rank` in ascending order
    (0-dimensional).
    """
    n = values.numel()
    index = quantile_rank(q, n)
    above = n - index  # selecting the few largest is cheaper than ordering the many smaller
    if above <= n // 8:
        return values.topk(above, sorted=False).values.amin()
    return values.kthvalue(index + 1).values
