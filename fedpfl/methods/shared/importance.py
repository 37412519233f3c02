"""How much a client's own value of an entry matters, and which entries are therefore personal.

A score is a tree of non-negative tensors; the mask of personal entries is everything strictly above
the q-quantile. Source: X. Chen et al., FedOBP, arXiv:2604.16574, section III and eqs. 5-8, 19.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree


def obp_score(model: Tree, server: Tree) -> Tree:
    """Return the Optimal-Brain-Damage score (theta_i - theta_g)^2 (eq. 19)."""
    return tree.map(
        lambda theta_i, theta_g: (theta_i - theta_g).square(),
        model,
        server,
    )


def published_obp_score(model: Tree, server: Tree) -> Tree:
    """Return |(theta_i - theta_g) theta_i|, the score behind the authors' result files."""
    return tree.map(
        lambda theta_i, theta_g: ((theta_i - theta_g) * theta_i).abs(),
        model,
        server,
    )


def movement_score(start: Tree, params: Tree) -> Tree:
    """Return |theta_start - theta|, how far the last local training moved each entry.

    Eq. 5, which the paper attributes to FedSelect and PSPFL.
    """
    return tree.map(
        lambda before, after: (before - after).abs(),
        start,
        params,
    )


def rescale_scores(scores: Tree) -> Tree:
    """Rescale each tensor to [0, 1].

    A constant tensor becomes zero, where the published code divides 0 by 0.
    """

    def rescale_leaf(leaf: Tensor) -> Tensor:
        if not leaf.numel():
            return leaf
        lowest = leaf.amin()
        span = leaf.amax() - lowest
        safe_span = torch.where(span > 0, span, 1)
        return torch.where(span > 0, (leaf - lowest) / safe_span, 0)

    return tree.map(rescale_leaf, scores)


def quantile_rank(q: float, n: int) -> int:
    """Return the index of the q-quantile among n sorted entries.

    It is floor(q (n - 1)) in float64, or an integer that is very near.
    """
    # 0.29 * 100 is 28.999..., which should count as 29.
    exact = q * (n - 1)
    nearest = round(exact)
    is_near = abs(exact - nearest) <= max(1e-9, n * 2.0**-52)
    return nearest if is_near else math.floor(exact)


def personal_count(q: float, n: int) -> int:
    """Count how many of n distinct scores lie strictly above the q-quantile.

    This reproduces the counts of Table II.
    """
    return n - 1 - quantile_rank(q, n)


def mask_above_quantile(scores: Tree, q: float, norm: str = "none") -> Tree:
    """Select the entries with a score strictly above the q-quantile of all (eqs. 7 and 8).

    An order statistic gives the mask of an interpolated quantile, exactly and for any number of
    entries.

    norm: `layer` rescales each tensor before; `global` is increasing and cannot change the mask, so
        it is `none`: rounding could only merge neighbours.
    """
    if norm == "layer":
        scores = rescale_scores(scores)
    values = tree.ravel(scores)
    threshold = order_statistic(values, q)
    return tree.map(lambda leaf: leaf > threshold, scores)


def order_statistic(values: Tensor, q: float) -> Tensor:
    """Return the q-quantile of `values` `[n]`, 0-dimensional.

    It is the entry at `quantile_rank` in ascending order.
    """
    n = values.numel()
    index = quantile_rank(q, n)
    count_from_top = n - index
    # Selecting the few largest is cheaper than ordering the many smaller ones.
    if count_from_top <= n // 8:
        return values.topk(count_from_top, sorted=False).values.amin()
    return values.kthvalue(index + 1).values
