"""Comparison of clients' masks after a run."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.engine.keys import track_global_draws
from fedpfl.engine.state import State
from fedpfl.ground import tree
from fedpfl.ground.records import Record
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method

MOST = 100
"""How many clients are compared at most: those with the lowest numbers."""
EXACT = 2**24
"""Up to which number float32 counts exactly."""


def compare_masks(method: Method, state: State) -> Record | None:
    """Compare the masks of the clients that took part.

    Returns:
        `clients`, their numbers, at most MOST, and `tensors`, by name: `entries`; `held`, how many
        entries 0, 1, ... clients hold; `both`, how many clients i and j both hold, `[clients,
        clients]`. None where the method has no masks, or no client took part.
    """
    if type(method).masks is Method.masks:
        return None
    masks_by_client: dict[int, Tree] = {}
    with track_global_draws(method, ("masks", state.round)):
        for client in state.rows.stored_clients[:MOST]:
            masks = method.masks(state.server, state.client(client))
            masks_by_client[client] = tree.to(masks, "cpu")
    clients = [*masks_by_client]
    if not clients:
        return None
    tensors = {}
    for name in masks_by_client[clients[0]]:
        rows = [masks_by_client[client][name].flatten() for client in clients]
        tensors[name] = _count_shared_entries(torch.stack(rows))
    return {"clients": clients, "tensors": tensors}


def _count_shared_entries(mask: Tensor) -> Record:
    """Return the counts in masks.json of one tensor's masks, `[clients, entries]`."""
    clients, entries = mask.shape
    counts = torch.zeros(clients + 1, dtype=torch.int64)
    both = torch.zeros(clients, clients, dtype=torch.int64)
    # Piece by piece, so that sums of float32 stay exact.
    for piece in mask.split(max(1, EXACT // clients), 1):
        flags = piece.float()
        counts += flags.sum(0).long().bincount(minlength=len(counts))
        both += (flags @ flags.T).long()
    return {"entries": entries, "held": counts.tolist(), "both": both.tolist()}
