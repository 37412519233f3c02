"""Trees of tensors: nested dicts and named tuples with tensors as leaves.

All operations on them are here. A *stacked* tree holds one entry per client on axis 0 of every
leaf, `[clients, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Tensor | dict[str, Tree] | NamedTuple. Spelt out recursively, the type checker finds no more.
Tree = Any
Entries = dict[str, Tree]
"""A tree that is a dict: a client's state, buffers by role, what lies over a state."""


class Masked(NamedTuple):
    """A tree that sends only the entries selected by `mask`.

    Attributes:
        values: The tree.
        mask: Its structure with bool leaves.
    """

    values: Tree
    mask: Tree


class Agreed(NamedTuple):
    """A `Masked` tree with a mask known to both sides: positions need not travel."""

    values: Tree
    mask: Tree


class Known(NamedTuple):
    """A tree that a client has without its being sent.

    In the answer of `Method.download` it is read, and not counted as traffic.
    """

    values: Tree


class Ragged(NamedTuple):
    """A client's findings if the length of the first axis differs between clients.

    Attributes:
        values: A tree of leaves with the same first axis. Hooks read it padded with zeros to the
            longest client, `[longest, ...]`.
        real: Bool `[longest]`, the rows that are no padding. A hook that returns Ragged leaves it
            out.
    """

    values: Tree
    real: Tensor | None = None


def unmask_received(payload: Tree) -> Tree:
    """Return the tree that a client receives, zeros for entries that did not travel."""
    if isinstance(payload, Masked | Agreed):
        return apply_mask(payload.values, payload.mask)
    if isinstance(payload, Known):
        return payload.values
    if isinstance(payload, dict):
        return {name: unmask_received(part) for name, part in payload.items()}
    return payload


def map(f: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `f` to corresponding leaves of trees; the result has the structure of the first."""
    tree = trees[0]
    if isinstance(tree, dict):
        return {key: map(f, *[part[key] for part in trees]) for key in tree}
    if isinstance(tree, tuple):
        fields = zip(*trees, strict=True)
        return type(tree)(*[map(f, *parts) for parts in fields])
    return f(*trees)


def combine(f: Callable[[list[Any]], Any], trees: Sequence[Tree]) -> Tree:
    """Apply `f` to the list of corresponding leaves of trees of equal structure."""

    def combine_leaves(*leaves: Any) -> Any:
        return f(list(leaves))

    return map(combine_leaves, *trees)


def items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return leaves with their dotted paths, in order."""
    pairs: list[tuple[str, Any]] = []
    _append_items(tree, prefix, pairs)
    return iter(pairs)


# Generators within generators would take most of a hook's check.
def _append_items(tree: Tree, prefix: str, pairs: list[tuple[str, Any]]) -> None:
    """Append leaves with their dotted paths."""
    if isinstance(tree, tuple):
        tree = tree._asdict()  # type: ignore[attr-defined]
    if isinstance(tree, dict):
        for key, value in tree.items():
            _append_items(value, f"{prefix}.{key}" if prefix else key, pairs)
    else:
        pairs.append((prefix, tree))


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves, in order."""
    leaf_list: list[Any] = []
    _append_leaves(tree, leaf_list)
    return leaf_list


def _append_leaves(tree: Tree, leaf_list: list[Any]) -> None:
    """Append leaves, in order."""
    if isinstance(tree, tuple):
        tree = tree._asdict()  # type: ignore[attr-defined]
    if isinstance(tree, dict):
        for value in tree.values():
            _append_leaves(value, leaf_list)
    else:
        leaf_list.append(tree)


def rebuild(like: Tree, values: Sequence[Any]) -> Tree:
    """Return `like` with `values` as leaves, in order: the inverse of `leaves`."""
    iterator = iter(values)
    return map(lambda _: next(iterator), like)


def size(tree: Tree) -> int:
    """Count the scalars."""
    return sum(leaf.numel() for leaf in leaves(tree))


def copy_shared(tree: Tree, owner: Tree) -> Tree:
    """Return a tree with copies of those leaves that have memory of `owner`."""
    storages = {leaf.untyped_storage().data_ptr() for leaf in leaves(owner)}

    def copy_leaf(leaf: Tensor) -> Tensor:
        is_shared = leaf.untyped_storage().data_ptr() in storages
        return leaf.clone() if is_shared else leaf

    return map(copy_leaf, tree)


def nbytes(tree: Tree) -> int:
    """Count the bytes of the leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def specs(tree: Tree) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of each leaf, by its dotted path."""
    return {name: (leaf.dtype, leaf.shape) for name, leaf in items(tree)}


def ravel(tree: Tree) -> Tensor:
    """Join all entries into one vector `[size]`, in the order of the leaves."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves(tree)])


def unravel(vector: Tensor, like: Tree) -> Tree:
    """Undo `ravel`: return views of `vector` with the structure and shapes of `like`."""
    shapes = [leaf.shape for leaf in leaves(like)]
    pieces = vector.split([shape.numel() for shape in shapes])
    return rebuild(
        like,
        [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)],
    )


