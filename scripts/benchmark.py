"""Speed and memory of training, beside the plain way and beside the bare kernels, on this machine.

    python scripts/benchmark.py [--model cnn4|resnet18] [--side 28|32] [--data DIR] [--rounds N]
    [--repeats N] python scripts/benchmark.py --curve width|jobs [--precision fp32|bf16]

Variants (scripts/bench/): the plain way, whose samples are normalised beforehand or (`one by one`)
as each is asked for, as public simulators do; ours on each backend and precision; `bare`, the
kernels alone, which is the floor. All train and evaluate the same clients. Samples per second count
training samples. Every measurement is a process of its own and they take turns, so that load on the
machine hits all of them alike; ratios are of medians. Without --data, random images do. A curve is
over the clients in a cohort, or over the runs of a lockstep sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from bench import bare, ours, plain
from bench.task import CORES, SHAPES, Task
from fedpfl.engine import Engine
from fedpfl.engine.backends.selection import device as find_device
from fedpfl.ground.errors import FedpflError

VARIANTS = {
    "cpu": ("plain", "one by one", "loop fp32", "loop bf16", "bare fp32", "bare bf16"),
    "cuda": (
        "plain",
        "loop fp32",
        "batched fp32",
        "batched+graphs fp32",
        "batched+graphs tf32",
        "batched+graphs bf16",
    ),
}
CURVES = {"width": (1, 2, 5, 10, 20, 50, 100), "jobs": (1, 2, 4, 8, 16, 32)}
PARTS = ("train", "evaluate", "hooks", "log")


def measure(variant: str, task: Task, device: torch.device, jobs: int) -> dict[str, float]:
    """One measurement, in this process. Ours are called `backend[+graphs][@store] precision`."""
    kind, _, precision = variant.partition(" ")
    if kind == "bare":
        result = bare.run(task, precision)
    elif kind in ("plain", "one"):
        result = plain.run(task, device, one_by_one=kind == "one")
    else:
        kind, _, store = kind.partition("@")
        backend, _, graphs = kind.partition("+")
        own = Engine(backend, precision=precision, graphs=bool(graphs))  # type: ignore[arg-type]
        result = (
            ours.jobs(task, device, own, jobs)
            if jobs
            else ours.run(task, device, own, store or "auto")
        )
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if device.type == "cuda":
        result["peak_gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return result


def in_turns(
    points: list[tuple[str, Task, int]], repeats: int, device: str
) -> list[list[dict[str, float]]]:
    """Every point's measurements, each in a process of its own."""
    results: list[list[dict[str, float]]] = [[] for _ in points]
    for _ in range(repeats):
        for own, (variant, task, jobs) in zip(results, points, strict=True):
            order = json.dumps(
                {"variant": variant, "task": asdict(task), "jobs": jobs, "device": device}
            )
            command = [sys.executable, __file__, "--measure", order]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(done.returncode)  # it said why
            own.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def median(rows: list[dict[str, float]], key: str) -> float | None:
    """Of what was measured, None where it was not."""
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else None


def speed(rows: list[dict[str, float]]) -> float:
    """Training samples per second."""
    return statistics.median(row["samples"] / row["seconds"] for row in rows)


def table(names: list[str], results: list[list[dict[str, float]]], rounds: int) -> None:
    """Print one line per variant: speed, ratios to the plain way and to the floor, shares of a
    round, memory.
    """
    speeds = dict(zip(names, map(speed, results), strict=True))
    print(f"{'':20}{'samples/s':>10}{'x plain':>9}{'of bare':>9}{'s/round':>9}", end="")
    print("".join(f"{part:>9}" for part in PARTS) + f"{'peak MiB':>10}")
    for name, rows in zip(names, results, strict=True):
        floor = (
            speeds.get(f"bare {name.partition(' ')[2]}") if not name.startswith("bare") else None
        )
        of_floor = f"{100 * speeds[name] / floor:.0f} %" if floor else "-"
        ratio = f"{speeds[name] / speeds['plain']:.2f}" if "plain" in speeds else "-"
        seconds = statistics.median(row["seconds"] for row in rows) / rounds
        shares = (median(rows, f"share_{part}") for part in PARTS)
        print(f"{name:20}{speeds[name]:>10,.0f}{ratio:>9}{of_floor:>9}{seconds:>9.2f}", end="")
        print(
            "".join("        -" if share is None else f"{100 * share:>7.1f} %" for share in shares),
            end="",
        )
        print(f"{max(row['peak_mib'] for row in rows):>10,.0f}")


