"""All that a run knows between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedpfl.engine.keys import generator, track_global_draws
from fedpfl.engine.store import Rows, RowStorage
from fedpfl.ground import tree
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import STORED, Method
from fedpfl.models import Net, Parts


@dataclass(frozen=True)
class State:
    """Hold explicit trees of tensors and the number of rounds played.

    Attributes:
        round: How many rounds have been played.
        server: The server's tree.
        rows: Every client's state, and its BatchNorm statistics that stay local.
        server_buffers: BatchNorm statistics at the server, by model role.
        stopping: Of early stopping, stacked: each client's `last` loss, and whether it has
            `stopped`; {} without it.
        members: The rows of those who take part, where `rows` are newcomers'.
        privacy: Of a private run, the bound on updates where it adapts.
    """

    round: int
    server: Tree
    rows: Rows
    server_buffers: Entries
    stopping: dict[str, Tensor]
    members: Rows | None = None
    privacy: dict[str, Tensor] = field(default_factory=dict)

    @property
    def clients(self) -> Entries:
        """Return a copy of what every client keeps, stacked `[clients, ...]`."""
        return self.rows.take("client", range(self.rows.clients))

    @property
    def client_buffers(self) -> Entries:
        """Return a copy of every client's local statistics by model role, stacked."""
        return self.rows.take("buffers", range(self.rows.clients))

    def client(self, client: int | Sequence[int]) -> Entries:
        """Return a client's state with the engine's FACTS, as hooks see it; stacked of several."""
        return {**self.rows.take("client", client), **self.facts(client)}

    def common(self, clients: Sequence[int]) -> Entries:
        """Return several clients' states as the server's hooks see them.

        Where networks are of several kinds, these are the entries that have one form in all.
        """
        entries = tree.select(self.rows.take("client", clients), self.rows.common["client"])
        return {**entries, **self.facts(clients)}

    def facts(self, client: int | Sequence[int]) -> Entries:
        """Return the FACTS of a client; of several clients stacked."""
        # Newcomers are numbered behind those who take part.
        offset = self.members.clients if self.members else 0
        number = tree.send(torch.tensor(client) + offset, self.rows.device)
        newcomer = torch.full_like(number, self.members is not None, dtype=torch.bool)
        return {
            **self.rows.take("facts", client),
            "number": number,
            "newcomer": newcomer,
            "statistics": self.buffers(client),
        }

    def others(self) -> Callable[[Sequence[int]], Entries]:
        """Return a function that gives the stacked states of clients that take part."""
        state = self
        if self.members:
            state = replace(self, rows=self.members, members=None)
        return lambda numbers: state.common([*numbers])

    def buffers(self, client: int | Sequence[int]) -> Entries:
        """Return the statistics that a client starts from, by model role; stacked of several."""
        shared = self.server_buffers
        if not isinstance(client, int):
            shared = {role: tree.repeat(buffers, len(client)) for role, buffers in shared.items()}
        return {**shared, **self.rows.take("buffers", client)}


def make_initial_state(
    method: Method,
    net: Net,
    clients: int,
    device: torch.device,
    storage: RowStorage | None = None,
    seed: int = 0,
    stopping: bool = False,
) -> State:
    """Return the state before round 1: all start from the net's initial parameters.

    Args:
        method: Is told how many clients there are, where the net does not know it better.
        net: Has the initial parameters and statistics. Networks of several kinds go round among
            clients unless it knows better.
        clients: How many there are.
        device: Of the model.
        storage: Where clients' states are kept; by default with the model.
        seed: Of what makes clients differ (`Method.init_clients`).
        stopping: Whether clients stop early.
    """
    # ---- The method's initial trees for each kind of network; that of the server is one for all
    facts = {name: torch.tensor(False, device=device) for name in STORED}
    placements = method.buffers()
    servers = []
    rows: list[Entries] = []
    with track_global_draws(method, (seed, "init", "process")):
        for kind in net.nets:
            server, client = method.init(*_move_initial_values(kind, clients, device))
            buffers = tree.to(kind.buffers, device)
            local = {role: buffers for role, place in placements.items() if place == "local"}
            servers.append(server)
            rows.append({"client": client, "buffers": local, "facts": facts})
        varied_entries = method.init_clients(clients, generator(seed, "endow"))

    # ---- Shared statistics by model role
    buffers = tree.to(net.buffers, device)
    server_buffers = {role: buffers for role, place in placements.items() if place == "aggregate"}
    stopping_state = {}
    if stopping:
        # The first participation stops no client.
        last = torch.full((clients,), torch.finfo(torch.float32).max, device=device)
        stopping_state = {"last": last, "stopped": last < 0}
    return State(
        round=0,
        server=servers[0],
        rows=Rows(
            initial=rows[0],
            other_kinds=rows[1:],
            kinds=net.kinds or [client % len(rows) for client in range(clients)],
            varied_entries=varied_entries,
            clients=clients,
            device=device,
            storage=storage,
        ),
        server_buffers=server_buffers,
        stopping=stopping_state,
    )


def _move_initial_values(net: Net, clients: int, device: torch.device) -> tuple[Tree, Parts]:
    """Return the arguments of `Method.init`, on a device."""
    parts = net.parts
    parts = replace(
        parts,
        clients=parts.clients or clients,
        kinds=tuple(tree.to(params, device) for params in parts.kinds),
        common=tree.to(parts.common, device),
    )
    return tree.to(net.params, device), parts
