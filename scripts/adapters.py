"""Memory and time of clients that train adapters on one frozen network, beside a copy of the
network for each.

    python scripts/adapters.py [--model vit_small] [--side 224] [--clients 10 100] [--cohort 10]
    [--batch 4]

Every client keeps a model of its own (Local-Only) and makes `--steps` steps; samples and weights
are random. `frozen`: the head and low-rank additions are in clients' trees; `copies`: the whole
network is, and a mask holds the rest still. Each line is a process of its own; peak and states in
MiB, less what the process had before the first client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from fedpfl import engine, models
from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.methods import Phase
from fedpfl.methods.local_only import LocalOnly
from fedpfl.models import ADAPTERS, Net


@dataclass(frozen=True)
class Masked(LocalOnly):
    """Local-Only, in which some entries hold still."""

    moving: ClassVar[frozenset[str]] = frozenset()

    def phases(self, server, client, params, epochs):
        """Say which entries move."""
        return [Phase(epochs, mask={name: name in self.moving for name in params})]


def federation(clients: int, samples: int, side: int) -> Federation:
    """Random images, so many at each client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(
        0, 256, (clients * samples, 3, side, side), dtype=torch.uint8, generator=generator
    )
    y = torch.arange(len(x)) % 10
    train = tuple(torch.arange(len(x)).split(samples))
    return Federation(
        "random", x, y, 10, (0.5,) * 3, (0.25,) * 3, train, tuple(own[:0] for own in train)
    )


def network(name: str, side: int, copies: bool) -> Net:
    """A network with low-rank additions, the rest frozen, or in the trees too."""
    net = models.build_network(
        name, (3, side, side), 10, 0, adapter=partial(ADAPTERS["lora"], rank=8)
    )
    if not copies:
        return net
    Masked.moving = frozenset(net.params)
    return Net(net.module.requires_grad_(True), seed=0, sample=(3, side, side))


def resident() -> float:
    """Return the most memory that the process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(order: dict[str, int | str]) -> dict[str, float]:
    """Take every client through one participation, in this process."""
    clients, steps, batch, side = (int(order[key]) for key in ("clients", "steps", "batch", "side"))
    fed, device = federation(clients, steps * batch, side), torch.device("cpu")
    net = network(str(order["model"]), side, order["way"] == "copies")
    method, local = Masked() if Masked.moving else LocalOnly(), engine.Local(1, batch, 0.01, 0.9)
    own = engine.Engine(str(order["backend"]), precision=str(order["precision"]))  # type: ignore[arg-type]
    runner, state, before = (
        engine.make(own, net, device),
        engine.make_initial_state(method, net, clients, device),
        resident(),
    )
    cohorts, spent = list(torch.arange(clients).split(int(order["cohort"]))), []
    for cohort in cohorts:
        started = time.perf_counter()
        state, _ = engine.play_round(runner, method, fed, state, cohort.tolist(), local, 0)
        spent.append((time.perf_counter() - started) / len(cohort) / steps)
    states = sum(map(tree.nbytes, state.rows.trees)) / 2**20
    return {"states": states, "peak": resident() - before, "step": sorted(spent)[len(spent) // 2]}


def main() -> None:
    """Measure each way on each backend; print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_small")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    if order := given.pop("measure"):
        print(json.dumps(measure(json.loads(order))))
        return
    side = given["side"]
    print(
        f"{given['model']}, {side}x{side}, {given['precision']}; load before: {os.getloadavg()[0]:.1f}"
    )
    print(
        "| clients | way | backend | states, MiB | peak, MiB | s a client's step |\n|---|---|---|---|---|---|"
    )
    for clients in given.pop("clients"):
        for way in ("frozen", "copies"):
            for backend in ("loop", "batched"):
                order = json.dumps({**given, "clients": clients, "way": way, "backend": backend})
                done = subprocess.run(
                    [sys.executable, __file__, "--measure", order],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                if done.returncode:
                    print(
                        f"| {clients} | {way} | {backend} | failed ({done.returncode}) | | |",
                        flush=True,
                    )
                    continue
                told = json.loads(done.stdout.splitlines()[-1])
                line = f"{told['states']:,.0f} | {told['peak']:,.0f} | {told['step']:.3f}"
                print(f"| {clients} | {way} | {backend} | {line} |", flush=True)


if __name__ == "__main__":
    main()
