"""Levels of a network: how many neurons of each group leave a given share of its scalars (FlexFL)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.neurons import Rounding
from fedpfl.models.wiring import Wiring


def level_neuron_counts(
    params: Tree, wiring: Wiring, level: float, worth: list[float], tolerance: float, by: Rounding
) -> Tensor:
    """Return how many neurons of each group the level of a share of all scalars has, int64
    `[groups]`.

    The share of group l is clip(100 worth_l / gamma, 0.01, 1), with the smallest whole gamma that
    makes it `level` within `tolerance`, or else with the gamma that comes nearest; a level of 1 is
    everything. by: rounding of neurons.
    """
    sizes = torch.tensor(list(wiring.widths.values()))
    if level == 1:
        return sizes
    total, best, nearest = tree.size(params), math.inf, sizes
    for gamma in range(
        1, int(10000 * max(worth)) + 2
    ):  # with this last one all shares are the least
        shares = torch.tensor(
            [min(max(100 * own / gamma, 0.01), 1.0) for own in worth], dtype=torch.float64
        )
        kept = neurons.neuron_counts({"width": sizes}, shares, by)
        apart = _count_scalars(params, wiring, kept.tolist()) / total - level
        if abs(apart) < best:
            best, nearest = abs(apart), kept
        if apart <= tolerance:
            break
    return nearest


def group_worths(params: Tree, wiring: Wiring, apoz: tuple[float, ...]) -> list[float]:
    """Return what each group is worth keeping, 1 - APoZ_l log P_l / log max P; P_l: the scalars of
    its layers.

    apoz: APoZ_l of each group; empty: 0 for all. Raises FedpflError for another number of them.
    """
    groups = list(wiring.widths)
    if apoz and len(apoz) != len(groups):
        raise FedpflError(
            f"method.apoz has {len(apoz)} numbers for {len(groups)} groups of neurons"
        )
    scalars = dict.fromkeys(groups, 0)
    for name, leaf in params.items():
        axis = wiring.axes[name][0]
        group = (
            axis.group if axis else name.rpartition(".")[0]
        )  # an embedding's are along its last axis
        if group in scalars:
            scalars[group] += leaf.numel()
    largest = math.log(max(scalars.values()))
    zeros = apoz or [0.0] * len(groups)
    return [
        1 - share * math.log(scalars[group]) / largest
        for group, share in zip(groups, zeros, strict=True)
    ]


def _count_scalars(params: Tree, wiring: Wiring, kept: list[int]) -> int:
    """Count the scalars of a network with so many neurons in each group."""
    count = dict(zip(wiring.widths, kept, strict=True))
    total = 0
    for name, leaf in params.items():
        shape = list(leaf.shape)
        for place, axis in enumerate(wiring.axes[name]):
            if axis is not None:
                shape[place] = count[axis.group] * axis.block
        total += math.prod(shape)
    return total
