"""All that a run knows between rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.tree import Tree


@dataclass(frozen=True)
class State:
    """Explicit trees of tensors and the number of rounds played.

    clients: every client's `mine`, stacked `[clients, ...]`.
    server_buffers, client_buffers: BatchNorm statistics by model role, at the server or stacked per client.
    """

    round: int
    server: Tree
    clients: dict[str, Tree]
    server_buffers: dict[str, Tree]
    client_buffers: dict[str, Tree]

    def buffers(self, client: int | Tensor | slice, count: int | None = None) -> dict[str, Tree]:
        """The buffers that a client starts from, by role; for several clients (`count` of them) stacked."""
        shared = self.server_buffers
        if count is not None:
            shared = {role: tree.repeat(buffers, count) for role, buffers in shared.items()}
        return {**shared, **{role: tree.take(rows, client) for role, rows in self.client_buffers.items()}}


def begin(method: Method, net: Net, clients: int, device: torch.device) -> State:
    """The state before round 1: every client and the server start from the net's initial parameters."""
    params, buffers = tree.to(net.params, device), tree.to(net.buffers, device)
    server, mine = method.init(params, net.parts)
    return State(
        round=0,
        server=server,
        clients=tree.repeat(mine, clients),
        server_buffers={role: buffers for role, policy in method.buffers.items() if policy == "aggregate"},
        client_buffers={
            role: tree.repeat(buffers, clients) for role, policy in method.buffers.items() if policy == "local"
        },
    )
