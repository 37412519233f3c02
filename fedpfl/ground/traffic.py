"""Count what travels between server and clients from the trees that are sent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Agreed, Known, Masked, Tree

INDEX_BITS = 32


class Traffic(NamedTuple):
    """Counts of what travels, as int64 tensors.

    Attributes:
        values: Scalars.
        bits: Bits of these scalars, and of the positions of masked ones.
    """

    values: Tensor
    bits: Tensor


def count_traffic(payload: Tree) -> Traffic:
    """Count the scalars and bits of a tree that travels.

    Of `Masked` and `Agreed` only the selected entries travel, of `Known` none. Flags (bool tensors)
    are bits alone, no values. The positions of a `Masked` tree cost the cheapest of a list of the
    selected entries, a list of the remaining ones (32 bits an index) and a bitmap (one bit an entry).
    """
    # What masks select is counted by tensors, so that counts stay on the device until the round's
    # numbers are fetched; all else by Python, which is quicker.
    values: Tensor | int = 0
    bits: Tensor | int = 0
    for part in _list_parts(payload):
        if isinstance(part, Tensor):
            values += 0 if part.dtype == torch.bool else part.numel()
            bits += part.numel() * _bits_per_entry(part)
        else:
            traffic = _count_masked(part)
            values = values + traffic.values
            bits = bits + traffic.bits
    return Traffic(values=torch.as_tensor(values), bits=torch.as_tensor(bits))


def _list_parts(payload: Tree) -> list[Tensor | Masked | Agreed]:
    """Return the leaves that travel whole, and the trees that travel in part."""
    if isinstance(payload, Known):
        return []
    if isinstance(payload, dict):
        return [part for value in payload.values() for part in _list_parts(value)]
    return [payload]


def _count_masked(payload: Masked | Agreed) -> Traffic:
    """Count the selected entries of a tree, and of Masked ones their positions."""
    masks = tree.leaves(payload.mask)
    entries = sum(mask.numel() for mask in masks)
    selected = torch.stack([mask.sum() for mask in masks])
    leaf_bits = torch.tensor([_bits_per_entry(leaf) for leaf in tree.leaves(payload.values)])
    bits_per_entry = tree.send(leaf_bits, selected.device)
    values = (selected * (bits_per_entry > 1)).sum()  # flags are no values
    value_bits = (selected * bits_per_entry).sum()
    if isinstance(payload, Agreed):
        return Traffic(values=values, bits=value_bits)
    index_list_bits = INDEX_BITS * torch.minimum(selected.sum(), entries - selected.sum())
    return Traffic(values=values, bits=value_bits + index_list_bits.clamp(max=entries))


def _bits_per_entry(leaf: Tensor) -> int:
    return 1 if leaf.dtype == torch.bool else 8 * leaf.element_size()
