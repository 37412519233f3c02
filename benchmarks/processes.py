"""One process with a thread per core beside a process per core, and what more cores can gain.

    python -m benchmarks processes [--rounds N] [--repeats N] [--samples N] [--data DIR]

Rounds of FedOBP, cnn4, fp32, on the loop backend. Measurements are processes of their own and take
turns. Then, with one worker, it is sampled how often the interpreter's lock is held (Python 3.11, a
C compiler): two threads never hold it at the same time, so `1 / share` threads' work is the most
that one process can do.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import CORES, LOCAL, SEED, Task
from fedpfl import engine
from fedpfl.engine.backends import ranks
from fedpfl.methods.fedobp import FedOBP

THREAD_COUNTS = (2, 4, 8, 16, 32, 64)
SAMPLER_SOURCE = """
#include <stdatomic.h>
#include <unistd.h>
extern void *_PyThreadState_UncheckedGet(void);  /* the lock's holder; until 3.11 one a process */
void sample(atomic_int *on, long *counts) {
    while (atomic_load(on)) {
        counts[_PyThreadState_UncheckedGet() != 0]++;
        usleep(200);
    }
}
"""


def measure(task: Task, workers: int, samples_lock: bool) -> float:
    """Play rounds in this process, or in those that torchrun started.

    Returns:
        Training samples per second, or the share of time in which the lock is held.
    """
    ranks.join_process_group()
    cpu = torch.device("cpu")
    federation = task.federation()
    net = task.net(federation)
    backend = ranks.distribute_backend(
        engine.make_backend(engine.Engine("loop", workers=workers), net, cpu), cpu
    )
    method = FedOBP(q=0.99993)
    *cohorts, warm_up_cohort = task.cohorts()
    state = engine.make_initial_state(method, net, federation.clients, cpu)
    state, _ = engine.play_round(
        engine.RoundSetup(backend, method, federation, LOCAL, SEED), state, warm_up_cohort
    )
    sampler = LockSampler() if samples_lock else None
    start_time = time.perf_counter()
    for cohort in cohorts:
        state, _ = engine.play_round(
            engine.RoundSetup(backend, method, federation, LOCAL, SEED), state, cohort
        )
    seconds = time.perf_counter() - start_time
    result = sampler.stop() if sampler else task.sample_steps(federation) / seconds
    ranks.leave_process_group()
    return result


class LockSampler:
    """Sample how often the interpreter's lock is held, from a thread that needs none."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "sampler.c"
            library = Path(folder) / "sampler.so"
            source.write_text(SAMPLER_SOURCE)
            compiler = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
            subprocess.run(compiler, check=True)
            sample = ctypes.CDLL(str(library)).sample  # it lets the lock go while it runs
        self._is_on = ctypes.c_int(1)
        self._counts = (ctypes.c_long * 2)()
        arguments = (ctypes.byref(self._is_on), self._counts)
        self._thread = threading.Thread(target=sample, args=arguments)
        self._thread.start()

    def stop(self) -> float:
        """Stop, and return the share of samples in which the lock was held."""
        self._is_on.value = 0
        self._thread.join()
        return self._counts[1] / sum(self._counts)


def expected_speedup(lock_share: float, threads: int) -> float:
    """Return the speedup by threads, by mean-value analysis of one shared resource."""
    waiting = rate = 0.0
    for count in range(1, threads + 1):
        time_with_lock = lock_share * (1 + waiting)
        rate = count / (time_with_lock + 1 - lock_share)
        waiting = rate * time_with_lock
    return rate


def main(arguments: Sequence[str]) -> None:
    """Measure in turns, and print."""
    parser = harness.make_parser("processes", __doc__)
    harness.add_task_options(parser, repeats=3)
    parser.add_argument("--measure", type=json.loads, help="in this process")
    options = parser.parse_args(arguments)
    if options.measure:
        order = options.measure
        print(measure(Task(**order["task"]), order["workers"], order.get("samples_lock", False)))
        return

    print(f"load before: {harness.machine_load():.2f}")
    task = asdict(Task(rounds=options.rounds, samples=options.samples, data_dir=options.data))
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={CORES}"]
    orders: dict[str, dict[str, Any]] = {
        f"1 process x {CORES} workers": {"workers": CORES},
        f"{CORES} processes x 1 worker": {"workers": 1, "launcher": torchrun},
        "1 process x 1 worker": {"workers": 1},
        "lock": {"workers": 1, "samples_lock": True},
    }
    results = harness.run_children_in_turns(
        "processes", [{"task": task, **order} for order in orders.values()], options.repeats
    )
    *speeds, lock_shares = results
    for name, values in zip(orders, speeds, strict=False):
        values_text = ", ".join(f"{value:,.0f}" for value in values)
        print(f"{name:24}{statistics.median(values):>8,.0f} samples/s   of {values_text}")
    lock_share = statistics.median(lock_shares)
    print(
        f"lock held for {100 * lock_share:.1f} % of the time with 1 worker: "
        f"at most {1 / lock_share:.0f} times one thread"
    )
    speedups = [
        f"{count} threads {expected_speedup(lock_share, count):.1f}" for count in THREAD_COUNTS
    ]
    print("on paper:", ", ".join(speedups))