def expand(prefix: Tree, like: Tree) -> Tree:
    """Return the structure of `like`; one leaf of `prefix` may stand for a whole subtree."""
    if isinstance(prefix, dict):
        return {key: expand(prefix[key], value) for key, value in like.items()}
    return map(lambda _: prefix, like)


def full_like(tree: Tree, value: float | bool) -> Tree:
    """Return the tree with all entries `value`; a bool makes bool leaves."""
    dtype = torch.bool if isinstance(value, bool) else None
    return map(
        lambda leaf: torch.full_like(leaf, value, dtype=dtype),
        tree,
    )


def clone(tree: Tree) -> Tree:
    """Return a contiguous copy."""
    return map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def to(tree: Tree, device: torch.device | str) -> Tree:
    """Move all leaves."""
    return map(lambda leaf: leaf.to(device), tree)


def as_type_of(tree: Tree, like: Tensor) -> Tree:
    """Return the leaves on another tensor's device and of its dtype."""
    return map(lambda leaf: leaf.to(like), tree)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor to a device, to a GPU without making the host wait."""
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    # A copy from pageable memory would wait until the GPU has done all work before it.
    return tensor.pin_memory().to(device, non_blocking=True)


def fetch(tree: Tree) -> Tree:
    """Copy small tensors to the host in one transfer. Whole numbers are exact up to 2^53."""
    on_device = [leaf for leaf in leaves(tree) if leaf.device.type != "cpu"]
    if not on_device:
        return tree
    # One transfer waits for the GPU once; float64 holds counters of int64 up to 2^53.
    vector = torch.cat([leaf.reshape(-1).double() for leaf in on_device]).cpu()
    pieces = iter(vector.split([leaf.numel() for leaf in on_device]))

    def on_host(leaf: Tensor) -> Tensor:
        if leaf.device.type == "cpu":
            return leaf
        return next(pieces).view(leaf.shape).to(leaf.dtype)

    return map(on_host, tree)


def where(mask: Tree, a: Tree, b: Tree) -> Tree:
    """Take entries of `a` where `mask` holds, else of `b`.

    A 0-dimensional mask, such as a client's flag, serves all leaves.
    """
    return map(torch.where, expand(mask, a), a, b)


def apply_mask(tree: Tree, mask: Tree) -> Tree:
    """Return the entries of `tree` where `mask` holds, zeros elsewhere."""
    return map(
        lambda leaf, selected: torch.where(selected, leaf, leaf.new_zeros(())),
        tree,
        mask,
    )


def as_matrix(leaf: Tensor) -> Tensor:
    """Return a stacked leaf `[rows, ...]` as `[rows, entries]`."""
    # A scalar of each row has no axis to flatten.
    return leaf.unsqueeze(1).flatten(1)


def by_row(flags: Tensor, a: Tree, b: Tree) -> Tree:
    """Take rows of stacked `a` where `flags` `[rows]` holds, of `b` elsewhere."""

    def choose_rows(a_leaf: Tensor, b_leaf: Tensor) -> Tensor:
        trailing_axes = [1] * (a_leaf.dim() - 1)
        return torch.where(flags.view((-1, *trailing_axes)), a_leaf, b_leaf)

    return map(choose_rows, a, b)


def select(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the entries of a dict with these names, in the order of `names`."""
    return {name: tree[name] for name in names}


