"""The part of the server's tree that a method sends to a client, on both sides.

The node calls the method's `download`, too, with the tree of before round 1. By its answer it knows
the form of the sent tensors, and which of the server's entries they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.calls import Call, TrainCall
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Agreed, Known, Masked, Tree
from fedpfl.remote.trust import read_form


class NotSentError(FedpflError):
    """Refuse a method that reads entries which do not travel."""


class SentLeaf(NamedTuple):
    """Describe one tensor that is sent.

    Attributes:
        path: Dotted path in the tree.
        value: The whole tensor.
        mask: Which entries are sent; None if all are.
    """

    path: str
    value: Tensor
    mask: Tensor | None


def call_download(call: Call, client: int) -> Tree | None:
    """Call the method's `download`; None before an evaluation that needs nothing."""
    method = call.method
    server = call.state.server
    client_state = call.state.client(client)
    is_training = isinstance(call, TrainCall)
    if is_training:
        sampled = method.sample(server, call.draws.server(client))
        client_state |= tree.to(sampled, call.state.rows.device)
    # `prepare` may read entries that are at the node; `download` may do without its answer.
    with contextlib.suppress(KeyError):
        client_state = method.prepare(server, client_state)
    try:
        return method.download(server, client_state)
    except KeyError as entry:
        if not is_training:
            return None
        raise NotSentError(
            f"{type(method).__name__}.download asks for {entry} of a client's state"
        ) from None


def iterate_sent_leaves(sent: Tree, prefix: str = "") -> Iterator[SentLeaf]:
    """Yield the tensors that are sent; those of `Known` trees are not."""
    if isinstance(sent, Masked | Agreed):
        entries = tree.items(sent.values, prefix)
        for (path, leaf), mask in zip(entries, tree.leaves(sent.mask), strict=True):
            yield SentLeaf(path, leaf, mask)
    elif isinstance(sent, dict):
        for name, subtree in sent.items():
            yield from iterate_sent_leaves(subtree, f"{prefix}.{name}" if prefix else name)
    elif not isinstance(sent, Known):
        yield SentLeaf(prefix, sent, None)


# ---- The server


def drop_known(sent: Tree, initial_ids: Collection[int]) -> Tree:
    """Return a sent tree without its Known entries.

    Args:
        sent: The answer of `Method.download`.
        initial_ids: The id of each server entry that is as before round 1.

    Raises:
        NotSentError: A client does not have a Known entry.
    """
    if isinstance(sent, Known):
        for name, leaf in tree.items(sent.values):
            if id(leaf) not in initial_ids:
                raise NotSentError(
                    f"download counts on a client's knowing {name}, which is not as it was in the"
                    " beginning"
                )
        return {}
    if type(sent) is dict:
        return {name: drop_known(part, initial_ids) for name, part in sent.items()}
    return sent


# ---- A node


def complete_download(sent: Tree, own: Tree) -> Tree:
    """Return a received tree with the Known entries of a node's own `download`.

    Raises:
        FedpflError: It has another form.
    """
    if _describe_leaves(sent) != _describe_leaves(own):
        raise FedpflError("a message that sends other entries than the method does")
    return _fill_tree(own, iterate_sent_leaves(sent))


def _describe_leaves(sent: Tree) -> list[Any]:
    """Return the path and the form of each leaf, and whether it is masked."""
    leaves = iterate_sent_leaves(sent)
    return [(leaf.path, read_form(leaf.value), leaf.mask is None) for leaf in leaves]


def _fill_tree(own: Tree, leaves: Iterator[SentLeaf]) -> Tree:
    """Return the node's own tree with the received leaves in their places."""
    if isinstance(own, Known):
        return own
    if isinstance(own, Masked | Agreed):
        parts = [next(leaves) for _ in tree.leaves(own.values)]
        values = tree.rebuild(own.values, [part.value for part in parts])
        mask = tree.rebuild(own.mask, [part.mask for part in parts])
        return type(own)(values, mask)
    if isinstance(own, dict):
        return {name: _fill_tree(part, leaves) for name, part in own.items()}
    return next(leaves).value


def find_sent_entries(sent: Tree, own: Tree, initial_server: Tree) -> dict[str, Tensor]:
    """Return the server's entries that a received tree has, by their paths.

    Args:
        sent: As `complete_download` returns it.
        own: The answer of `download` to the tree of before round 1.
        initial_server: That tree.
    """
    path_of_leaf = {id(leaf): path for path, leaf in tree.items(initial_server)}
    entries: dict[str, Tensor] = {}
    leaves = zip(iterate_sent_leaves(sent), iterate_sent_leaves(own), strict=True)
    for leaf, own_leaf in leaves:
        path = path_of_leaf.get(id(own_leaf.value))
        if path is None:
            continue
        if leaf.mask is None:
            entries[path] = leaf.value
        elif leaf.value.is_floating_point():
            # A method that reads unsent entries fails by nan.
            entries[path] = torch.where(leaf.mask, leaf.value, torch.nan)
    return entries


def select_paths(server: Tree, entries: Mapping[str, Tree], path: str = "") -> Tree:
    """Return the server's tree with the given entries alone, without subtrees that have none."""
    if not isinstance(server, dict):
        return entries.get(path, {})
    selected = {}
    for name, part in server.items():
        subtree = select_paths(part, entries, f"{path}.{name}" if path else name)
        # Trees that are empty from the beginning stay, as hooks expect them.
        if tree.leaves(subtree) or not tree.leaves(part):
            selected[name] = subtree
    return selected
