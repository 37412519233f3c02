"""Estimate the memory and disk that a run needs."""

from __future__ import annotations

import math
from typing import NamedTuple

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.ground import memory, tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Method


class ResourceNeeds(NamedTuple):
    """Count the clients that will train, and the bytes of their states.

    Attributes:
        clients: clients that will have trained.
        states: bytes of the client states that are stored.
        checkpoint: bytes of a checkpoint.
    """

    clients: int
    states: int
    checkpoint: int


def estimate_needs(run: Run) -> ResourceNeeds:
    """Estimate a run's needs. Raises FedpflError if no noise or no memory suffices."""
    if run.account:
        run.account.check()  # calibrates the noise

    # ---- Bytes of one client's state, with its statistics, of the largest kind
    server: tree.Tree = {}
    client_bytes = 0
    local_roles = [*run.method.buffers().values()].count("local")
    for net in run.net.nets:
        server, client = run.method.init(net.params, net.parts)
        row_bytes = tree.nbytes(client) + local_roles * tree.nbytes(net.buffers)
        client_bytes = max(client_bytes, row_bytes)

    # ---- Clients that will have trained
    clients = _expect_participants(run)
    # One row for all that never trained, and some more for growth.
    rows = 1 + min(run.federation.clients, clients + clients // engine.SPARE)
    needs = ResourceNeeds(
        clients=clients,
        states=rows * client_bytes,
        checkpoint=clients * client_bytes + tree.nbytes(server),
    )
    device = run.state.on(run.device)
    total_memory = memory.device_memory(device)[1]
    if run.state.device != "disk" and needs.states > total_memory:
        raise FedpflError(
            f"the states of the {needs.clients:,} clients that will train take up to "
            f"{format_mib(needs.states)} MiB, and {device} has {format_mib(total_memory)}; use "
            f"state.device={'disk' if device.type == 'cpu' else 'cpu or disk'}"
        )
    return needs


def _expect_participants(run: Run) -> int:
    """Estimate how many clients will have trained at the end."""
    clients = run.federation.clients
    # A method's own turns may reach clients outside a cohort.
    if run.is_poisson_sampled or type(run.method).turns is not Method.turns:
        return clients
    never_drawn_share = (1 - run.drawn_share) ** run.settings.rounds
    return math.ceil(clients * (1 - never_drawn_share))


def format_mib(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / 2**20:,.0f}"
