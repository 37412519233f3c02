"""Sub-models: which entries of a network lie between chosen neurons, as tensors for method states.

A *plan* is made once from a network's wiring. Neurons of all hidden groups are numbered through;
one more number, the last, stands for everything always active (input channels, classes). `active` is a
bool vector `[neurons + 1]`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.models import Parts
from fedpfl.models.wiring import Axis, Wiring

Rounding = Literal["floor", "ceil", "round"]

SLACK = 1e-9  # so that 0.29 * 100 counts as 29


def build_plan(params: Tree, parts: Parts) -> Tree:
    """Return tensors that say for every entry between which neurons it lies.

    Returns:
        group, place, width: of each neuron, int64 `[neurons]`: the number of its group, its place
            in the group, and the neurons in the group.
        rows, columns: of each parameter, neuron numbers along axis 0 and (weights) axis 1.
        buffers: of each buffer, neuron numbers along axis 0.

    Raises:
        FedpflError: for networks of unknown wiring, or that have no hidden neurons.
    """
    wiring = _require_wiring(parts)
    device = tree.leaves(params)[0].device
    widths = list(wiring.widths.values())
    always_active = sum(widths)  # the number behind those of all neurons
    offsets = torch.tensor([0, *widths]).cumsum(0).tolist()
    group_start = dict(zip(wiring.widths, offsets, strict=False))

    def numbers_along(axis: Axis | None, size: int) -> Tensor:
        """Return the neuron numbers of the entries along one axis of a tensor."""
        if axis is None:
            return torch.full((size,), always_active, device=device)
        start = group_start[axis.group]
        numbers = torch.arange(start, start + wiring.widths[axis.group], device=device)
        # Flattened images have a block of entries for each channel.
        return numbers.repeat_interleave(axis.block)

    # ---- Parameters: rows are outputs, columns are inputs.
    rows = {}
    columns = {}
    for name, leaf in params.items():
        rows[name] = numbers_along(wiring.axes[name][0], len(leaf))
        if leaf.dim() > 1:
            columns[name] = numbers_along(wiring.axes[name][1], leaf.shape[1])

    # ---- Buffers: statistics belong to a neuron each, counters to none.
    buffers = {}
    for name in parts.statistics:
        axes = wiring.axes[name]
        if axes and axes[0]:
            buffers[name] = numbers_along(axes[0], wiring.widths[axes[0].group])
        else:
            buffers[name] = torch.tensor(always_active, device=device)

    # ---- Neurons, group by group.
    sizes = torch.tensor(widths, device=device)
    return {
        "group": torch.arange(len(widths), device=device).repeat_interleave(sizes),
        "place": torch.cat([torch.arange(width, device=device) for width in widths]),
        "width": sizes.repeat_interleave(sizes),
        "rows": rows,
        "columns": columns,
        "buffers": buffers,
    }


def _require_wiring(parts: Parts) -> Wiring:
    """Return a network's wiring. Raises FedpflError for a network without one."""
    try:
        wiring = parts.wiring
    except ValueError as error:
        raise FedpflError(
            f"the method trains parts of networks, and cannot tell this one's neurons: {error}"
        ) from None
    if not wiring.widths:
        raise FedpflError(
            "the method trains parts of networks, and this one has no hidden neurons; use a network"
            " with a hidden layer, or another method"
        )
    return wiring


def neuron_counts(plan: Tree, share: Tensor, rounding: Rounding = "floor") -> Tensor:
    """Count, for each neuron, the neurons of its group in a sub-model, `[neurons]`.

    share: the share of each group, 0-dimensional float64.
    """
    exact = share.double() * plan["width"]
    if rounding == "ceil":
        counts = (exact - SLACK).ceil()
    elif rounding == "round":
        counts = (exact + 0.5 + SLACK).floor()
    else:
        counts = (exact + SLACK).floor()
    # At least one neuron, as a layer of none would cut the network.
    return counts.clamp(min=1).minimum(plan["width"].double()).long()


def prefix_neurons(plan: Tree, share: Tensor, rounding: Rounding = "floor") -> Tensor:
    """Return the first neurons of every group, a share of them."""
    is_active = plan["place"] < neuron_counts(plan, share, rounding)
    return append_always_active(is_active)


def first_neurons(plan: Tree, counts: Tensor) -> Tensor:
    """Return the first neurons of each group, as many as `counts` `[groups]` says."""
    is_active = plan["place"] < counts[plan["group"]]
    return append_always_active(is_active)


def leading_neurons(plan: Tree, active: Tensor) -> Tensor:
    """Return as many of the first neurons of every group as it has active ones."""
    zeros = torch.zeros_like(plan["width"])
    counts = zeros.index_add(0, plan["group"], active[:-1].long())
    return first_neurons(plan, counts)


def rolling_neurons(
    plan: Tree, share: Tensor, shift: Tensor, rounding: Rounding = "floor"
) -> Tensor:
    """Return as many neurons as `prefix_neurons`, from number `shift` on and round about."""
    shifted_place = (plan["place"] - shift) % plan["width"]
    is_active = shifted_place < neuron_counts(plan, share, rounding)
    return append_always_active(is_active)


def top_neurons(plan: Tree, share: Tensor, score: Tensor, rounding: Rounding = "floor") -> Tensor:
    """Return the neurons of highest `score` `[neurons]` in every group, of equals the first.

    Random scores make it a random choice.
    """
    order = score.argsort(descending=True, stable=True)
    # A stable sort by group puts the best of each group first, which is how `place` counts.
    by_group = plan["group"][order].argsort(stable=True)
    order = order[by_group]
    rank = torch.empty_like(plan["place"]).scatter(0, order, plan["place"])
    return append_always_active(rank < neuron_counts(plan, share, rounding))


def entry_masks(plan: Tree, active: Tensor, params: Tree) -> Tree:
    """Select the entries of `params` between active neurons, as bools of its form."""

    def mask_entries(name: str, leaf: Tensor) -> Tensor:
        mask = active[plan["rows"][name]]
        if leaf.dim() > 1:
            # A weight lies between two neurons; both must be active.
            mask = mask.unsqueeze(1) & active[plan["columns"][name]]
        trailing_axes = [1] * (leaf.dim() - mask.dim())  # a convolution's kernel
        return mask.view(mask.shape + tuple(trailing_axes)).expand(leaf.shape)

    return {name: mask_entries(name, leaf) for name, leaf in params.items()}


def statistics_masks(plan: Tree, active: Tensor) -> Tree:
    """Select the BatchNorm statistics of active neurons (counters: always)."""
    return {name: active[numbers] for name, numbers in plan["buffers"].items()}


def sum_incoming(plan: Tree, values: Tree) -> Tensor:
    """Add up `values` over each neuron's incoming weights, without its bias: `[neurons]`.

    `values` is a tree like the parameters.
    """
    some_leaf = next(iter(values.values()))
    total = torch.zeros(len(plan["group"]) + 1, dtype=some_leaf.dtype, device=some_leaf.device)
    for name in plan["columns"]:
        row_sums = values[name].flatten(1).sum(1)
        # Not `index_add`, which adds in any order on a GPU.
        total = total.index_put(
            (plan["rows"][name],),
            row_sums,
            accumulate=True,
        )
    return total[:-1]


def append_always_active(is_active: Tensor) -> Tensor:
    """Append the entry that is always active to bools `[neurons]`."""
    always = torch.ones_like(is_active[:1])
    return torch.cat([is_active, always])
