"""Critical entries of a model, and collaboration of clients in which they are alike.

Used by FedCAC and FedPURIN.
"""

import math

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree


def select_highest(score: Tensor, tau: float, cutoff: float = -1.0) -> Tensor:
    """Select the floor(tau n) highest scores and those equal to the last of them.

    If this last one is not above `cutoff`: all that are; if there are none, as above.
    """
    values = score.flatten()
    # ---- The score of rank floor(tau n).
    count = math.floor(tau * len(values) + 1e-9)  # so that 0.29 * 100 counts as 29
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    threshold = values.kthvalue(len(values) - count + 1).values
    # ---- Scores at the cutoff or below say nothing: then fewer are selected.
    lowest_above = torch.where(values > cutoff, values, torch.inf).amin()
    is_too_low = (threshold <= cutoff) & lowest_above.isfinite()
    threshold = torch.where(is_too_low, lowest_above, threshold)
    return score >= threshold


def mask_overlaps(masks: Tree) -> Tensor:
    """Return the overlaps of stacked masks.

    O_ij = 1 - |m_i - m_j| / (2 |m_i|).

    `[clients, clients]`, float64; 0 where m_i is empty.
    """
    # Inner products are whole numbers, which float32 adds up exactly below 2^24 a tensor.
    flat = [tree.as_matrix(leaf).float() for leaf in tree.leaves(masks)]
    products = [(leaf @ leaf.T).double() for leaf in flat]
    common = torch.stack(products).sum(0)
    size_i = common.diagonal().unsqueeze(1)
    size_j = common.diagonal()
    distance = size_i + size_j - 2 * common  # |m_i - m_j|
    return torch.where(size_i > 0, 1 - distance / (2 * size_i), 0.0)


def collaboration_mask(overlap: Tensor, played: int, beta: int) -> Tensor:
    """Return a bool `[clients, clients]`: client i averages over client j too.

    A client always averages over itself. The threshold is counted down from the maximum, O_max -
    (1 - t / beta) (O_max - O_avg): exactly O_max at t = beta and where all overlaps are equal.
    """
    diagonal = torch.eye(
        len(overlap),
        dtype=torch.bool,
        device=overlap.device,
    )
    if len(overlap) == 1:
        return diagonal
    pairs = overlap[~diagonal]
    highest = pairs.amax()
    gap = (highest - pairs).mean()
    threshold = highest - (1 - played / beta) * gap
    return (overlap >= threshold) | diagonal
