"""What a run will need in memory and on the disk, told before its first round."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from fedpfl import engine
from fedpfl.config.plan import Run
from fedpfl.ground import memory, tree
from fedpfl.ground.errors import FedpflError


class ResourceNeeds(NamedTuple):
    """Count what a run comes to: clients that will have trained, bytes of their states, bytes of a
    checkpoint.
    """

    clients: int
    states: int
    checkpoint: int


def estimate_needs(run: Run) -> ResourceNeeds:
    """Foresee what a run will hold. Raises FedpflError where that can never be."""
    settings, federation, store = run.settings, run.federation, run.state
    if run.account:
        run.account.check()  # calibrates the noise, and refuses what no noise reaches
    method = engine.with_hook_checks(run.method)
    server, client = method.init(run.net.params, run.net.parts)
    local = [run.net.buffers for place in method.buffers().values() if place == "local"]
    each = tree.nbytes(client) + sum(map(tree.nbytes, local))
    draws = settings.seed, federation.clients, run.drawn, settings.rounds
    if run.account and run.account.noise:  # who takes part is secret, and how many do
        drawn = federation.clients if run.poisson else run.cohort * settings.rounds
        clients = min(federation.clients, drawn)
    else:
        clients = engine.count_participants(run.method, *draws, run.stopping.early, run.poisson)
    rows = 1 + min(federation.clients, clients + clients // engine.SPARE)
    needs = ResourceNeeds(clients, rows * each, clients * each + tree.nbytes(server))
    place = store.on(run.device)
    whole = memory.device_memory(place)[1]
    if store.device != "disk" and needs.states > whole:
        others = "disk" if place.type == "cpu" else "cpu or disk"
        raise FedpflError(
            f"the states of the {clients:,} clients that will train take up to {format_mib(needs.states)} MiB, and "
            f"{_named(place)} has {format_mib(whole)}; use state.device={others}"
        )
    return needs


def warn_of_shortage(run: Run, path: Path, needs: ResourceNeeds, held: int) -> list[str]:
    """Return a line for each place that has too little room now. held: bytes of client states that
    are there.
    """
    place, lines = run.state.on(run.device), []
    more, room = needs.states - held, memory.device_memory(place)[0]
    if run.state.device != "disk" and more > room:
        others = "disk" if place.type == "cpu" else "cpu or disk"
        lines.append(
            f"tight: client states take up to {format_mib(more)} MiB more, and {_named(place)} has {format_mib(room)} free; use "
            f"state.device={others}"
        )
    before = (path / "state.pt").stat().st_size if (path / "state.pt").exists() else 0
    more = 2 * needs.checkpoint - before + (more if run.state.device == "disk" else 0)
    room = shutil.disk_usage(path).free
    if more > room:
        what = "checkpoints and client states" if run.state.device == "disk" else "checkpoints"
        lines.append(
            f"tight: {what} take up to {format_mib(more)} MiB more, the old checkpoint being there until the new one is, and "
            f"{path} has {format_mib(room)} free; make room, or use hydra.run.dir=..."
        )
    return lines


def _named(place: torch.device) -> str:
    return "this machine's memory" if place.type == "cpu" else str(place)


def format_mib(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / 2**20:,.0f}"
