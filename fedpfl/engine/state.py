"""All that a run knows between rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.engine.keys import generator
from fedpfl.engine.store import Store
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.tree import Tree


@dataclass(frozen=True)
class State:
    """Hold explicit trees of tensors and the number of rounds played.

    clients: every client's state, stacked `[clients, ...]`, wherever the run's Store keeps them.
    server_buffers, client_buffers: BatchNorm statistics by model role, at the server or stacked per client.
    stopping: of early stopping, stacked: each client's `last` loss, and whether it has `stopped`; {} without it.
    """

    round: int
    server: Tree
    clients: dict[str, Tree]
    server_buffers: dict[str, Tree]
    client_buffers: dict[str, Tree]
    stopping: dict[str, Tensor]

    def client(self, client: int | Tensor, device: torch.device) -> dict[str, Tree]:
        """Return a client's state, or several clients' stacked, on `device`."""

        def row(leaf: Tensor) -> Tensor:
            return leaf[client.to(leaf.device) if isinstance(client, Tensor) else client].to(device)

        return tree.map(row, self.clients)

    def buffers(self, client: int | Tensor | slice, count: int | None = None) -> dict[str, Tree]:
        """Return the buffers that a client starts from, by role; for several clients (`count` of them) stacked."""
        shared = self.server_buffers
        if count is not None:
            shared = {role: tree.repeat(buffers, count) for role, buffers in shared.items()}
        return {**shared, **{role: tree.take(rows, client) for role, rows in self.client_buffers.items()}}


def begin(
    method: Method,
    net: Net,
    clients: int,
    device: torch.device,
    store: Store | None = None,
    folder: Path | None = None,
    seed: int = 0,
    stopping: bool = False,
) -> State:
    """Return the state before round 1: every client and the server start from the net's initial parameters.

    folder: for a store on disk. seed: of what makes clients differ (`Method.init_clients`). stopping: early.
    """
    params, buffers = tree.to(net.params, device), tree.to(net.buffers, device)
    server, client = method.init(params, net.parts)
    stacked = (store or Store()).repeat(client, clients, device, folder)
    own = method.init_clients(generator(seed, "endow"), clients)
    tree.put_(tree.named(stacked, own), slice(None), own)
    roles = method.buffers()
    most = torch.full((clients,), torch.finfo(torch.float32).max, device=device)
    return State(
        round=0,
        server=server,
        clients=stacked,
        server_buffers={role: buffers for role, place in roles.items() if place == "aggregate"},
        client_buffers={role: tree.repeat(buffers, clients) for role, place in roles.items() if place == "local"},
        stopping={"last": most, "stopped": most < 0} if stopping else {},
    )
