"""Federations of many sites: start-up, a round, evaluating all clients, and memory.

    python -m benchmarks sites [--sites N [N ...]] [--rounds N]

Each site is an archive of 50 samples of 20 features and ten classes; the network is mlp, and ten
sites train in a round. Each line is a process of its own, `python -m fedpfl.train dataset=sites`.
Start-up is what the process takes beside its rounds and evaluations, its imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

SAMPLES = 50
FEATURES = 20
CLASSES = 10
COHORT = 10
METHODS = ("fedavg", "fedper")


def write_sites(folder: Path, count: int) -> None:
    """Write a folder of `count` archives."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        y = rng.integers(0, CLASSES, SAMPLES)
        x = rng.normal(size=(SAMPLES, FEATURES)) + y[:, None] / CLASSES
        np.savez(folder / f"site_{number:05}.npz", x=x.astype(np.float32), y=y)


def measure_run(method: str, sites: Path, count: int, rounds: int, run: Path) -> list[str]:
    """Play a run in a process of its own; return its row of the table."""
    words = [f"method={method}", "dataset=sites", f"dataset.path='{sites}'", "model=mlp"]
    words += [f"rounds={rounds}", f"eval.every={rounds}", f"participation={COHORT / count}"]
    words += ["local.epochs=5", f"hydra.run.dir='{run}'"]
    start_time = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedpfl.train", *words], stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start_time
    if status:
        raise SystemExit(f"{method} over {count} sites failed")
    table = pd.read_csv(run / "rounds.csv")
    evaluation = float(table["eval_seconds"].sum())
    start_up = seconds - float(table["seconds"].sum()) - evaluation
    accuracy = json.loads((run / "summary.json").read_text())["last"]["accuracy"]
    return [
        f"{count:,}",
        method,
        f"{start_up:.1f}",
        f"{statistics.median(table['seconds']):.3f}",
        f"{evaluation:.2f}",
        f"{usage.ru_maxrss / 1024:,.0f}",
        f"{accuracy:.1f}",
    ]


def main(arguments: Sequence[str]) -> None:
    """Print a table with a row per method and number of sites."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sites", description=__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    print(f"load {os.getloadavg()[0]:.2f}")
    print("| sites | method | start-up, s | a round, s | evaluating all, s | memory, MiB | % |")
    print("|---|---|---|---|---|---|---|")
    for count in options.sites:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "sites")
            write_sites(folder, count)
            for method in METHODS:
                run = Path(scratch, method)
                cells = measure_run(method, folder, count, options.rounds, run)
                print(f"| {' | '.join(cells)} |", flush=True)
