"""Speed and memory of training, beside the plain way and beside the bare kernels, on this machine.

    python -m benchmarks speed [--model cnn4|resnet18] [--side 28|32] [--data DIR] [--rounds N]
    python -m benchmarks speed --curve width|jobs [--precision fp32|bf16]

Variants (benchmarks/variants/): the plain way, whose samples are normalised beforehand or (`one by
one`) as each is asked for, as public simulators do; ours on each backend and precision; `bare`, the
kernels alone, which is the floor. All train and evaluate the same clients. Samples per second count
training samples. Every measurement is a process of its own and they take turns, so that load on the
machine hits all of them alike; ratios are of medians. Without --data, random images do. A curve is
over the clients in a cohort, or over the runs of a lockstep sweep.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import CORES, SHAPES, Task
from benchmarks.variants import bare, fedpfl_backend, plain
from fedpfl.engine import Engine
from fedpfl.engine.backends.selection import find_device

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
TITLES = (
    "network, images",
    "clients",
    "variant",
    "samples/s",
    "x plain",
    "of bare",
    "s a round or pass",
    *PARTS,
    "peak MiB",
    "peak GPU MiB",
)


def measure(variant: str, task: Task, device: torch.device, run_count: int) -> dict[str, float]:
    """Measure a variant in this process.

    Args:
        variant: `plain`, `one by one`, `bare precision` or `backend[+graphs][@store] precision`.
        task: What is trained.
        device: Where.
        run_count: Runs of a lockstep sweep, 0 for one run.
    """
    kind, _, precision = variant.partition(" ")
    if kind == "bare":
        result = bare.run_bare(task, precision)
    elif kind in ("plain", "one"):
        result = plain.run_plain(task, device, is_lazy=kind == "one")
    else:
        kind, _, store = kind.partition("@")
        backend, _, graphs = kind.partition("+")
        settings = Engine(backend, precision=precision, graphs=bool(graphs))  # type: ignore[arg-type]
        if run_count:
            result = fedpfl_backend.run_sweep(task, device, settings, run_count)
        else:
            result = fedpfl_backend.run_rounds(task, device, settings, store or "auto")
    result["peak_mib"] = harness.peak_memory()
    if device.type == "cuda":
        result["peak_gpu_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return result


def median_of(rows: Sequence[dict[str, float]], key: str) -> float | None:
    """Return the median of a number, None where it was not measured."""
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else None


def samples_per_second(rows: Sequence[dict[str, float]]) -> float:
    """Return training samples per second."""
    return statistics.median(row["samples"] / row["seconds"] for row in rows)


def table_rows(content: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each variant of a file that `main` has written."""
    task = Task(**content["task"])
    results = content["results"]
    speeds = {name: samples_per_second(rows) for name, rows in results.items()}
    shape = "x".join(map(str, SHAPES[task.side]))
    for name, rows in results.items():
        plain_ratio = floor_share = ""
        if "plain" in speeds:
            plain_ratio = f"{speeds[name] / speeds['plain']:.2f}"
        floor = speeds.get(f"bare {name.partition(' ')[2]}")
        if floor and not name.startswith("bare"):
            floor_share = f"{100 * speeds[name] / floor:.0f} %"
        seconds = statistics.median(row["seconds"] for row in rows)
        shares = [_format(median_of(rows, f"share_{part}"), "{:.1%}") for part in PARTS]
        yield [
            f"{task.model}, {shape}",
            name.split()[1] if name.startswith("width") else str(task.width),
            name,
            f"{speeds[name]:,.0f}",
            plain_ratio,
            floor_share,
            f"{seconds / (1 if name.startswith('jobs') else task.rounds):.3f}",
            *shares,
            f"{max(row['peak_mib'] for row in rows):,.0f}",
            _format(median_of(rows, "peak_gpu_mib"), "{:,.0f}"),
        ]


def _format(value: float | None, template: str) -> str:
    return "" if value is None else template.format(value)


def make_speed_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = harness.make_parser("speed", __doc__)
    parser.add_argument("--model", default="cnn4")
    parser.add_argument(
        "--side", type=int, choices=(28, 32), default=28, help="1x28x28 or 3x32x32 images"
    )
    harness.add_task_options(parser, repeats=3)
    parser.add_argument("--width", type=int, default=10, help="clients in a cohort")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--variants", nargs="+", help="e.g. plain 'loop fp32' 'loop@disk fp32'")
    parser.add_argument("--curve", choices=tuple(CURVES))
    parser.add_argument("--precision", default="fp32", help="of a curve")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench.json"))
    parser.add_argument("--collect", nargs="+", type=Path, metavar="JSON", help="print results")
    parser.add_argument("--measure", type=json.loads, help="in this process")
    return parser


def choose_orders(options: argparse.Namespace, task: Task, device: torch.device) -> dict[str, Any]:
    """Return what is measured by name: variants, or the points of a curve."""
    common = {"task": asdict(task), "run_count": 0, "device": str(device)}
    if not options.curve:
        names = options.variants or VARIANTS[device.type]
        return {name: {**common, "variant": name} for name in names}
    backend = "batched+graphs" if device.type == "cuda" else "loop"
    common["variant"] = f"{backend} {options.precision}"
    orders = {}
    for value in CURVES[options.curve]:
        if options.curve == "width":
            point: dict[str, Any] = {"task": asdict(replace(task, width=value))}
        else:
            point = {"run_count": value}
        orders[f"{options.curve} {value}"] = {**common, **point}
    return orders


def main(arguments: Sequence[str]) -> None:
    """Measure in turns, print a table, write JSON."""
    options = make_speed_parser().parse_args(arguments)
    if options.collect:
        contents = [json.loads(file.read_text()) for file in options.collect]
        rows = [row for content in contents for row in table_rows(content)]
        print(harness.format_table(TITLES, rows))
        return
    if options.measure:
        order = options.measure
        task = Task(**order["task"])
        device = find_device(order["device"])
        print(json.dumps(measure(order["variant"], task, device, order["run_count"])))
        return

    device = find_device(options.device)
    task = Task(
        model=options.model,
        side=options.side,
        rounds=options.rounds,
        width=options.width,
        samples=options.samples,
        data_dir=options.data,
    )
    load = harness.machine_load()
    orders = choose_orders(options, task, device)
    results = harness.run_children_in_turns("speed", [*orders.values()], options.repeats)
    content = {
        "task": asdict(task),
        "load_before": load,
        "cores": CORES,
        "torch": torch.__version__,
        "results": dict(zip(orders, results, strict=True)),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1))
    print(harness.format_table(TITLES, table_rows(content)))
    print(f"load before: {load:.2f}; written to {options.out}")
