"""What a run will need in memory and on the disk, estimated before its first round."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.ground import memory, tree
from fedpfl.ground.errors import FedpflError


class ResourceNeeds(NamedTuple):
    """Count what a run comes to.

    Attributes:
        clients: clients that will have trained.
        states: bytes of the client states that are stored.
        checkpoint: bytes of a checkpoint.
    """

    clients: int
    states: int
    checkpoint: int


def estimate_needs(run: Run) -> ResourceNeeds:
    """Estimate what a run will hold. Raises FedpflError where that can never be."""
    if run.account:
        run.account.check()  # calibrates the noise, and refuses what no noise reaches

    # ---- Bytes of one client's state, with its statistics
    method = engine.with_hook_checks(run.method)
    server, client = method.init(run.net.params, run.net.parts)
    local_buffers = [run.net.buffers for rule in method.buffers().values() if rule == "local"]
    client_bytes = tree.nbytes(client) + sum(map(tree.nbytes, local_buffers))

    # ---- Clients that will have trained
    clients = _count_participants(run)
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
            f"{format_mib(needs.states)} MiB, and {_describe_memory(device)} has "
            f"{format_mib(total_memory)}; use state.device={_larger_devices(device)}"
        )
    return needs


def _count_participants(run: Run) -> int:
    """Return how many clients will have trained at the end, at most."""
    settings = run.settings
    clients = run.federation.clients
    if run.client_account and run.client_account.noise:  # who takes part is secret, and how many do
        if run.is_poisson_sampled:
            return clients
        return min(clients, run.cohort * settings.rounds)
    return engine.count_participants(
        run.method,
        settings.seed,
        clients,
        run.drawn_share,
        settings.rounds,
        run.stopping.early,
        run.is_poisson_sampled,
    )


def warn_of_shortage(run: Run, path: Path, needs: ResourceNeeds, state_bytes: int) -> list[str]:
    """Return a line for memory and for the disk where there is too little room.

    Args:
        run: what is to be played.
        path: its run directory.
        needs: what it will hold.
        state_bytes: bytes of client states that are in memory or on the disk already.
    """
    # ---- Memory, for client states that are not there yet.
    lines = []
    is_on_disk = run.state.device == "disk"
    device = run.state.on(run.device)
    more_states = needs.states - state_bytes
    free_memory = memory.device_memory(device)[0]
    if not is_on_disk and more_states > free_memory:
        lines.append(
            f"tight: client states take up to {format_mib(more_states)} MiB more, and "
            f"{_describe_memory(device)} has {format_mib(free_memory)} free; use "
            f"state.device={_larger_devices(device)}"
        )

    # ---- The disk: the old checkpoint is there until the new one is whole.
    checkpoint_file = path / "state.pt"
    old_checkpoint = checkpoint_file.stat().st_size if checkpoint_file.exists() else 0
    more_files = 2 * needs.checkpoint - old_checkpoint
    if is_on_disk:
        more_files += more_states
    free_disk = shutil.disk_usage(path).free
    if more_files > free_disk:
        files = "checkpoints and client states" if is_on_disk else "checkpoints"
        lines.append(
            f"tight: {files} take up to {format_mib(more_files)} MiB more, the old checkpoint "
            f"being there until the new one is, and {path} has {format_mib(free_disk)} free; "
            "make room, or use hydra.run.dir=..."
        )
    return lines


def _larger_devices(device: torch.device) -> str:
    """Return what to set `state.device` to where this device is too small."""
    return "disk" if device.type == "cpu" else "cpu or disk"


def _describe_memory(device: torch.device) -> str:
    return "this machine's memory" if device.type == "cpu" else str(device)


def format_mib(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / 2**20:,.0f}"
