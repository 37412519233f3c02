"""Neurons of one network matched with another's, layer by layer, by optimal transport of weights.

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
    """Return the weight that compares each group's neurons, as positions in `params`.

    It is the first weight with the neurons as output.
    """
    device = tree.leaves(params)[0].device
    names = list(params)
    positions = [names.index(f"{group}.weight") for group in parts.wiring.widths]
    return torch.tensor(positions, device=device)


def cut_dense(plan: Tree, active: Tensor, params: Tree) -> Tree:
    """Return the small network between active neurons."""

    def cut(name: str, leaf: Tensor) -> Tensor:
        rows = leaf[active[plan["rows"][name]]]
        if name not in plan["columns"]:
            return rows
        return rows[:, active[plan["columns"][name]]]

    return {name: cut(name, leaf) for name, leaf in params.items()}


def embed_dense(small: Tree, mask: Tree) -> Tree:
    """Put a small network back into a full-sized one of zeros, undoing `cut_dense`.

    mask: which entries lie between active neurons.
    """

    def embed(leaf: Tensor, entries: Tensor) -> Tensor:
        return leaf.new_zeros(entries.shape).masked_scatter(entries, leaf)

    return tree.map(embed, small, mask)


def align_neurons(
    plan: Tree, writer: Tensor, source: Tree, target: Tree, mode: MatchingMode
) -> tuple[Tree, Tree]:
    """Return `source` with the neurons of `target`, and the mask of covered entries.

    An entry is covered if it lies between covered neurons, a neuron of `target` if some neuron of
    `source` goes there. Groups are matched from input to output at the first layer that makes
    them: its weights, their inputs already moved, where those are covered, and its bias.

    Args:
        plan: of the full network.
        writer: the `writing_weights` of the full network.
        source: a dense network.
        target: another.
        mode: how neurons are matched.
    """
    # ---- Step 1: the group of neurons along each axis of each tensor.
    group_of_neuron = [*plan["group"].tolist(), None]  # None: always active
    axis_groups: dict[str, list[int | None]] = {}
    for name in source:
        axis_groups[name] = []
        for side in ("rows", "columns"):
            if name in plan[side]:
                first_neuron = int(plan[side][name][0])
                axis_groups[name].append(group_of_neuron[first_neuron])

    # ---- Step 2: match the groups, from input to output.
    names = list(source)
    moves: list[Tensor] = []
    for group, position in enumerate(writer.tolist()):
        name = names[position]
        axis = axis_groups[name].index(group)
        input_group = axis_groups[name][1 - axis]
        input_move = None if input_group is None else moves[input_group]
        numbers = plan["rows" if axis == 0 else "columns"][name]
        block = len(numbers) // group_of_neuron.count(group)  # entries of a neuron along the axis
        features = _neuron_features(source, target, name, axis, input_move)
        ours, theirs = [side.unflatten(0, (-1, block)).flatten(1) for side in features]
        cost = torch.cdist(ours, theirs, compute_mode="use_mm_for_euclid_dist")
        moves.append(match_neurons(cost, mode))

    # ---- Step 3: move every tensor along the axes that have neurons.
    aligned = {}
    covered = {}
    for name, leaf in source.items():
        values = leaf.double()
        mask = torch.ones_like(target[name], dtype=torch.bool)
        for axis, axis_group in enumerate(axis_groups[name]):
            if axis_group is not None:
                values = move_neurons(values, axis, moves[axis_group])
                is_reached = reached_entries(moves[axis_group], values.shape[axis])
                mask &= is_reached.view(-1, *[1] * (leaf.dim() - axis - 1))
        aligned[name] = values.to(target[name].dtype).contiguous()
        covered[name] = mask
    return aligned, covered


def _neuron_features(
    source: Tree, target: Tree, name: str, axis: int, input_move: Tensor | None
) -> list[Tensor]:
    """Return the weights and bias of each neuron as a row, of both networks.

    Args:
        source: the network with the moving neurons.
        target: the other one.
        name: the weight with the neurons as output.
        axis: the axis along which they lie.
        input_move: the move along the other axis; None: its neurons are always active.
    """
    sides = [source[name].double(), target[name].double()]
    if input_move is not None:
        sides[0] = move_neurons(sides[0], 1 - axis, input_move)
        is_reached = reached_entries(input_move, sides[0].shape[1 - axis])
        # An input that nothing reaches would make all neurons alike in it.
        inputs = is_reached.nonzero().flatten()
        sides = [side.index_select(1 - axis, inputs) for side in sides]
    sides = [side.movedim(axis, 0).flatten(1) for side in sides]
    bias = name.removesuffix("weight") + "bias"
    if bias in source:
        biases = [params[bias].double().unsqueeze(1) for params in (source, target)]
        sides = [torch.cat(pair, 1) for pair in zip(sides, biases, strict=True)]
    return sides


def move_neurons(leaf: Tensor, axis: int, move: Tensor) -> Tensor:
    """Move the neurons along an axis; each is a block of entries."""
    blocks = leaf.unflatten(axis, (len(move), -1))
    share, origin = move.max(0)
    is_whole = share == 1
    if bool((is_whole | (share == 0)).all()):
        # Each target neuron gets one source neuron or none: copied, so that nothing is rounded.
        shape = (-1, *[1] * (blocks.dim() - axis - 1))
        is_covered = is_whole.view(shape)
        moved_blocks = torch.where(is_covered, blocks.index_select(axis, origin), 0.0)
    else:
        moved_blocks = torch.tensordot(blocks, move, ([axis], [0])).movedim(-1, axis)
    return moved_blocks.flatten(axis, axis + 1)


def reached_entries(move: Tensor, size: int) -> Tensor:
    """Select the entries, of `size` along an axis, of covered target neurons."""
    is_covered = move.sum(0) > 0
    return is_covered.repeat_interleave(size // move.shape[1])


def match_neurons(cost: Tensor, mode: MatchingMode) -> Tensor:
    """Return the move of least cost `[source, target]`.

    one: each neuron of the smaller side has one partner, the rest of the larger side none.
    balanced: all source neurons give as much, all target neurons get as much; then columns are
        divided by their sums.
    """
    if bool(cost.isfinite().all()):
        costs = cost.cpu()
    else:
        # Training diverged; there are no distances, and any move is as good.
        costs = torch.zeros(cost.shape, dtype=cost.dtype)
    amounts = solve_transport(costs) if mode == "balanced" else solve_assignment(costs)
    total = amounts.sum(0)
    return (amounts / total.where(total > 0, 1.0)).to(cost.device)


def solve_assignment(costs: Tensor) -> Tensor:
    """Return 1 for the pairs of least total cost, and 0 elsewhere."""
    from scipy import optimize  # takes a while to import

    rows, columns = optimize.linear_sum_assignment(costs.numpy())
    pairs = torch.zeros_like(costs)
    pairs[torch.from_numpy(rows), torch.from_numpy(columns)] = 1.0
    return pairs


def solve_transport(costs: Tensor) -> Tensor:
    """Return the amounts of least cost between sources and targets.

    They are the smallest whole ones with which all sources give the same amount, all targets get
    the same, and everything arrives. The solution is exact.
    """
    sources, targets = costs.shape
    total = math.lcm(sources, targets)
    give = total // sources
    get = total // targets
    if total <= 4 * max(sources, targets):
        # Few copies of each neuron are needed, and an assignment among them is fast.
        copies = costs.repeat_interleave(give, 0).repeat_interleave(get, 1)
        pairs = solve_assignment(copies)
        amounts = pairs.view(sources, give, targets, get).sum((1, 3))
    else:
        amounts = _solve_linear_program(costs, give, get)
    assert bool((amounts.sum(1) == give).all())
    assert bool((amounts.sum(0) == get).all())
    return amounts


def _solve_linear_program(costs: Tensor, give: int, get: int) -> Tensor:
    """Return the amounts of least cost; sources give `give` and targets get `get`."""
    from scipy import optimize, sparse

    sources, targets = costs.shape
    # ---- Constraints: a row for each source and each target, a column for each pair of them.
    pair = torch.arange(costs.numel())
    constraint = torch.cat([pair // targets, sources + pair % targets])
    ones = torch.ones(len(constraint)).numpy()
    matrix = sparse.coo_array((ones, (constraint.numpy(), pair.repeat(2).numpy()))).tocsc()
    limits = torch.tensor([give, get]).repeat_interleave(torch.tensor([sources, targets]))
    # ---- Solve; costs are scaled, as the solver's tolerances are absolute.
    largest = costs.max().clamp(min=torch.finfo(costs.dtype).tiny)
    scaled = (costs / largest).flatten()
    solution = optimize.linprog(
        scaled.numpy(),
        A_eq=matrix,
        b_eq=limits.numpy(),
        method="highs-ds",
    )
    # Corners of this polytope are whole numbers, but for the solver's rounding.
    return torch.from_numpy(solution.x).round().view(costs.shape)
