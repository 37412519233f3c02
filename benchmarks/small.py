"""Small networks: a round beside a plain loop on one thread, and beside the bare kernels.

    python -m benchmarks small [--models mlp lenet5 cnn4] [--methods fedavg ...] [--rounds N]

Digits, 20 clients of 67 samples, all in each round. A plain loop is what anyone would write for
FedAvg: a module, `backward()`, torch.optim.SGD. Ways take turns; a ratio is the median over rounds
of the plain loop's seconds over a way's in the same turn, of the clock and of the CPU. Beside load
the clock's ratios say little, and the CPU's what a way would gain on one core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import harness
from benchmarks.harness import LOCAL, SEED
from benchmarks.variants.bare import TracedKernels, train_client
from fedpfl import engine
from fedpfl.config.plan import check_config
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.methods import Method
from fedpfl.models import Net

CPU = torch.device("cpu")
MODELS = {"mlp": ["model=mlp", "model.hidden=[64]"], "lenet5": ["model=lenet5"], "cnn4": []}
ENGINES = {
    "loop": engine.Engine("loop"),
    "loop, one worker": engine.Engine("loop", workers=1),
    "batched": engine.Engine("batched"),
}
TITLES = ("network", "way", "ms a round", "spread", "x plain", "CPU ms", "x plain's CPU")


class Turns(NamedTuple):
    """Hold the seconds of a way's rounds.

    Attributes:
        clock: By the clock.
        cpu: Of the process.
    """

    clock: list[float]
    cpu: list[float]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = harness.make_parser("small", __doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    load = harness.machine_load()
    torch.set_num_threads(1)
    rows: list[list[str]] = []
    for model in options.models:
        overrides = ["dataset=digits", "partition=iid", "clients=20", *MODELS[model]]
        run = harness.build_run(overrides)
        turns = take_turns(list_ways(run, options.methods), options.rounds)
        rows += [format_row(model, way, turns[way], turns["plain"]) for way in turns]
    print(harness.format_table(TITLES, rows))
    print(f"\nload before: {load:.2f}, after: {harness.machine_load():.2f}; {harness.CORES} cores")


def list_ways(run: Run, method_names: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return what plays a round in each way."""
    federation, net = run.federation, run.net
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: play_plainly(net, federation),
        "bare": make_bare_round(net, federation),
    }
    for method_name in method_names:
        method = check_config(harness.compose_config([f"method={method_name}"])).method
        for name, settings in ENGINES.items():
            ways[f"{method_name}, {name}"] = make_round(method, settings, net, federation)
    return ways


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, Turns]:
    """Play rounds of all ways in turns, after two that warm up."""
    turns = {way: Turns(clock=[], cpu=[]) for way in ways}
    for number in range(-2, rounds):
        for way, play in ways.items():
            start_times = time.perf_counter(), time.process_time()
            play()
            if number >= 0:
                turns[way].clock.append(time.perf_counter() - start_times[0])
                turns[way].cpu.append(time.process_time() - start_times[1])
    return turns


def format_row(model: str, way: str, turns: Turns, plain: Turns) -> list[str]:
    """Return a way's row of the table."""
    ratios = []
    for seconds, plain_seconds in zip(turns, plain, strict=True):
        pairs = zip(plain_seconds, seconds, strict=True)
        ratios.append(statistics.median(base / own for base, own in pairs))
    return [
        model,
        way,
        f"{1e3 * statistics.median(turns.clock):.0f}",
        f"{1e3 * min(turns.clock):.0f} to {1e3 * max(turns.clock):.0f}",
        f"{ratios[0]:.2f}",
        f"{1e3 * statistics.median(turns.cpu):.0f}",
        f"{ratios[1]:.2f}",
    ]


def make_round(
    method: Method, settings: engine.Engine, net: Net, federation: Federation
) -> Callable[[], None]:
    """Return a function that plays the next round of a run each time."""
    backend = engine.make_backend(settings, net, CPU)
    setup = engine.RoundSetup(backend, method, federation, LOCAL, SEED)
    cohort = list(range(federation.clients))
    states = [engine.make_initial_state(method, net, federation.clients, CPU)]

    def play() -> None:
        states[0], _ = engine.play_round(setup, states[0], cohort)

    return play


def make_bare_round(net: Net, federation: Federation) -> Callable[[], None]:
    """Return a function that runs a round's kernels, client after client on this thread."""
    clients = list(range(federation.clients))
    kernels = TracedKernels(_NetTask(net), federation, "fp32", clients)

    def play() -> None:
        for client in clients:
            train_client(kernels, federation, client)
        torch.set_grad_enabled(True)

    return play


class _NetTask:
    """Stand for a Task whose network is there already."""

    def __init__(self, net: Net):
        self._net = net

    def net(self, _: Federation) -> Net:
        """Return the network."""
        return self._net


def play_plainly(net: Net, federation: Federation) -> None:
    """Train all clients from the same model, one after another, and average them."""
    module = net.copy_module()
    start = {name: leaf.clone() for name, leaf in net.params.items()}
    mean = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
    sample_count = int(federation.train_sizes.sum())
    for client in range(federation.clients):
        x, y = (part[federation.train[client]] for part in (federation.x, federation.y))
        x = federation.normalize(x)
        test_x = federation.normalize(federation.x[federation.test[client]])
        module.load_state_dict(start)
        with torch.no_grad():
            module(test_x).argmax(1)
        optimizer = torch.optim.SGD(module.parameters(), LOCAL.lr, LOCAL.momentum)
        for _ in range(LOCAL.epochs):
            for rows in torch.randperm(len(y)).split(LOCAL.batch_size):
                if len(rows) > 1:
                    optimizer.zero_grad()
                    F.cross_entropy(module(x[rows]), y[rows]).backward()
                    optimizer.step()
        with torch.no_grad():
            module(test_x).argmax(1)
        for name, leaf in module.named_parameters():
            mean[name] += leaf.detach() * (len(y) / sample_count)
