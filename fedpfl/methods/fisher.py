"""Diagonal of the empirical Fisher information, as sums over a client's training samples."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpfl import tree
from fedpfl.methods.base import Batch, mean_cross_entropy
from fedpfl.tree import Tree

CHUNK = 8  # samples whose gradients are held at once


def sums(
    logits: Callable[[Tree, Tensor], Tensor], scored: Tree, batch: Batch, by_sample: bool = True
) -> dict[str, Tree]:
    """For `Method.summarize`: gradients of log p(y | x) with respect to `scored`, summed, and the number of samples.

    logits: of a model with the given scored entries, for some images. by_sample: sum each sample's squared gradient.
    """
    weight = torch.ones_like(batch.y, dtype=torch.float32) if batch.weight is None else batch.weight

    def total(scored: Tree, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        return mean_cross_entropy(logits(scored, x), Batch(x, y, share)) * share.sum()

    if by_sample:

        def one(x: Tensor, y: Tensor) -> Tree:
            return grad(total)(scored, x[None], y[None], weight.new_ones(1))

        gradient = tree.full_like(scored, 0.0)
        for x, y, share in zip(*(part.split(CHUNK) for part in (batch.x, batch.y, weight)), strict=True):
            each = vmap(one)(x, y)
            gradient = tree.map(lambda g, own, w=share: g + torch.tensordot(w, own.square(), 1), gradient, each)
    else:
        gradient = grad(total)(scored, batch.x, batch.y, weight)
    return {"gradient": gradient, "samples": weight.sum()}


def mean(summary: dict[str, Tree]) -> Tree:
    """Per sample."""
    return tree.map(lambda total: total / summary["samples"], summary["gradient"])
