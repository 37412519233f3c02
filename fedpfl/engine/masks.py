"""How clients' masks lie to each other after a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.backends import ranks
from fedpfl.engine.keys import track_global_draws
from fedpfl.engine.state import State
from fedpfl.engine.training.hook_checks import with_hook_checks
from fedpfl.ground import tree
from fedpfl.methods import Method

MOST = 100
"""Clients that are compared; of more, those with the lowest numbers."""
EXACT = 2**24
"""Up to which float32 counts exactly."""


def compare_masks(method: Method, state: State) -> dict[str, Any] | None:
    """Compare the masks of the clients that took part; None where the method has none, or there are
    no clients.

    clients: their numbers, at most MOST. tensors: by name its `entries`; `held`, how many of them
    0, 1, ... clients hold; `both`, how many clients i and j both hold, `[clients, clients]`. All
    processes must call it.
    """
    if type(method).masks is Method.masks:
        return None
    hooks = with_hook_checks(method)
    with track_global_draws(method, "masks", state.round):
        own = [
            {
                "who": torch.tensor(client),
                "masks": tree.to(hooks.masks(state.server, state.client(client)), "cpu"),
            }
            for client in state.rows.written[:MOST]
        ]
    found = {
        int(one["who"]): one["masks"] for one in (ranks.collect(own) if state.rows.mine else own)
    }
    clients = sorted(found)[:MOST]
    if not clients:
        return None
    names = found[clients[0]]
    tensors = {
        name: _told(torch.stack([found[client][name].flatten() for client in clients]))
        for name in names
    }
    return {"clients": clients, "tensors": tensors}


def _told(mask: Tensor) -> dict[str, Any]:
    """Return what masks.json says of a tensor's masks, `[clients, entries]`."""
    held, both = (
        torch.zeros(len(mask) + 1, dtype=torch.int64),
        torch.zeros(len(mask), len(mask), dtype=torch.int64),
    )
    for part in mask.split(max(1, EXACT // len(mask)), 1):
        numbers = part.float()
        held += numbers.sum(0).long().bincount(minlength=len(held))
        both += (numbers @ numbers.T).long()
    return {"entries": mask.shape[1], "held": held.tolist(), "both": both.tolist()}
