"""Apply a hook of one client to many clients together."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedpfl.ground import tree

Hook = Callable[..., Any]
"""A function of one client, by a method or for one."""

VMAP_ERRORS = (
    "vmap: It looks like",
    "dynamic shape",
    "Cannot access data pointer",
    "aten::equal",
    "torch.allclose isn't",
)
"""What PyTorch says where a vectorised function asks for the values of a tensor."""
ONE_HOT_ADVICE = (
    "calls one_hot, which looks at the values of a tensor, but it is asked about many clients at"
    " once: write (y[:, None] == torch.arange(classes, device=y.device)).float()"
)
VMAP_ADVICE = (
    "looks at the values of a tensor (if, while, int(), .item(), x[mask], x[number]), but it is"
    " asked about many clients at once: use torch.where, x[number[None]][0], or find it out in"
    " before_training or after_training, which may look"
)


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


def vmap_advice(error: BaseException) -> str:
    """Return advice about a vectorised hook that looked at values, or ""."""
    is_vmap_error = any(sign in str(error) for sign in VMAP_ERRORS)
    if not isinstance(error, RuntimeError) or not is_vmap_error:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and "one_hot(" in (frames[-1].line or ""):
        return ONE_HOT_ADVICE
    return VMAP_ADVICE
