"""How clients' masks lie to each other after a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.engine import ranks
from fedpfl.engine.state import State
from fedpfl.methods import Method

MOST = 100
"""Clients that are compared; of more, those with the lowest numbers."""
EXACT = 2**24
"""Up to which float32 counts exactly."""


def compared(method: Method, state: State) -> dict[str, Any] | None:
    """Compare the masks of the clients that took part; None where the method has none, or there are no clients.

    clients: their numbers, at most MOST. tensors: by name its `entries`; `held`, how many of them 0, 1, ... clients
    hold; `both`, how many clients i and j both hold, `[clients, clients]`. All processes must call it.
    """
    if type(method).masks is Method.masks:
        return None
    own = [
        {"who": torch.tensor(client), "masks": tree.to(method.masks(state.server, state.client(client)), "cpu")}
        for client in state.rows.written[:MOST]
    ]
    found = {int(one["who"]): one["masks"] for one in (ranks.collect(own) if state.rows.mine else own)}
    clients = sorted(found)[:MOST]
    if not clients:
        return None
    stacked = tree.map(lambda leaf: leaf.flatten(1), tree.stack([found[client] for client in clients]))
    return {
        "clients": clients,
        "tensors": {
            name: {
                "entries": leaf.shape[1],
                "held": leaf.sum(0).bincount(minlength=len(leaf) + 1).tolist(),
                "both": _both(leaf).tolist(),
            }
            for name, leaf in stacked.items()
        },
    }


def _both(mask: Tensor) -> Tensor:
    """Count the entries that rows of `[clients, entries]` share, `[clients, clients]`."""
    parts = [part.float() for part in mask.split(max(1, EXACT // len(mask)), 1)]
    return torch.stack([(part @ part.T).long() for part in parts]).sum(0)
