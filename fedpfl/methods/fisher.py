"""Diagonal of the empirical Fisher information, as sums over a client's training samples."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

from fedpfl import tree
from fedpfl.methods.base import Batch, mean_cross_entropy
from fedpfl.models import Bound, squared_gradients
from fedpfl.tree import Tree


def sums(
    net: Bound, logits: Callable[[Tree, Tensor], Tensor], scored: Tree, batch: Batch, by_sample: bool = True
) -> dict[str, Tree]:
    """For `Method.summarize`: gradients of log p(y | x) with respect to `scored`, summed, and the number of samples.

    logits: of `net` with the given scored entries, for some images. by_sample: sum each sample's squared gradient.
    """
    weight = torch.ones_like(batch.y, dtype=torch.float32) if batch.weight is None else batch.weight
    if by_sample:

        def loss(scored: Tree, x: Tensor, y: Tensor) -> Tensor:
            return mean_cross_entropy(logits(scored, x), Batch(x, y, None))

        gradient = squared_gradients(net, loss, scored, batch.x, batch.y, weight)
    else:

        def total(scored: Tree) -> Tensor:
            return mean_cross_entropy(logits(scored, batch.x), batch._replace(weight=weight)) * weight.sum()

        gradient = grad(total)(scored)
    return {"gradient": gradient, "samples": weight.sum()}


def mean(summary: dict[str, Tree]) -> Tree:
    """Per sample."""
    return tree.map(lambda total: total / summary["samples"], summary["gradient"])
