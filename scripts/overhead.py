"""Seconds that each method takes beside FedAvg: `python scripts/overhead.py [--methods a,b]
[--rounds N] [--data DIR]`.

One federation (100 clients, Dir(0.1), 28x28 images: random ones, or FashionMNIST with --data DIR),
the same settings for all, and the same cohort in every round, so that its clients have states.
Methods take turns, round by round, so that load on the machine hits all alike. A ratio is the
median over rounds of a method's seconds over FedAvg's in the
same turn. Evaluation: all clients, once.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time

from bench.task import LOCAL, Task
from fedpfl import engine, models
from fedpfl.engine.backends.selection import device as find_device
from fedpfl.engine.calls import EvalCall
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from methods_table import configured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warm-up", type=int, default=1, help="rounds before, so that clients have states"
    )
    parser.add_argument("--samples", type=int, default=70_000)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--data")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device, names = find_device(args.device), args.methods.split(",")
    load = os.getloadavg()[0]
    fed = Task(samples=args.samples, data_dir=args.data).federation().to(device)
    net = models.build_network("cnn4", fed.shape, fed.classes, 42)
    backend = engine.make(engine.Engine(precision=args.precision), net, device)
    names = ["fedavg", *(name for name in names if name != "fedavg")]
    methods = {name: configured(name) for name in names}
    states = {
        name: engine.make_initial_state(method, net, fed.clients, device)
        for name, method in methods.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in names}
    (cohort,) = engine.draw_cohorts(42, fed.clients, 0.1, 1)
    for number in range(args.warm_up + args.rounds):
        for name, method in methods.items():
            started = time.perf_counter()
            states[name], _ = engine.play_round(
                backend, method, fed, states[name], cohort, LOCAL, 42
            )
            if number >= args.warm_up:
                seconds[name].append(time.perf_counter() - started)
    evaluation = {}
    for name, method in methods.items():
        started = time.perf_counter()
        backend.evaluate(EvalCall(method, fed, copy.copy(states[name]), list(range(fed.clients))))
        evaluation[name] = time.perf_counter() - started
    print(
        "| method | seconds per round | x FedAvg | evaluating all clients, seconds |\n| --- | --- | --- | --- |"
    )
    for name in names:
        ratios = [own / base for own, base in zip(seconds[name], seconds["fedavg"], strict=True)]
        taken, ratio = statistics.median(seconds[name]), statistics.median(ratios)
        print(f"| {name} | {taken:.2f} | {ratio:.2f} | {evaluation[name]:.1f} |")
    print(
        f"\nload before: {load:.2f}; {backend.name} on {device}, {args.precision}, {args.rounds} rounds"
    )


if __name__ == "__main__":
    try:
        main()
    except FedpflError as error:
        sys.exit(f"fedpfl: {error}")
