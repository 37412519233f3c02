"""Neurons of one network matched with those of another, layer by layer, by optimal transport of
their weights.

A *move* says where the neurons of a group go: `[source, target]`, float64, the shares of source
neurons in each target neuron. Its columns sum to 1, or to 0 where a target neuron gets nothing. Not
for vmap: branches, and asks scipy.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.models import Parts

MatchingMode = Literal["one", "balanced"]


def writing_weights(params: Tree, parts: Parts) -> Tensor:
    """Return for each group of neurons the parameter that they are compared by, as its position in
    `params`.
    """
    device, names = tree.leaves(params)[0].device, list(params)
    return torch.tensor(
        [names.index(f"{group}.weight") for group in parts.wiring.widths], device=device
    )


def cut_dense(plan: Tree, active: Tensor, params: Tree) -> Tree:
    """Return the small network between active neurons."""

    def cut(name: str, leaf: Tensor) -> Tensor:
        rows = leaf[active[plan["rows"][name]]]
        return rows[:, active[plan["columns"][name]]] if name in plan["columns"] else rows

    return {name: cut(name, leaf) for name, leaf in params.items()}


def embed_dense(small: Tree, mask: Tree) -> Tree:
    """Undo `dense`, with zeros around; `mask` says which entries lie between active neurons."""
    return tree.map(
        lambda leaf, own: leaf.new_zeros(own.shape).masked_scatter(own, leaf), small, mask
    )


def align_neurons(
    plan: Tree, writer: Tensor, source: Tree, target: Tree, mode: MatchingMode
) -> tuple[Tree, Tree]:
    """Return `source` with the neurons of `target`, and which of its entries lie between neurons
    that got something.

    Both are dense; `plan` and `writer` are those of the full network. Groups are matched from input
    to output at the
    first layer that makes them: its weights, their inputs already moved, where those got something,
    and its bias.
    """
    number = [*plan["group"].tolist(), None]
    axes = {
        name: tuple(
            number[int(side[name][0])] for side in (plan["rows"], plan["columns"]) if name in side
        )
        for name in source
    }
    names = list(source)
    moves: list[Tensor] = []
    for group, place in enumerate(writer.tolist()):
        name = names[place]
        axis = axes[name].index(group)
        sides = [source[name].double(), target[name].double()]
        inner = axes[name][1 - axis]
        if inner is not None:
            sides[0] = move_neurons(sides[0], 1 - axis, moves[inner])
            there = reached_entries(moves[inner], sides[0].shape[1 - axis]).nonzero().flatten()
            sides = [side.index_select(1 - axis, there) for side in sides]
        sides = [side.movedim(axis, 0).flatten(1) for side in sides]
        bias = name.removesuffix("weight") + "bias"
        if bias in source:
            both = zip(sides, (source, target), strict=True)
            sides = [
                torch.cat([side, params[bias].double().unsqueeze(1)], 1) for side, params in both
            ]
        numbers = plan["rows" if axis == 0 else "columns"][name]
        block = len(numbers) // number.count(group)  # entries of a neuron along the axis
        sides = [side.unflatten(0, (-1, block)).flatten(1) for side in sides]
        moves.append(
            match_neurons(
                torch.cdist(sides[0], sides[1], compute_mode="use_mm_for_euclid_dist"), mode
            )
        )
    aligned, covered = {}, {}
    for name, leaf in source.items():
        values, mask = leaf.double(), torch.ones_like(target[name], dtype=torch.bool)
        for axis, own in enumerate(axes[name]):
            if own is not None:
                values = move_neurons(values, axis, moves[own])
                there = reached_entries(moves[own], values.shape[axis])
                mask &= there.view(-1, *[1] * (leaf.dim() - axis - 1))
        aligned[name], covered[name] = values.to(target[name].dtype).contiguous(), mask
    return aligned, covered


def move_neurons(leaf: Tensor, axis: int, move: Tensor) -> Tensor:
    """Put the neurons along an axis, each a block of entries, in their new places; whole neurons
    stay as they are.
    """
    parts = leaf.unflatten(axis, (len(move), -1))
    share, origin = move.max(0)
    if bool(((share == 1) | (share == 0)).all()):
        there = (share == 1).view(-1, *[1] * (parts.dim() - axis - 1))
        return torch.where(there, parts.index_select(axis, origin), 0.0).flatten(axis, axis + 1)
    return torch.tensordot(parts, move, ([axis], [0])).movedim(-1, axis).flatten(axis, axis + 1)


def reached_entries(move: Tensor, size: int) -> Tensor:
    """Return which of `size` entries along an axis belong to target neurons that got something."""
    return (move.sum(0) > 0).repeat_interleave(size // move.shape[1])


def match_neurons(cost: Tensor, mode: MatchingMode) -> Tensor:
    """Return the move of least cost `[source, target]`.

    one: each neuron of the smaller side has one partner, the others of the larger side have none.
    balanced: all source neurons give as much, all target neurons get as much; then columns are
    divided by their sums. Weights that are no numbers any more have no distances: then any move is
    as good.
    """
    costs = cost.cpu() if bool(cost.isfinite().all()) else torch.zeros(cost.shape, dtype=cost.dtype)
    amounts = solve_transport(costs) if mode == "balanced" else solve_assignment(costs)
    total = amounts.sum(0)
    return (amounts / total.where(total > 0, 1.0)).to(cost.device)


def solve_assignment(costs: Tensor) -> Tensor:
    """Return 1 for each of the pairs of least cost, as many as fit, and 0 elsewhere."""
    from scipy import optimize  # takes a while to import

    rows, columns = optimize.linear_sum_assignment(costs.numpy())
    pairs = torch.zeros_like(costs)
    pairs[torch.from_numpy(rows), torch.from_numpy(columns)] = 1.0
    return pairs


def solve_transport(costs: Tensor) -> Tensor:
    """Return whole amounts between sources and targets, of least cost: the smallest ones with which
    all sources give the same amount, all targets get the same, and everything arrives.

    Exact. Either an assignment among copies of the neurons, fast if few are needed, or a linear
    program.
    """
    sources, targets = costs.shape
    whole = math.lcm(sources, targets)
    give, get = whole // sources, whole // targets
    if whole <= 4 * max(sources, targets):
        pairs = solve_assignment(costs.repeat_interleave(give, 0).repeat_interleave(get, 1))
        amounts = pairs.view(sources, give, targets, get).sum((1, 3))
    else:
        amounts = _solve_linear_program(costs, give, get)
    assert bool((amounts.sum(1) == give).all())
    assert bool((amounts.sum(0) == get).all())
    return amounts


def _solve_linear_program(costs: Tensor, give: int, get: int) -> Tensor:
    """Solve it as a linear program, where each source gives `give` and each target gets `get`."""
    from scipy import optimize, sparse

    sources, targets = costs.shape
    entry = torch.arange(costs.numel())
    sums = torch.cat([entry // targets, sources + entry % targets])
    rules = sparse.coo_array(
        (torch.ones(len(sums)).numpy(), (sums.numpy(), entry.repeat(2).numpy()))
    ).tocsc()
    limits = torch.tensor([give, get]).repeat_interleave(torch.tensor([sources, targets]))
    scaled = (costs / costs.max().clamp(min=torch.finfo(costs.dtype).tiny)).flatten()
    solved = optimize.linprog(scaled.numpy(), A_eq=rules, b_eq=limits.numpy(), method="highs-ds")
    return (
        torch.from_numpy(solved.x).round().view(costs.shape)
    )  # corners of this polytope are whole
