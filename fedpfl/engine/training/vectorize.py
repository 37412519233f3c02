"""Apply a hook of one client to many clients together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedpfl.ground import tree

Hook = Callable[..., Any]
"""A function of one client, by a method or for one."""


def vmap_clients(hook: Hook, *stacked: Any, count: int | None = None) -> Any:
    """Apply a one-client function to every row of the stacked trees.

    Args:
        hook: Takes one client's part of each of `stacked`.
        stacked: Trees, or lists of tensors, with the clients on axis 0.
        count: How many clients there are, needed where the trees may have no leaves.
    """
    if count is None:
        count = _count_rows(stacked)

    def ignore_row_number(_: Tensor, *parts: Any) -> Any:
        return hook(*parts)

    # The row numbers make sure that vmap has an input even where a method keeps nothing per client.
    row_numbers = torch.arange(count)
    return vmap(ignore_row_number, randomness="different")(row_numbers, *stacked)


def _count_rows(stacked: tuple[Any, ...]) -> int:
    """Return the length of axis 0 of the first tensor."""
    for part in stacked:
        tensors = part if isinstance(part, list) else tree.leaves(part)
        if tensors:
            return len(tensors[0])
    raise ValueError("there is no tensor whose rows could be counted")
