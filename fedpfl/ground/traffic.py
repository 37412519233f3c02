"""What travels between server and clients, counted from what is sent: nobody keeps a second ledger
by hand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Agreed, Known, Masked, Tree

INDEX_BITS = 32


class Traffic(NamedTuple):
    """Hold counts as int64 tensors: values (scalars) and bits (values and the positions of masked
    ones).
    """

    values: Tensor
    bits: Tensor


def count_traffic(sent: Tree) -> Traffic:
    """Count a tree that travels. Tensors travel whole; of `Masked` and `Agreed` only the selected
    entries travel, of `Known` none. Flags (bool tensors) are bits alone, no values.

    The positions of a mask cost the cheapest of a list of the selected, a list of the others (32
    bits an index) and a bitmap (one bit an entry), over the whole masked tree.
    """
    if isinstance(sent, Masked | Agreed):
        masks = tree.leaves(sent.mask)
        total = sum(mask.numel() for mask in masks)
        chosen = torch.stack([mask.sum() for mask in masks])
        width = tree.send(
            torch.tensor([_bits(leaf) for leaf in tree.leaves(sent.values)]), chosen.device
        )
        values = (chosen * (width > 1)).sum()
        if isinstance(sent, Agreed):
            return Traffic(values, (chosen * width).sum())
        listed = INDEX_BITS * torch.minimum(chosen.sum(), total - chosen.sum())
        return Traffic(values, (chosen * width).sum() + listed.clamp(max=total))
    if isinstance(sent, Known):
        return count_traffic({})
    if isinstance(sent, dict):
        parts = [count_traffic(part) for part in sent.values()]
        zero = torch.zeros((), dtype=torch.int64)
        return Traffic(sum((p.values for p in parts), zero), sum((p.bits for p in parts), zero))
    whole = 0 if sent.dtype == torch.bool else sent.numel()
    return Traffic(torch.tensor(whole), torch.tensor(sent.numel() * _bits(sent)))


def _bits(leaf: Tensor) -> int:
    return 1 if leaf.dtype == torch.bool else 8 * leaf.element_size()
