"""Uploads between clients and the server: forged by attackers, aggregated by a defence."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.engine.keys import generator
from fedpfl.engine.protect import UploadError, require_numbers, untrained_upload
from fedpfl.engine.state import State
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.robust import Adversary, Attack, Defence, UploadAttack
from fedpfl.robust.forgery import Uploads


def forge_uploads(
    adversary: Adversary,
    method: Method,
    state: State,
    clients: list[int],
    weights: Tensor,
    uploads: Tree,
    seed: int,
) -> Tree:
    """Return a turn's uploads with those of attackers forged, if the attack is on uploads.

    Args:
        adversary: Who attacks, and how.
        method: Makes the upload without training, from which updates are counted.
        state: The state before the round.
        clients: Of the turn.
        weights: The share of each client in a mean, `[clients]`.
        uploads: Stacked, `[clients, ...]`.
        seed: Of the run.
    """
    # ---- Step 1: is any upload of this round forged?
    attack = adversary.attack
    round_number = state.round + 1
    hostile = torch.tensor([client in adversary.attackers for client in clients])
    is_forged = isinstance(attack, UploadAttack) and attack.is_active(round_number)
    if not is_forged or not bool(hostile.any()) or not tree.leaves(uploads):
        return uploads
    assert isinstance(attack, UploadAttack)

    # ---- Step 2: attackers see all uploads, as differences from that of a client without training
    center = find_center("attack", attack.is_centered, method, state, uploads)
    rows = flatten_rows(uploads)
    hostile = tree.send(hostile, rows.device)
    forged_rows = attack.forge_rows(
        Uploads(
            rows=rows - center,
            hostile=hostile,
            weights=weights,
            generator=generator(seed, "attack", round_number, clients[0]),
        )
    )
    all_rows = torch.zeros_like(rows)
    all_rows[hostile] = forged_rows + center
    return tree.by_row(hostile, unflatten_rows(all_rows, uploads), uploads)


def defend_uploads(
    defence: Defence,
    method: Method,
    state: State,
    clients: list[int],
    uploads: Tree,
    seed: int,
) -> Tree:
    """Return a turn's uploads with the robust aggregate in the place of each.

    Args:
        defence: How to aggregate.
        method: Makes the upload without training, from which updates are counted.
        state: The state before the round.
        clients: Of the turn.
        uploads: Stacked, `[clients, ...]`.
        seed: Of the run.

    Raises:
        FedpflError: There are fewer uploads than the defence needs.
    """
    round_number = state.round + 1
    if len(clients) < defence.least_clients:
        raise FedpflError(
            f"defence: round {round_number} has {len(clients)} uploads, and"
            f" {defence.least_clients} are needed to bear {getattr(defence, 'f', 0)} hostile ones;"
            " raise participation or lower defence.f"
        )
    center = find_center("defence", defence.is_centered, method, state, uploads)
    rows = flatten_rows(uploads) - center
    aggregate = defence.combine_rows(rows, generator(seed, "defence", round_number, clients[0]))
    # In the place of each upload: then a method's own weighted mean gives the aggregate.
    return unflatten_rows((aggregate + center).expand_as(rows), uploads)


def check_upload_form(rule: Attack | Defence, method: Method, net: Net) -> None:
    """Raise FedpflError where an attack or a defence cannot deal with a method's uploads."""
    if not isinstance(rule, Defence | UploadAttack):
        return
    group = "defence" if isinstance(rule, Defence) else "attack"
    server, client = method.init(net.params, net.parts)
    statistics = dict.fromkeys(method.buffers(), net.buffers)
    try:
        untrained_upload(method, server, client, statistics, group)
    except UploadError as error:
        # A rule without a center takes any numbers; the first round shows if they are some.
        is_open = error.reason == "unknown" and not rule.is_centered
        is_idle = error.reason == "nothing" and group == "attack"
        remedies = {"attack": "choose attack=label_flip or backdoor", "defence": "use defence=mean"}
        if not is_open and not is_idle:
            raise FedpflError(f"{error}; {remedies[group]}") from None


def find_center(
    group: str, is_centered: bool, method: Method, state: State, uploads: Tree
) -> Tensor:
    """Return the origin of updates, `[entries]`; zeros for a rule without a center.

    Args:
        group: Of the configuration, for messages.
        is_centered: Whether the rule counts updates from a center.
        method: Makes the upload without training.
        state: The state before the round.
        uploads: Stacked.

    Raises:
        FedpflError: Uploads hold more than numbers that can be averaged.
    """
    require_numbers(uploads, group, type(method).__name__)
    if not is_centered:
        return flatten_rows(uploads)[0].new_zeros(())
    initial = state.rows.initial
    statistics = {**state.server_buffers, **initial["buffers"]}
    untrained = untrained_upload(method, state.server, initial["client"], statistics, group)
    # By name: trees may list equal entries in another order.
    return tree.ravel(tree.map(lambda _, leaf: leaf, uploads, untrained))


def flatten_rows(stacked: Tree) -> Tensor:
    """Return a stacked tree as a matrix `[rows, entries]`."""
    leaves = tree.leaves(stacked)
    return torch.cat([tree.as_matrix(leaf) for leaf in leaves], 1)


def unflatten_rows(matrix: Tensor, like: Tree) -> Tree:
    """Undo `flatten_rows`."""
    leaves = tree.leaves(like)
    pieces = matrix.split([leaf[0].numel() for leaf in leaves], 1)
    shaped = []
    for piece, leaf in zip(pieces, leaves, strict=True):
        shaped.append(piece.reshape(leaf.shape).to(leaf.dtype))
    return tree.rebuild(like, shaped)
