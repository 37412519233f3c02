"""How many worker threads a round could keep busy, told on any number of cores.

    python -m benchmarks workers [--models mlp lenet5 cnn4] [--methods fedavg ...] [--rounds N]

The rounds of `small` with one worker. Scripts of steps run without the interpreter's lock; all else
is counted as if it held the lock, though its kernels let it go. So the efficiency is a floor: of a
round's seconds T, of which S are in scripts, N workers need T / N or T - S at least.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks import harness, small
from fedpfl.config.plan import check_config
from fedpfl.engine.training.scripts import Script

WORKERS = (2, 4, 8, 16)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = harness.make_parser("workers", __doc__)
    models = list(small.MODELS)
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for model in options.models:
        overrides = ["dataset=digits", "partition=iid", "clients=20", *small.MODELS[model]]
        run = harness.build_run(overrides)
        for name in options.methods:
            method = check_config(harness.compose_config([f"method={name}"])).method
            settings = small.ENGINES["loop, one worker"]
            play = small.make_round(method, settings, run.net, run.federation)
            total, scripted = measure_round(play, options.rounds)
            floors = [min(1.0, total / (count * (total - scripted))) for count in WORKERS]
            shares = [f"{100 * share:.0f} %" for share in (scripted / total, *floors)]
            rows.append([model, name, f"{1e3 * total:.0f}", *shares])
    titles = ["network", "method", "CPU ms a round", "in scripts"]
    titles += [f"{count} workers" for count in WORKERS]
    print(harness.format_table(titles, rows))


def measure_round(play: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return the CPU seconds of a round, and those of them in scripts: medians."""
    seconds_in_scripts: list[float] = []
    take_steps = Script.take_steps

    def take_timed_steps(*arguments: Any) -> Any:
        start_time = time.thread_time()
        records = take_steps(*arguments)
        seconds_in_scripts.append(time.thread_time() - start_time)
        return records

    totals, scripted = [], []
    with mock.patch.object(Script, "take_steps", take_timed_steps):
        for number in range(-5, rounds):  # scripts are made in the first rounds
            seconds_in_scripts.clear()
            start_time = time.process_time()
            play()
            if number >= 0:
                totals.append(time.process_time() - start_time)
                scripted.append(sum(seconds_in_scripts))
    return statistics.median(totals), statistics.median(scripted)