def collect(files: list[Path]) -> None:
    """Print what was measured as one Markdown table."""
    print(
        "| network, images | clients | variant | samples/s | x plain | s a round or pass | peak GPU MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for file in files:
        told = json.loads(file.read_text())
        task, results = told["task"], told["results"]
        plain = speed(results["plain"]) if "plain" in results else None
        for name, rows in results.items():
            seconds = statistics.median(row["seconds"] for row in rows) / (
                1 if name.startswith("jobs") else task["rounds"]
            )
            clients = name.split()[1] if name.startswith("width") else task["width"]
            ratio = f"{speed(rows) / plain:.2f}" if plain else ""
            peak = median(rows, "peak_gpu_mib")
            shape = "x".join(map(str, SHAPES[task["side"]]))
            print(
                f"| {task['model']}, {shape} | {clients} | {name} | {speed(rows):,.0f} | {ratio} | {seconds:.3f} |",
                end="",
            )
            print(f" {peak:,.0f} |" if peak else " |")


def main() -> None:
    """Measure in turns, print a table, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn4")
    parser.add_argument(
        "--side", type=int, choices=(28, 32), default=28, help="1x28x28 or 3x32x32 images"
    )
    parser.add_argument("--data", help="folder with FashionMNIST in torchvision's layout")
    parser.add_argument("--samples", type=int, default=70_000, help="random images without --data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=10, help="clients in a cohort")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--variants", nargs="+", help="e.g. plain 'loop fp32' 'loop@disk fp32'")
    parser.add_argument("--curve", choices=tuple(CURVES))
    parser.add_argument("--precision", default="fp32", help="of a curve")
    parser.add_argument("--out", default="outputs/bench.json")
    parser.add_argument(
        "--collect", nargs="+", type=Path, metavar="JSON", help="print earlier results as Markdown"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
        return
    if given.measure:
        order = json.loads(given.measure)
        print(
            json.dumps(
                measure(
                    order["variant"],
                    Task(**order["task"]),
                    find_device(order["device"]),
                    order["jobs"],
                )
            )
        )
        return
    device = find_device(given.device)
    task = Task(given.model, given.side, given.rounds, given.width, given.samples, given.data)
    names = list(given.variants or VARIANTS[device.type])
    points = [(name, task, 0) for name in names]
    if given.curve:
        backend = "batched+graphs" if device.type == "cuda" else "loop"
        variant, values = f"{backend} {given.precision}", CURVES[given.curve]
        names = [f"{given.curve} {value}" for value in values]
        points = [
            (variant, Task(**{**asdict(task), "width": value}), 0)
            if given.curve == "width"
            else (variant, task, value)
            for value in values
        ]
    load = os.getloadavg()[0]
    results = in_turns(points, given.repeats, str(device))
    table(names, results, task.rounds if given.curve != "jobs" else 1)
    facts = {"task": asdict(task), "load_before": load, "cores": CORES, "torch": torch.__version__}
    out = Path(given.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({**facts, "results": dict(zip(names, results, strict=True))}, indent=1)
    )
    print(f"load before: {load:.2f}; written to {out}")


if __name__ == "__main__":
    try:
        main()
    except FedpflError as error:
        sys.exit(f"fedpfl: {error}")
