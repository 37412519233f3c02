"""One process with a thread per core beside a process per core, and what threads can gain on more
cores.

    python scripts/processes.py [--rounds N] [--repeats N] [--samples N] [--data DIR]

Rounds of FedOBP, cnn4, fp32, on the loop backend; see bench/task.py. Measurements are processes of
their own and take turns. Then, with one worker, it is sampled how often the interpreter's lock is
held (Python 3.11, a C compiler): two threads never hold it at the same time, so `1 / share`
threads' work is the most that one process can do.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from bench.task import CORES, LOCAL, Task
from fedpfl import engine, models
from fedpfl.engine.backends import ranks
from fedpfl.methods import FedOBP

SAMPLER = """
#include <stdatomic.h>
#include <unistd.h>
extern void *_PyThreadState_UncheckedGet(void);  /* who holds the lock; until Python 3.11 one for the whole process */
void sample(atomic_int *on, long *counts) {
    while (atomic_load(on)) {
        counts[_PyThreadState_UncheckedGet() != 0]++;
        usleep(200);
    }
}
"""


def measure(task: Task, workers: int, sampled: bool) -> None:
    """Play rounds in this process, or those that torchrun started; print training samples per
    second.
    """
    ranks.join()
    cpu = torch.device("cpu")
    federation = task.federation()
    net = models.build_network(task.model, federation.shape, federation.classes, 42)
    backend = ranks.over(engine.make(engine.Engine("loop", workers=workers), net, cpu), cpu)
    method, cohorts = FedOBP(q=0.99993), task.cohorts()
    state = engine.make_initial_state(method, net, federation.clients, cpu)
    state, _ = engine.play_round(
        backend, method, federation, state, cohorts[-1], LOCAL, 42
    )  # warm up
    held = Held() if sampled else None
    begun = time.perf_counter()
    for cohort in cohorts[: task.rounds]:
        state, _ = engine.play_round(backend, method, federation, state, cohort, LOCAL, 42)
    seconds = time.perf_counter() - begun
    samples = (
        sum(int(federation.train_sizes[cohort].sum()) for cohort in cohorts[: task.rounds])
        * LOCAL.epochs
    )
    print(held.share() if held else samples / seconds)
    ranks.part()


class Held:
    """Samples, from a thread that needs no lock, how often some thread holds the interpreter's
    lock.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "sampler.c", Path(folder) / "sampler.so"
            source.write_text(SAMPLER)
            subprocess.run(
                ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
            )
            sample = ctypes.CDLL(str(library)).sample  # which lets the lock go while it runs
        self._on, self._counts = ctypes.c_int(1), (ctypes.c_long * 2)()
        self._thread = threading.Thread(target=sample, args=(ctypes.byref(self._on), self._counts))
        self._thread.start()

    def share(self) -> float:
        """End it, and return the share of samples in which the lock was held."""
        self._on.value = 0
        self._thread.join()
        return self._counts[1] / sum(self._counts)


def speeds(share: float, threads: int) -> float:
    """Return how many times as fast so many threads are than one, by mean-value analysis of one
    shared resource.
    """
    waiting = rate = 0.0
    for count in range(1, threads + 1):
        held = share * (1 + waiting)
        rate = count / (held + 1 - share)
        waiting = rate * held
    return rate


def main() -> None:
    """Measure in turns, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=70_000, help="random images without --data")
    parser.add_argument("--data", help="folder with FashionMNIST in torchvision's layout")
    parser.add_argument("--measure", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--sampled", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure >= 0:
        measure(
            Task(rounds=given.rounds, samples=given.samples, data_dir=given.data),
            given.measure,
            given.sampled,
        )
        return
    print(f"load before: {os.getloadavg()[0]:.2f}")
    torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={CORES}"]
    ways: dict[str, list[str]] = {
        f"1 process x {CORES} workers": [__file__, "--measure", str(CORES)],
        f"{CORES} processes x 1 worker": [*torchrun, __file__, "--measure", "1"],
        "1 process x 1 worker": [__file__, "--measure", "1"],
        "lock": [__file__, "--measure", "1", "--sampled"],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, command in ways.items():
            done = subprocess.run(
                [sys.executable, *command, *sys.argv[1:]], capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stderr)
            found[name].append(float(done.stdout.splitlines()[-1]))
    share = statistics.median(found.pop("lock"))
    for name, values in found.items():
        print(
            f"{name:24}{statistics.median(values):>8,.0f} samples/s   of {', '.join(f'{v:,.0f}' for v in values)}"
        )
    print(
        f"lock held for {100 * share:.1f} % of the time with 1 worker: at most {1 / share:.0f} times one thread"
    )
    print(
        "on paper:", ", ".join(f"{n} threads {speeds(share, n):.1f}" for n in (2, 4, 8, 16, 32, 64))
    )


if __name__ == "__main__":
    main()
