"""Memory and time of clients that train adapters on one frozen network, beside a copy for each.

    python -m benchmarks adapters [--model vit_small] [--side 224] [--clients 10 100] [--cohort 10]

Every client keeps a model of its own (Local-Only) and makes `--steps` steps; samples and weights
are random. `frozen`: the head and low-rank additions are in clients' trees; `copies`: the whole
network is, and a mask holds the rest still. Each line is a process of its own; peak and states in
MiB, less what the process had before the first client.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from benchmarks import harness
from fedpfl import engine, models
from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.methods import Phase
from fedpfl.methods.local_only import LocalOnly
from fedpfl.models import ADAPTERS, Net

TITLES = ("clients", "way", "backend", "states, MiB", "peak, MiB", "s a client's step")


@dataclass(frozen=True)
class MaskedLocalOnly(LocalOnly):
    """Local-Only, in which some entries hold still."""

    trainable: ClassVar[frozenset[str]] = frozenset()

    def phases(self, server, client, params, epochs):
        """Return one phase, in which the adapter and the head move."""
        return [Phase(epochs, mask={name: name in self.trainable for name in params})]


def random_federation(clients: int, samples: int, side: int) -> Federation:
    """Return random images, equally many at each client."""
    x, y = harness.random_images(clients * samples, (3, side, side))
    train = tuple(torch.arange(len(x)).split(samples))
    test = tuple(indices[:0] for indices in train)
    return Federation("random", x, y, 10, (0.5,) * 3, (0.25,) * 3, train, test)


def measure(order: dict[str, Any]) -> dict[str, float]:
    """Take every client through one participation, in this process."""
    # ---- The network: its frozen entries stay in the module, or are in every client's tree
    side, steps, batch = order["side"], order["steps"], order["batch"]
    device = torch.device("cpu")
    federation = random_federation(order["clients"], steps * batch, side)
    adapter = partial(ADAPTERS["lora"], rank=8)
    net = models.build_network(order["model"], (3, side, side), 10, 0, adapter=adapter)
    method = LocalOnly()
    if order["way"] == "copies":
        MaskedLocalOnly.trainable = frozenset(net.params)
        method = MaskedLocalOnly()
        net = Net(net.module.requires_grad_(True), seed=0, sample=(3, side, side))

    # ---- One participation of each client, cohort by cohort
    local = engine.Local(1, batch, 0.01, 0.9)
    settings = engine.Engine(order["backend"], precision=order["precision"])
    backend = engine.make_backend(settings, net, device)
    state = engine.make_initial_state(method, net, federation.clients, device)
    memory_before = harness.peak_memory()
    step_seconds = []
    for cohort in torch.arange(federation.clients).split(order["cohort"]):
        start_time = time.perf_counter()
        state, _ = engine.play_round(
            engine.RoundSetup(backend, method, federation, local, 0), state, cohort.tolist()
        )
        step_seconds.append((time.perf_counter() - start_time) / len(cohort) / steps)
    return {
        "states": sum(map(tree.nbytes, state.rows.trees)) / 2**20,
        "peak": harness.peak_memory() - memory_before,
        "step": statistics.median_high(step_seconds),
    }


def main(arguments: Sequence[str]) -> None:
    """Measure each way on each backend; print a Markdown table."""
    parser = harness.make_parser("adapters", __doc__)
    parser.add_argument("--model", default="vit_small")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--measure", type=json.loads, help="in this process")
    options = vars(parser.parse_args(arguments))
    order = options.pop("measure")
    if order:
        print(json.dumps(measure(order)))
        return
    load = harness.machine_load()
    side = options["side"]
    print(f"{options['model']}, {side}x{side}, {options['precision']}; load before: {load:.1f}")
    rows = []
    for clients in options.pop("clients"):
        for way in ("frozen", "copies"):
            for backend in ("loop", "batched"):
                order = {**options, "clients": clients, "way": way, "backend": backend}
                result = harness.run_child("adapters", order)
                numbers = ["failed", "", ""]
                if result:
                    memory = [f"{result['states']:,.0f}", f"{result['peak']:,.0f}"]
                    numbers = [*memory, f"{result['step']:.3f}"]
                rows.append([str(clients), way, backend, *numbers])
    print(harness.format_table(TITLES, rows))
