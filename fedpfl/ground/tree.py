"""Trees of tensors: nested dicts and named tuples whose leaves are tensors. All operations on them
are here.

A *stacked* tree holds one entry per client on axis 0 of every leaf, `[clients, ...]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Tensor | dict[str, Tree] | NamedTuple; spelling it out recursively buys nothing from the type
# checker
Tree = Any


class Masked(NamedTuple):
    """Let only the entries of a tree travel that `mask` selects. `mask` has the structure of
    `values`, bool leaves.
    """

    values: Tree
    mask: Tree


class Agreed(NamedTuple):
    """Do as Masked, where both sides know the mask already: its positions need not travel."""

    values: Tree
    mask: Tree


class Known(NamedTuple):
    """Mark a tree that a client has without its being sent: of `Method.download` it is read, and
    not counted.
    """

    values: Tree


class Ragged(NamedTuple):
    """Mark what a client finds out whose first axis differs from client to client, the same for all
    of `values`.

    Hooks read `values` `[most, ...]`, zeros behind a client's own, and `real` `[most]`, bool: which
    are its own. Who marks something leaves `real` out.
    """

    values: Tree
    real: Tensor | None = None


def unmask_received(sent: Tree) -> Tree:
    """Return what a client sees of what was sent: zeros for the entries of `Masked` and `Agreed`
    that stayed behind.
    """
    if isinstance(sent, Masked | Agreed):
        return apply_mask(*sent)
    if isinstance(sent, Known):
        return sent.values
    return (
        {name: unmask_received(part) for name, part in sent.items()}
        if isinstance(sent, dict)
        else sent
    )


def map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` to corresponding leaves of `tree` and `rest`; the result has the structure of
    `tree`.
    """
    if isinstance(tree, dict):
        return {key: map(f, value, *(other[key] for other in rest)) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return type(tree)(*(map(f, *fields) for fields in zip(tree, *rest, strict=True)))
    return f(tree, *rest)


def items(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves with their dotted paths, in order."""
    if isinstance(tree, tuple):
        tree = tree._asdict()  # type: ignore[attr-defined]
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from items(value, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, tree


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves, in order."""
    return [leaf for _, leaf in items(tree)]


def rebuild(like: Tree, values: Sequence[Any]) -> Tree:
    """Return the structure of `like` with `values` as leaves, in order: the inverse of `leaves`."""
    rest = iter(values)
    return map(lambda _: next(rest), like)


def size(tree: Tree) -> int:
    """Count the scalars."""
    return sum(leaf.numel() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    """Return how many bytes the leaves take."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def specs(tree: Tree) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return type and shape of the leaves, by name."""
    return {name: (leaf.dtype, leaf.shape) for name, leaf in items(tree)}


def ravel(tree: Tree) -> Tensor:
    """Join all entries into one vector `[size]`, in the order of the leaves."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves(tree)])


def unravel(vector: Tensor, like: Tree) -> Tree:
    """Undo `ravel`: return views of `vector` with the structure and shapes of `like`."""
    shapes = [leaf.shape for leaf in leaves(like)]
    pieces = vector.split([shape.numel() for shape in shapes])
    return rebuild(like, [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])


def expand(prefix: Tree, like: Tree) -> Tree:
    """Return `like`'s structure with the leaves of `prefix`, in which one leaf may stand for a
    whole subtree.
    """
    if isinstance(prefix, dict):
        return {key: expand(prefix[key], value) for key, value in like.items()}
    return map(lambda _: prefix, like)


def full_like(tree: Tree, value: float | bool) -> Tree:
    """Return the structure and shapes of `tree` with all entries `value` (bool leaves for a bool
    value).
    """
    dtype = torch.bool if isinstance(value, bool) else None
    return map(lambda leaf: torch.full_like(leaf, value, dtype=dtype), tree)


def clone(tree: Tree) -> Tree:
    """Return a contiguous copy."""
    return map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def to(tree: Tree, device: torch.device | str) -> Tree:
    """Move all leaves."""
    return map(lambda leaf: leaf.to(device), tree)


def send(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor; to a GPU from pinned memory, so that the host does not wait until the GPU has
    come so far.
    """
    if tensor.device.type != "cpu" or torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetch(tree: Tree) -> Tree:
    """Copy small tensors to the host, in one transfer. Numbers are exact up to 2^53."""
    away = [leaf for leaf in leaves(tree) if leaf.device.type != "cpu"]
    if not away:
        return tree
    numbers = torch.cat([leaf.reshape(-1).double() for leaf in away]).cpu()
    parts = iter(numbers.split([leaf.numel() for leaf in away]))
    return map(
        lambda leaf: (
            leaf if leaf.device.type == "cpu" else next(parts).view(leaf.shape).to(leaf.dtype)
        ),
        tree,
    )


def where(mask: Tree, a: Tree, b: Tree) -> Tree:
    """Take entries of `a` where `mask` holds, else of `b`. A 0-dimensional mask (a client's flag)
    serves all leaves.
    """
    return map(torch.where, expand(mask, a), a, b)


def apply_mask(tree: Tree, mask: Tree) -> Tree:
    """Return the entries of `tree` where `mask` holds, zeros elsewhere."""
    return map(lambda leaf, here: torch.where(here, leaf, leaf.new_zeros(())), tree, mask)


def by_row(flags: Tensor, a: Tree, b: Tree) -> Tree:
    """Take rows of stacked `a` where `flags` `[rows]` holds, of `b` elsewhere."""
    return map(
        lambda one, other: torch.where(flags.view(-1, *[1] * (one.dim() - 1)), one, other), a, b
    )


def select(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the entries of a dict called so, in the order of `names`."""
    return {name: tree[name] for name in names}


def drop(tree: Tree, names: Iterable[str]) -> Tree:
    """Return the entries of a dict that are not called so, in their order."""
    return {name: value for name, value in tree.items() if name not in names}


def invert(mask: Tree) -> Tree:
    """Negate all leaves."""
    return map(lambda leaf: ~leaf, mask)


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack equal structures on a new axis 0."""
    return map(lambda *leaves: torch.stack(leaves), *trees)


def at_ragged(f: Callable[[Ragged], Tree], tree: Tree) -> Tree:
    """Apply `f` to what is Ragged, and leave the rest."""
    if isinstance(tree, Ragged):
        return f(tree)
    if isinstance(tree, tuple):
        return type(tree)(*(at_ragged(f, part) for part in tree))
    return (
        {name: at_ragged(f, part) for name, part in tree.items()}
        if isinstance(tree, dict)
        else tree
    )


def mark_real(tree: Tree) -> Tree:
    """Return a tree in which what is Ragged says that all of it is `real`, unless it says more."""

    def complete(own: Ragged) -> Ragged:
        first = leaves(own.values)[0]
        return (
            own
            if own.real is not None
            else own._replace(real=first.new_ones(len(first), dtype=torch.bool))
        )

    return at_ragged(complete, tree)


def stack_padded(trees: Sequence[Tree]) -> Tree:
    """Stack trees on a new axis 0, the first axes of their leaves filled up with zeros to the
    longest.
    """

    def stacked(*leaves: Tensor) -> Tensor:
        alike = all(leaf.shape == leaves[0].shape for leaf in leaves)
        return torch.stack(leaves) if alike else pad_sequence(list(leaves), batch_first=True)

    return map(stacked, *trees)


def repeat(tree: Tree, count: int) -> Tree:
    """Stack `count` copies on a new axis 0."""
    return map(lambda leaf: leaf.unsqueeze(0).expand(count, *leaf.shape).clone(), tree)


def take(stacked: Tree, index: int | slice | Tensor) -> Tree:
    """Return row `index` of all leaves: a view for an int or slice, a copy for an index tensor on
    any device.
    """
    on = _on(index)
    return map(lambda leaf: leaf[on(leaf.device)], stacked)


def put_(stacked: Tree, index: int | slice | Tensor, rows: Tree) -> None:
    """Write `rows` into rows `index` of all leaves, in place, whatever device they are on."""
    on = _on(index)

    def write(leaf: Tensor, row: Tensor) -> None:
        leaf[on(leaf.device)] = row.to(leaf)

    map(write, stacked, rows)


def _on(index: int | slice | Tensor) -> Callable[[torch.device], Any]:
    """Give `index` on the device asked for, sent to each once."""
    return cache(lambda device: send(index, device) if isinstance(index, Tensor) else index)


def squared_distance(a: Tree, b: Tree) -> Tensor:
    """Return |a - b|^2 over all entries (0-dimensional)."""
    return sum(leaves(map(lambda one, other: (one - other).square().sum(), a, b)))


def masked_mean(fallback: Tree, values: Tree, mask: Tree, weight: Tensor) -> Tree:
    """Return the element-wise mean over axis 0 of `values`, over the rows whose `mask` holds, by
    `weight` `[clients]`.

    An entry that no row's mask holds is taken from `fallback` (not stacked). Where all masks hold
    and the weights sum to 1 it is `mean`, bit for bit.
    """

    def add_up(kept: Tensor, leaf: Tensor, chosen: Tensor) -> Tensor:
        shares = weight.to(leaf.dtype)
        present = sum(
            torch.where(here, share, 0.0) for here, share in zip(chosen, shares, strict=True)
        )
        whole = torch.where(chosen.all(0), 1.0, present)  # an only row counts as one, exactly
        total = torch.zeros_like(leaf[0])
        for row, here, share in zip(leaf, chosen, shares, strict=True):
            total += torch.where(here, row * (share / whole), 0.0)
        return torch.where(chosen.any(0), total, kept)

    return map(add_up, fallback, values, mask)


def mean(stacked: Tree, weight: Tensor) -> Tree:
    """Return the weighted sum over axis 0 with `weight` `[clients]` (summing to 1), added up in row
    order.

    One fixed order and only element-wise arithmetic: equal uploads give equal bits whatever the
    number of threads.
    """
    total: list[Tensor] = []
    for rows, share in zip(
        zip(*(leaf.unbind() for leaf in leaves(stacked)), strict=True), weight, strict=False
    ):
        scaled = list(torch._foreach_mul(rows, share))  # one launch for all leaves
        if total:
            torch._foreach_add_(total, scaled)
        else:
            total = scaled
    return rebuild(stacked, total)


def average_statistics(stacked: Tree, weight: Tensor) -> Tree:
    """Return the `mean` over axis 0 of floats, and the largest of integers, which are counters."""
    return map(
        lambda leaf: mean(leaf, weight) if leaf.is_floating_point() else leaf.amax(0), stacked
    )
