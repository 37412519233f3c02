"""Which entries are critical, how alike clients are in that, and who therefore collaborates:
FedCAC, FedPURIN.
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
    count = math.floor(tau * len(values) + 1e-9)  # so that 0.29 * 100 counts as 29
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    least = values.kthvalue(len(values) - count + 1).values
    above = torch.where(values > cutoff, values, torch.inf).amin()
    least = torch.where((least <= cutoff) & above.isfinite(), above, least)
    return score >= least


def mask_overlaps(masks: Tree) -> Tensor:
    """Return O `[clients, clients]`, float64, of stacked masks: |m_i - m_j| counts as n_i + n_j - 2
    (m_i and m_j).
    """
    flat = [leaf.flatten(1).float() for leaf in tree.leaves(masks)]
    both = torch.stack([(leaf @ leaf.T).double() for leaf in flat]).sum(
        0
    )  # whole numbers, exact below 2^24 a tensor
    own, other = both.diagonal().unsqueeze(1), both.diagonal()
    return torch.where(own > 0, 1 - (own + other - 2 * both) / (2 * own), 0.0)


def collaboration_mask(overlap: Tensor, played: int, beta: int) -> Tensor:
    """Tell whether client i takes the mean over client j too, bool `[clients, clients]`; over
    itself it always does.

    The threshold is counted down from the maximum, O_max - (1 - t / beta) (O_max - O_avg): exactly
    O_max at t = beta and where all overlaps are equal.
    """
    myself = torch.eye(len(overlap), dtype=torch.bool, device=overlap.device)
    if len(overlap) == 1:
        return myself
    pairs = overlap[~myself]
    gap = (pairs.amax() - pairs).mean()
    return (overlap >= pairs.amax() - (1 - played / beta) * gap) | myself
