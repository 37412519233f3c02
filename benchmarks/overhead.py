"""Seconds that each method takes beside FedAvg.

    python -m benchmarks overhead [--methods a,b] [--rounds N] [--data DIR]

One federation (100 clients, Dir(0.1), 28x28 images: random ones, or FashionMNIST with --data DIR),
the same settings for all, and the same cohort in every round, so that its clients have states.
Methods take turns, round by round, so that load on the machine hits all alike. A ratio is the
median over rounds of a method's seconds over FedAvg's in the same turn. Evaluation: all clients,
once.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.harness import LOCAL, SEED, Task
from fedpfl import engine
from fedpfl.config.plan import check_config
from fedpfl.engine.backends.selection import find_device
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import METHODS

TITLES = ("method", "seconds per round", "x FedAvg", "evaluating all clients, seconds")


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = harness.make_parser("overhead", __doc__)
    harness.add_task_options(parser)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument(
        "--warm-up", type=int, default=1, help="rounds before, so that clients have states"
    )
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    # ---- One federation and backend for all methods
    load = harness.machine_load()
    device = find_device(options.device)
    task = Task(samples=options.samples, data_dir=options.data)
    federation = task.federation().to(device)
    net = task.net(federation)
    backend = engine.make_backend(engine.Engine(precision=options.precision), net, device)
    others = [name for name in options.methods.split(",") if name != "fedavg"]
    methods = {
        name: check_config(harness.compose_config([f"method={name}"])).method
        for name in ["fedavg", *others]
    }
    states = {
        name: engine.make_initial_state(method, net, federation.clients, device)
        for name, method in methods.items()
    }

    # ---- Methods take turns
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    (cohort,) = engine.draw_cohorts(SEED, federation.clients, 0.1, 1)
    for round_index in range(options.warm_up + options.rounds):
        for name, method in methods.items():
            start_time = time.perf_counter()
            states[name], _ = engine.play_round(
                engine.RoundSetup(backend, method, federation, LOCAL, SEED), states[name], cohort
            )
            if round_index >= options.warm_up:
                seconds[name].append(time.perf_counter() - start_time)

    # ---- Evaluate, and print
    rows = []
    for name, method in methods.items():
        start_time = time.perf_counter()
        clients = list(range(federation.clients))
        backend.evaluate(EvalCall(method, federation, copy.copy(states[name]), clients))
        evaluation_seconds = time.perf_counter() - start_time
        pairs = zip(seconds[name], seconds["fedavg"], strict=True)
        ratio = statistics.median(method_seconds / base for method_seconds, base in pairs)
        median_seconds = statistics.median(seconds[name])
        rows.append([name, f"{median_seconds:.2f}", f"{ratio:.2f}", f"{evaluation_seconds:.1f}"])
    print(harness.format_table(TITLES, rows))
    print(
        f"\nload before: {load:.2f}; {backend.name} on {device}, {options.precision}, "
        f"{options.rounds} rounds"
    )
