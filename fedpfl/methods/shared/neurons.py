"""Sub-models: which entries of a network lie between chosen neurons, as tensors that methods can
keep in their trees.

A *plan* is made once from a network's wiring. Neurons of all hidden groups are numbered through;
one more number, the last, stands for what is always active (input channels, classes). `active` is a
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
from fedpfl.models.wiring import Axis

Rounding = Literal["floor", "ceil", "round"]

SLACK = 1e-9  # so that 0.29 * 100 counts as 29


def build_plan(params: Tree, parts: Parts) -> Tree:
    """Return tensors that say for every entry of `params` (and every buffer) between which neurons
    it lies.

    group, place, width: of each neuron, int64 `[neurons]`: number of its group, place in it, and
    neurons in it.
    rows, columns: of each parameter, neuron numbers along axis 0 and (weights) axis 1. buffers:
    along axis 0. Raises FedpflError for networks whose wiring is not known.
    """
    try:
        wiring = parts.wiring
    except ValueError as error:
        raise FedpflError(
            f"the method trains parts of networks, and cannot tell this one's neurons: {error}"
        ) from None
    widths, device = list(wiring.widths.values()), tree.leaves(params)[0].device
    firsts = dict(zip(wiring.widths, torch.tensor([0, *widths]).cumsum(0).tolist(), strict=False))
    always = sum(widths)

    def numbers(axis: Axis | None, size: int) -> Tensor:
        if axis is None:
            return torch.full((size,), always, device=device)
        first = firsts[axis.group]
        return torch.arange(
            first, first + wiring.widths[axis.group], device=device
        ).repeat_interleave(axis.block)

    rows = {name: numbers(wiring.axes[name][0], len(leaf)) for name, leaf in params.items()}
    columns = {
        name: numbers(wiring.axes[name][1], leaf.shape[1])
        for name, leaf in params.items()
        if leaf.dim() > 1
    }
    buffers = {
        name: numbers(axes[0], wiring.widths[axes[0].group])
        if axes and axes[0]
        else torch.tensor(always, device=device)
        for name, axes in wiring.axes.items()
        if name not in params
    }
    sizes = torch.tensor(widths, device=device)
    return {
        "group": torch.arange(len(widths), device=device).repeat_interleave(sizes),
        "place": torch.cat([torch.arange(width, device=device) for width in widths]),
        "width": sizes.repeat_interleave(sizes),
        "rows": rows,
        "columns": columns,
        "buffers": buffers,
    }


def neuron_counts(plan: Tree, share: Tensor, rounding: Rounding = "floor") -> Tensor:
    """Return how many neurons of each neuron's group a sub-model has, `[neurons]`; `share`:
    0-dimensional float64.
    """
    exact = share.double() * plan["width"]
    near = {"floor": exact + SLACK, "ceil": exact - SLACK, "round": exact + 0.5 + SLACK}[rounding]
    whole = near.ceil() if rounding == "ceil" else near.floor()
    return whole.clamp(min=1).minimum(plan["width"].double()).long()


def prefix_neurons(plan: Tree, share: Tensor, rounding: Rounding = "floor") -> Tensor:
    """Return the first neurons of every group."""
    return append_always_active(plan["place"] < neuron_counts(plan, share, rounding))


def first_neurons(plan: Tree, counts: Tensor) -> Tensor:
    """Return the first neurons of each group, as many as `counts` `[groups]` says."""
    return append_always_active(plan["place"] < counts[plan["group"]])


def leading_neurons(plan: Tree, active: Tensor) -> Tensor:
    """Return as many of the first neurons of every group as it has active ones."""
    return first_neurons(
        plan, torch.zeros_like(plan["width"]).index_add(0, plan["group"], active[:-1].long())
    )


def rolling_neurons(
    plan: Tree, share: Tensor, shift: Tensor, rounding: Rounding = "floor"
) -> Tensor:
    """Return as many neurons of every group as `prefix`, from number `shift` on and round about."""
    return append_always_active(
        (plan["place"] - shift) % plan["width"] < neuron_counts(plan, share, rounding)
    )


def top_neurons(plan: Tree, share: Tensor, score: Tensor, rounding: Rounding = "floor") -> Tensor:
    """Return the neurons of highest `score` `[neurons]` in every group, of equals the first; random
    scores draw.
    """
    order = score.argsort(descending=True, stable=True)
    order = order[
        plan["group"][order].argsort(stable=True)
    ]  # group by group, the best first: as `place` counts
    rank = torch.empty_like(plan["place"]).scatter(0, order, plan["place"])
    return append_always_active(rank < neuron_counts(plan, share, rounding))


def entry_masks(plan: Tree, active: Tensor, params: Tree) -> Tree:
    """Return which entries of `params` lie between active neurons, as bools of its form."""

    def mask(name: str, leaf: Tensor) -> Tensor:
        own = active[plan["rows"][name]]
        if leaf.dim() > 1:
            own = own.unsqueeze(1) & active[plan["columns"][name]]
        return own.view(*own.shape, *[1] * (leaf.dim() - own.dim())).expand(leaf.shape)

    return {name: mask(name, leaf) for name, leaf in params.items()}


def statistics_masks(plan: Tree, active: Tensor) -> Tree:
    """Return which BatchNorm statistics belong to active neurons (counters: always)."""
    return {name: active[numbers] for name, numbers in plan["buffers"].items()}


def sum_incoming(plan: Tree, values: Tree) -> Tensor:
    """Add up `values` (a tree like the parameters) over each neuron's incoming weights, not its
    bias: `[neurons]`.
    """
    total = torch.zeros(len(plan["group"]) + 1, device=plan["group"].device)
    for name in plan["columns"]:
        total = total.index_add(0, plan["rows"][name], values[name].flatten(1).sum(1))
    return total[:-1]


def append_always_active(own: Tensor) -> Tensor:
    """Return `active` for the neurons `own` `[neurons]`, with the last entry, which is always
    active.
    """
    return torch.cat([own, torch.ones_like(own[:1])])