def drop(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the entries of a dict without those of these names, in their order."""
    return {name: value for name, value in tree.items() if name not in names}


def invert(mask: Tree) -> Tree:
    """Negate all leaves."""
    return map(lambda leaf: ~leaf, mask)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack equal structures on a new axis 0."""
    return combine(torch.stack, trees)


def concatenate_trees(trees: Sequence[Tree]) -> Tree:
    """Concatenate the leaves of equal structures on axis 0."""
    return combine(torch.cat, trees)


def at_ragged(f: Callable[[Ragged], Tree], tree: Tree) -> Tree:
    """Apply `f` to the Ragged parts of a tree, and leave the rest."""
    if isinstance(tree, Ragged):
        return f(tree)
    if isinstance(tree, tuple):
        return type(tree)(*(at_ragged(f, part) for part in tree))
    if isinstance(tree, dict):
        return {name: at_ragged(f, part) for name, part in tree.items()}
    return tree


def mark_real(tree: Tree) -> Tree:
    """Return the tree with all rows `real` in Ragged parts that do not say it."""

    def mark_all(ragged: Ragged) -> Ragged:
        if ragged.real is not None:
            return ragged
        leaf = leaves(ragged.values)[0]
        return ragged._replace(real=leaf.new_ones(len(leaf), dtype=torch.bool))

    return at_ragged(mark_all, tree)


def stack_padded(trees: Sequence[Tree]) -> Tree:
    """Stack trees on a new axis 0, with Ragged parts padded by zeros."""
    first = trees[0]
    if isinstance(first, Ragged):
        return combine(lambda leaves: pad_sequence(leaves, batch_first=True), trees)
    if isinstance(first, dict):
        return {name: stack_padded([tree[name] for tree in trees]) for name in first}
    return stack(trees)


def repeat(tree: Tree, count: int) -> Tree:
    """Stack `count` copies on a new axis 0."""
    return map(
        lambda leaf: leaf.unsqueeze(0).expand(count, *leaf.shape).clone(),
        tree,
    )


def take(stacked: Tree, index: int | slice | Tensor) -> Tree:
    """Return row `index` of all leaves.

    It is a view for an int or slice, and a copy for an index tensor, which may be on any device.
    """
    index_on = _index_by_device(index)
    return map(lambda leaf: leaf[index_on(leaf.device)], stacked)


def put_(stacked: Tree, index: int | slice | Tensor, rows: Tree) -> None:
    """Write `rows` into rows `index` of all leaves, in place, on any device."""
    index_on = _index_by_device(index)

    def write_row(leaf: Tensor, row: Tensor) -> None:
        leaf[index_on(leaf.device)] = row.to(leaf)

    map(write_row, stacked, rows)


def _index_by_device(index: int | slice | Tensor) -> Callable[[torch.device], Any]:
    """Return a function from devices to `index` there, which is sent to each device once."""
    if not isinstance(index, Tensor):
        return lambda device: index
    return cache(lambda device: send(index, device))


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return |a - b|^2 over all entries (0-dimensional)."""
    return sum(leaves(map(lambda a_leaf, b_leaf: (a_leaf - b_leaf).square().sum(), a, b)))


def masked_mean(fallback: Tree, values: Tree, mask: Tree, weight: Tensor) -> Tree:
    """Return each entry's weighted mean over the clients with `mask` set.

    Where all masks hold and the weights sum to 1 it is `mean`, bit for bit.

    Args:
        fallback: The tree, not stacked, with the entries that no client's mask holds.
        values: The stacked tree.
        mask: Its structure with bool leaves.
        weight: Weights `[clients]`.
    """

    def average(fallback_leaf: Tensor, rows: Tensor, selected: Tensor) -> Tensor:
        shares = weight.to(rows.dtype)
        share_sum = sum(
            torch.where(is_selected, share, 0.0)
            for is_selected, share in zip(selected, shares, strict=True)
        )
        # Shares of all clients count as 1 exactly, although their sum is rounded.
        share_sum = torch.where(selected.all(0), 1.0, share_sum)
        total = torch.zeros_like(rows[0])
        for row, is_selected, share in zip(rows, selected, shares, strict=True):
            # One client after the other, as in `mean`: a sum over axis 0 may add in another order.
            total += torch.where(
                is_selected,
                row * (share / share_sum),
                0.0,
            )
        return torch.where(selected.any(0), total, fallback_leaf)

    return map(average, fallback, values, mask)


def mean(stacked: Tree, weight: Tensor) -> Tree:
    """Return the weighted mean over axis 0, for `weight` `[clients]` that sums to 1.

    Rows are added in their order and element by element, so that equal uploads give equal bits
    for any number of threads.
    """
    total: list[Tensor] = []
    clients = zip(*(leaf.unbind() for leaf in leaves(stacked)), strict=True)
    for client_leaves, share in zip(clients, weight, strict=False):
        scaled = list(torch._foreach_mul(client_leaves, share))  # one launch for all leaves
        if total:
            torch._foreach_add_(total, scaled)
        else:
            total = scaled
    return rebuild(stacked, total)


def average_statistics(stacked: Tree, weight: Tensor) -> Tree:
    """Return the `mean` of floats and the maximum of integers, which are counters."""

    def average(leaf: Tensor) -> Tensor:
        # BatchNorm counts its batches in an integer; a mean would be no integer.
        return mean(leaf, weight) if leaf.is_floating_point() else leaf.amax(0)

    return map(average, stacked)
