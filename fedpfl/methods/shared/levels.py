"""Levels of a network: neurons of each group that leave a given share of its scalars (FlexFL)."""

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
    params: Tree,
    wiring: Wiring,
    level: float,
    worths: list[float],
    tolerance: float,
    rounding: Rounding,
) -> Tensor:
    """Count the neurons of each group in a level, int64 `[groups]`.

    The share of group l is clip(100 worth_l / gamma, 0.01, 1), with the smallest whole gamma that
    leaves `level` of all scalars within `tolerance`, or else with the gamma that comes nearest.

    Args:
        params: the whole network.
        wiring: its groups of neurons.
        level: the share of all scalars; 1 is everything.
        worths: of each group, as `group_worths` has them.
        tolerance: how far above the level the share may be.
        rounding: of shares to whole neurons.
    """
    widths = torch.tensor(list(wiring.widths.values()))
    if level == 1:
        return widths
    total = tree.size(params)
    smallest_excess = math.inf
    nearest = widths
    largest_gamma = int(10000 * max(worths)) + 1  # with it all shares are the least, 0.01
    for gamma in range(1, largest_gamma + 1):
        # ---- The sub-model of this gamma.
        scaled_worths = torch.tensor(
            [100 * worth / gamma for worth in worths],
            dtype=torch.float64,
        )
        shares = scaled_worths.clamp(0.01, 1.0)
        # With a neuron for each group, counts of neurons are counts of groups.
        counts = neurons.neuron_counts({"width": widths}, shares, rounding)
        # ---- How far its share of all scalars is from the level; larger gammas have fewer.
        excess = _count_scalars(params, wiring, counts.tolist()) / total - level
        if abs(excess) < smallest_excess:
            smallest_excess = abs(excess)
            nearest = counts
        if excess <= tolerance:
            break
    return nearest


def group_worths(params: Tree, wiring: Wiring, apoz: tuple[float, ...]) -> list[float]:
    """Weigh each group by 1 - APoZ_l log P_l / log max P.

    P_l is the number of scalars in the group's layers.

    Args:
        params: the whole network.
        wiring: its groups of neurons.
        apoz: APoZ_l of each group; empty: 0 for all.

    Raises:
        FedpflError: for another number of APoZ_l than of groups.
    """
    groups = list(wiring.widths)
    if apoz and len(apoz) != len(groups):
        raise FedpflError(
            f"method.apoz has {len(apoz)} numbers for {len(groups)} groups of neurons"
        )
    # ---- P_l: the scalars with the group's neurons as outputs.
    scalars = dict.fromkeys(groups, 0)
    for name, leaf in params.items():
        output_axis = wiring.axes[name][0]
        if output_axis:
            group = output_axis.group
        else:
            group = name.rpartition(".")[0]  # an embedding's neurons are along its last axis
        if group in scalars:
            scalars[group] += leaf.numel()
    # ---- 1 - APoZ_l log P_l / log max P
    largest = math.log(max(scalars.values()))
    zero_shares = apoz or [0.0] * len(groups)
    worths = []
    for group, zeros in zip(groups, zero_shares, strict=True):
        worths.append(1 - zeros * math.log(scalars[group]) / largest)
    return worths


def _count_scalars(params: Tree, wiring: Wiring, counts: list[int]) -> int:
    """Count the scalars of a network with so many neurons in each group."""
    neurons_of_group = dict(zip(wiring.widths, counts, strict=True))
    total = 0
    for name, leaf in params.items():
        shape = list(leaf.shape)
        for dim, axis in enumerate(wiring.axes[name]):
            if axis is not None:
                shape[dim] = neurons_of_group[axis.group] * axis.block
        total += math.prod(shape)
    return total
