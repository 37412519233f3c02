"""How well worker threads share a round, by simulated load, told on any number of cores.

    python -m benchmarks workers [--models mlp lenet5 cnn4] [--methods fedavg ...] [--rounds N]

The rounds of `small`, with 48 clients. One worker's rounds tell how long each call of a script
computes; in simulated rounds it sleeps as long, without the interpreter's lock as a script, and
changes nothing. All else is computed. Efficiency of N workers: one worker's simulated round over N
times theirs; that of two workers that compute stands beside it. The simulation does not see that
scripts share memory and caches. Kernels outside of scripts let the lock go, but have this machine's
cores alone: with more workers than cores the efficiency is rather too low.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks import harness, small
from fedpfl import engine
from fedpfl.config.plan import check_config
from fedpfl.engine.training import scripted_steps
from fedpfl.engine.training.scripts import Script

WORKERS = (2, 4, 8, 16)
CLIENTS = 48


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = harness.make_parser("workers", __doc__)
    models = list(small.MODELS)
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    scripted_steps.LONGEST_CALL = 60.0  # all rounds have the same calls
    rows = []
    for model in options.models:
        overrides = ["dataset=digits", "partition=iid", "clients=20", *small.MODELS[model]]
        run = harness.build_run(overrides)
        splits = {name: (3 * getattr(run.federation, name))[:CLIENTS] for name in ("train", "test")}
        federation = replace(run.federation, **splits)
        for name in options.methods:
            method = check_config(harness.compose_config([f"method={name}"])).method
            plays = {}
            for count in (1, *WORKERS):
                settings = engine.Engine("loop", workers=count)
                plays[count] = small.make_round(method, settings, run.net, federation)
            rows.append([model, name, *measure_rounds(plays, options.rounds)])
    titles = ["network", "method", "ms a round", "simulated", "2 workers compute"]
    print(harness.format_table([*titles, *[f"{count} workers" for count in WORKERS]], rows))


def measure_rounds(plays: dict[int, Callable[[], None]], rounds: int) -> list[str]:
    """Return one worker's milliseconds, computed and simulated, and efficiencies."""
    # ---- Step 1: how long scripts compute, and how late a sleeper wakes
    for play in (*plays.values(), *plays.values()):  # scripts are made in the first rounds
        play()
    calls: dict[Hashable, list[float]] = defaultdict(list)
    naps: dict[Hashable, float] = {}
    results: dict[Hashable, Any] = {}

    def stand_in(run: Callable[..., Any], minibatches: Any, rate: float, tensors: Any) -> Any:
        key = len(tensors), tuple([len(parts[0]) for parts in minibatches])
        if naps:
            time.sleep(naps[key])
            return results[key]
        start_time = time.perf_counter()
        results[key] = run(minibatches, rate, tensors)
        calls[key].append(time.perf_counter() - start_time)
        return results[key]

    run = property(lambda script: partial(stand_in, script[0]))
    simulation = mock.patch.object(Script, "run", run)
    with simulation:
        for _ in range(3):
            plays[1]()
    late = statistics.median(measure_seconds(partial(time.sleep, 1e-4)) for _ in range(99)) - 1e-4
    naps |= {key: max(0.0, statistics.median(times) - late) for key, times in calls.items()}

    # ---- Step 2: rounds in turns
    ways = [(False, 1), (True, 1), (False, 2), *[(True, count) for count in WORKERS]]
    seconds: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for is_simulated, count in ways:
            with simulation if is_simulated else nullcontext():
                seconds[is_simulated, count].append(measure_seconds(plays[count]))
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    cells = [f"{1e3 * medians[way]:.0f}" for way in ways[:2]]
    for is_simulated, count in ways[2:]:
        share = medians[is_simulated, 1] / (count * medians[is_simulated, count])
        cells.append(f"{100 * share:.0f} %")
    return cells


def measure_seconds(act: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start_time = time.perf_counter()
    act()
    return time.perf_counter() - start_time
