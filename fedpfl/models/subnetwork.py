"""The network of some neurons alone, as small as they are few, in place of zeros around them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.models.net import Bound, Net
from fedpfl.models.wiring import Axis, Wiring


class Subnetwork:
    """Some neurons of a network; trees are cut down to them and put back.

    Args:
        entries: Of each parameter and buffer those that remain, as positions in the flattened
            tensor, int64 in the shape of the part.
    """

    def __init__(self, entries: Tree):
        self.entries = entries

    def cut_tree(self, values: Tree) -> Tree:
        """Return parameters, masks or buffers of these neurons alone."""
        part = {}
        for name, leaf in values.items():
            entries = self.entries[name]
            part[name] = leaf.flatten().index_select(0, entries.flatten()).view(entries.shape)
        return part

    def embed_tree(self, values: Tree, surroundings: Tree) -> Tree:
        """Return the whole tree of a part's `values` and its `surroundings`."""
        embedded = {}
        for name, leaf in values.items():
            entries = self.entries[name].flatten()
            around = surroundings[name]
            filled = around.flatten().scatter(0, entries, leaf.flatten())
            embedded[name] = filled.view(around.shape)
        return embedded

    def covers_tree(self, values: Tree, part: Tree) -> bool:
        """Check whether parameters are zero outside of their `part`."""
        # A NaN is no zero, and counts.
        counts = [leaf.count_nonzero() for leaf in values.values()]
        part_counts = [leaf.count_nonzero() for leaf in part.values()]
        return bool((torch.stack(counts) == torch.stack(part_counts)).all())


class PartBound(Bound):
    """Compute on a part, for trees of full size that are zero outside of it.

    Args:
        bound: With the buffers of the part.
        part: The neurons that remain.
        surroundings: Buffers of all neurons, by role.
        trained: The tree that is trained, at full size and as a part.
    """

    def __init__(
        self,
        bound: Bound,
        part: Subnetwork,
        surroundings: dict[str, Tree],
        trained: tuple[Tree, Tree],
    ):
        buffers = _embed_roles(part, bound.buffers, surroundings)
        super().__init__(bound.net, buffers, bound.training, bound.weight)
        self._part = part
        self._trained = trained

    def still(self, buffers: dict[str, Tree] | None = None) -> Bound:
        """Return the same in evaluation mode; see Bound."""
        buffers = self.buffers if buffers is None else buffers
        bound = self._cut_bound(buffers, training=False)
        return PartBound(
            bound,
            self._part,
            surroundings=buffers,
            trained=self._trained,
        )

    def features(self, params: Tree, x: Tensor, role: str = "main") -> tuple[Tensor, Tensor]:
        """Return logits and the head's input, at full size; see Bound."""
        # A loss may read an activation's answer to zero of absent neurons.
        bound = self.net.bind(self.buffers, self.training, self.weight)
        answer = bound.features(params, x, role)
        self.buffers = bound.buffers
        return answer

    def __call__(self, params: Tree, x: Tensor, role: str = "main") -> Tensor:
        """Return logits, computed on the part if `params` are zero outside of it."""
        trained, part_params = self._trained
        if params is not trained:
            # Of another model, such as a teacher, the part is not all.
            part_params = self._part.cut_tree(params)
            if not self._part.covers_tree(params, part_params):
                bound = self.net.bind(self.buffers, self.training, self.weight)
                logits = bound(params, x, role)
                self.buffers = bound.buffers
                return logits
        bound = self._cut_bound(self.buffers, self.training)
        logits = bound(part_params, x, role)
        self.buffers = _embed_roles(self._part, bound.buffers, self.buffers)
        return logits

    @property
    def part_buffers(self) -> dict[str, Tree]:
        """Return the buffers of the part."""
        return self._cut_bound(self.buffers, self.training).buffers

    def _cut_bound(self, buffers: dict[str, Tree], training: bool) -> Bound:
        part_buffers = {}
        for role, values in buffers.items():
            part_buffers[role] = self._part.cut_tree(values)
        return self.net.bind(part_buffers, training, self.weight)


