"""All that a run knows between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from fedpfl.engine.keys import draw_cohorts, generator, track_global_draws
from fedpfl.engine.store import Rows, Store
from fedpfl.engine.training.hook_checks import with_hook_checks
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods import STORED, Method
from fedpfl.models import Net


@dataclass(frozen=True)
class State:
    """Hold explicit trees of tensors and the number of rounds played.

    rows: every client's state, and those of its BatchNorm statistics that stay local. members: the
        rows of those who take part, where `rows` are newcomers'.
    server_buffers: BatchNorm statistics by model role, at the server.
    privacy: of privacy, the bound on updates where it moves.
    stopping: of early stopping, stacked: each client's `last` loss, and whether it has `stopped`;
    {} without it.
    """

    round: int
    server: Tree
    rows: Rows
    server_buffers: dict[str, Tree]
    stopping: dict[str, Tensor]
    members: Rows | None = None
    privacy: dict[str, Tensor] = field(default_factory=dict)

    @property
    def clients(self) -> dict[str, Tree]:
        """A copy of what every client keeps, stacked `[clients, ...]`."""
        return self.rows.take("client", range(self.rows.clients))

    @property
    def client_buffers(self) -> dict[str, Tree]:
        """A copy of every client's own statistics by model role, stacked."""
        return self.rows.take("buffers", range(self.rows.clients))

    def client(self, client: int | Sequence[int]) -> dict[str, Tree]:
        """Return a client's state as hooks see it, with the engine's FACTS; of several clients
        stacked.
        """
        return {**self.rows.take("client", client), **self.facts(client)}

    def facts(self, client: int | Sequence[int]) -> dict[str, Tree]:
        """Return the FACTS of a client; of several clients stacked."""
        first = self.members.clients if self.members else 0
        number = tree.send(torch.tensor(client) + first, self.rows.device)
        newcomer = torch.full_like(number, self.members is not None, dtype=torch.bool)
        known = {"number": number, "newcomer": newcomer, "statistics": self.buffers(client)}
        return {**self.rows.take("facts", client), **known}

    def others(self) -> Callable[[Sequence[int]], dict[str, Tree]]:
        """Return a function that gives the states, stacked, of clients that take part, as hooks see
        them.
        """
        state = replace(self, rows=self.members, members=None) if self.members else self
        return lambda numbers: state.client([*numbers])

    def buffers(self, client: int | Sequence[int]) -> dict[str, Tree]:
        """Return the buffers that a client starts from, by role; those of several clients stacked."""
        shared = self.server_buffers
        if not isinstance(client, int):
            shared = {role: tree.repeat(buffers, len(client)) for role, buffers in shared.items()}
        return {**shared, **self.rows.take("buffers", client)}


def count_participants(
    method: Method,
    seed: int,
    clients: int,
    participation: float,
    rounds: int,
    stopping: bool = False,
    poisson: bool = False,
) -> int:
    """Return how many clients at most will have a state of their own after all rounds, as their
    cohorts are drawn.

    It is exact but for early stopping, which draws others, and for runs so long that nearly
    everybody takes part.
    """
    seen: set[int] = set()
    drawn = 0
    for played, cohort in enumerate(draw_cohorts(seed, clients, participation, rounds, poisson)):
        drawn += len(cohort)
        if drawn > 10 * clients:  # all but 1 in 20,000 have been there
            return clients
        hooks = method if played else with_hook_checks(method)
        for turn in hooks.turns(played, cohort, clients, generator(seed, "turns", played + 1)):
            seen.update(turn.clients)
        if len(seen) == clients:
            break
    return min(clients, max(len(seen), drawn)) if stopping else len(seen)


def make_initial_state(
    method: Method,
    net: Net,
    clients: int,
    device: torch.device,
    store: Store | None = None,
    folder: Path | None = None,
    seed: int = 0,
    stopping: bool = False,
    mine: Callable[[int], bool] | None = None,
) -> State:
    """Return the state before round 1: every client and the server start from the net's initial
    parameters.

    The method is told that there are so many clients where the net does not know it better.

    folder: for a store on disk. seed: of what makes clients differ (`Method.init_clients`).
    stopping: early.
    mine: as in Rows. Raises FedpflError where that hides rows from a method that reads those of
    others.
    """
    if mine and type(method).before_turn is not Method.before_turn:
        raise FedpflError(
            f"{type(method).__name__} reads other clients' states (before_turn), of which each process has its own "
            "alone; leave out state.sharded=true"
        )
    params, buffers = tree.to(net.params, device), tree.to(net.buffers, device)
    with track_global_draws(method, seed, "init", "process"):
        parts = net.parts if net.parts.clients else replace(net.parts, clients=clients)
        server, client = with_hook_checks(method).init(params, parts)
        method = with_hook_checks(method, net, client)
        own = method.init_clients(clients, generator(seed, "endow"))
    roles = method.buffers()
    most = torch.full((clients,), torch.finfo(torch.float32).max, device=device)
    local = {role: buffers for role, place in roles.items() if place == "local"}
    facts = {name: torch.tensor(False, device=device) for name in STORED}
    return State(
        round=0,
        server=server,
        rows=Rows(
            {"client": client, "buffers": local, "facts": facts},
            own,
            clients,
            device,
            store,
            folder,
            mine,
        ),
        server_buffers={role: buffers for role, place in roles.items() if place == "aggregate"},
        stopping={"last": most, "stopped": most < 0} if stopping else {},
    )