def _embed_roles(
    part: Subnetwork, buffers: dict[str, Tree], surroundings: dict[str, Tree]
) -> dict[str, Tree]:
    embedded = {}
    for role, values in buffers.items():
        embedded[role] = part.embed_tree(values, surroundings[role])
    return embedded


def find_subnetwork(net: Net, values: Tree, trainable: Tree) -> Subnetwork | None:
    """Return the neurons that have part in a model, if they are not all.

    All other neurons have only zeros before and behind them, which never move.

    Args:
        net: The network.
        values: A model's parameters, or another tree.
        trainable: Which entries move: a bool for each leaf, or one for each entry.

    Returns:
        None as well where a network of fewer neurons might compute something else.
    """
    # ---- Step 1: most networks' smallest weight has neither a row nor a column of zeros, which
    # takes no wiring to see.
    weights = [name for name, leaf in net.params.items() if leaf.dim() > 1]
    if values.keys() != net.params.keys() or not weights:
        return None
    smallest = min(weights, key=lambda name: net.params[name].numel())
    entries = _find_live_entries(values[smallest], trainable[smallest])
    if _has_full_axes(entries):
        return None
    if tree.specs(values) != tree.specs(net.params):
        return None
    try:
        wiring = net.parts.wiring
    except ValueError:
        return None

    # ---- Step 2: a neuron remains with any entry that is not zero or moves.
    neurons = _find_live_neurons(wiring, values, trainable)
    counts = [int(present.sum()) for present in neurons.values()]
    is_whole = sum(counts) == sum(wiring.widths.values())
    if is_whole or not wiring.is_separable:
        return None
    # Constants, such as statistics of a frozen normalisation, stay at full size.
    if any(axis for name in net.constants for axis in wiring.axes[name]):
        return None
    remaining: Tree = {}
    for name, leaf in {**net.params, **net.buffers}.items():
        remaining[name] = _find_entries(leaf, wiring.axes[name], neurons)
    return Subnetwork(remaining)


def _find_live_neurons(wiring: Wiring, values: Tree, trainable: Tree) -> dict[str, Tensor]:
    """Mark the neurons that have an entry, bool `[neurons]` by group, at least one each."""
    neurons: dict[str, Tensor] = {}
    for name, leaf in values.items():
        entries = _find_live_entries(leaf, trainable[name])
        for dim, axis in enumerate(wiring.axes[name]):
            if axis is None:
                continue
            # Entries of a flattened image belong to its channel.
            along_axis = entries.movedim(dim, 0)
            by_neuron = along_axis.reshape(wiring.widths[axis.group], -1)
            has_entry = by_neuron.any(1)
            if axis.group in neurons:
                has_entry |= neurons[axis.group]
            neurons[axis.group] = has_entry

    # A layer needs a neuron.
    for remaining in neurons.values():
        remaining[0] |= ~remaining.any()
    return neurons


def _find_live_entries(leaf: Tensor, trainable: Tensor | bool) -> Tensor:
    """Mark the entries of a leaf that move, or are not zero."""
    is_filled = leaf != 0
    if trainable is True:
        return torch.ones_like(is_filled)
    return is_filled | trainable


def _has_full_axes(entries: Tensor) -> bool:
    """Check whether each row and each column has an entry."""
    by_row = entries.flatten(1)
    by_column = entries.transpose(0, 1).flatten(1)
    return bool(by_row.any(1).all()) and bool(by_column.any(1).all())


def _find_entries(
    leaf: Tensor, axes: tuple[Axis | None, ...], neurons: Mapping[str, Tensor]
) -> Tensor:
    """Return where a tensor's entries of remaining neurons are, in the shape of that part."""
    # The network's own values are not on the device of what trains.
    device = next(iter(neurons.values())).device
    positions = torch.arange(leaf.numel(), device=device).view(leaf.shape)
    for dim, axis in enumerate(axes):
        if axis is not None:
            is_present = neurons[axis.group].repeat_interleave(axis.block)
            positions = positions.index_select(dim, is_present.nonzero().flatten())
    return positions
