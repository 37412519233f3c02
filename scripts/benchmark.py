"""Speed and memory of training against the plain way, on this machine.

    python scripts/benchmark.py [--data DIR] [--rounds N] [--repeats N] [--device cpu|cuda] [--out FILE]

The plain way: one client after another, a DataLoader, nn.Module, torch.optim.SGD, PyTorch's default threads, fp32,
each client judged before and after its training, as ours are; its tensors are normalised beforehand, or (`one by one`)
by the Dataset as each sample is asked for, as public simulators do. Samples per second count training samples.
Every measurement is a process of its own and they take turns, so that load on the machine hits all of them alike;
ratios are of medians. Without --data, random images of FashionMNIST's shape do, split by the same rule.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedpfl import engine, models, tree
from fedpfl.data import Federation, build, datasets, partition
from fedpfl.engine import loop
from fedpfl.engine.select import device as find_device
from fedpfl.methods import FedAvg, FedOBP, Method

aten = torch.ops.aten
LOCAL = engine.Local(epochs=5, batch_size=32, lr=0.01, momentum=0.7)
VARIANTS = {
    "cpu": {
        "plain": None,
        "one by one": None,
        "loop": ("loop", "fp32"),
        "loop bf16": ("loop", "bf16"),
        "bare": "fp32",
        "bare bf16": "bf16",
    },
    "cuda": {
        "plain": None,
        "loop": ("loop", "fp32"),
        "batched": ("batched", "fp32"),
        "batched tf32": ("batched", "tf32"),
        "batched bf16": ("batched", "bf16"),
    },
}


def federation(data_dir: str | None, shape: tuple[int, int, int]) -> Federation:
    """FashionMNIST from `data_dir`, or random images of `shape`, split as published (Dir(0.1), 100 clients)."""
    if data_dir:
        images = datasets.load("fmnist", Path(data_dir), mean=(0.286,), std=(0.3205,), download=False)
    else:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (70_000, *shape), dtype=torch.uint8, generator=generator)
        y = torch.arange(70_000) % 10
        images = datasets.Images("random", x, y, 10, (0.5,) * shape[0], (0.25,) * shape[0])
    split = partition.published(images.y.numpy(), 100, 42, alpha=0.1)
    return build(images, split)


def plain_cnn4(fed: Federation) -> torch.nn.Module:
    """The paper's network as anyone would write it down."""
    channels, height, width = fed.shape
    flat = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, fed.classes)),
    )


class OneByOne(Dataset):
    """A client's samples, each normalised when it is asked for."""

    def __init__(self, fed: Federation, own: torch.Tensor):
        self.fed, self.own = fed, own

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self.own[i]
        return self.fed.normalize(self.fed.x[sample]), self.fed.y[sample]


def plain(fed: Federation, rounds: int, device: torch.device, one_by_one: bool = False) -> dict[str, float]:
    """FedAvg the way that simulators usually run it."""
    net = plain_cnn4(fed).to(device)
    shared = {name: value.clone() for name, value in net.state_dict().items()}
    sets, tests = (
        [OneByOne(fed, own) if one_by_one else TensorDataset(fed.normalize(fed.x[own]), fed.y[own]) for own in split]
        for split in (fed.train, fed.test)
    )

    def judge(client: int) -> int:
        net.eval()
        with torch.no_grad():
            loader = DataLoader(tests[client], batch_size=256)
            return sum(int((net(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)

    samples, started = 0, time.perf_counter()
    for cohort in engine.cohorts(42, 100, 0.1, rounds):
        total = sum(len(sets[client]) for client in cohort)
        merged = {name: torch.zeros_like(value) for name, value in shared.items()}
        for client in cohort:
            net.load_state_dict(shared)
            judge(client)
            net.train()
            optimizer = torch.optim.SGD(net.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum)
            loader = DataLoader(sets[client], batch_size=LOCAL.batch_size, shuffle=True)
            for _ in range(LOCAL.epochs):
                for x, y in loader:
                    if len(y) > 1:
                        optimizer.zero_grad()
                        F.cross_entropy(net(x.to(device)), y.to(device)).backward()
                        optimizer.step()
            judge(client)
            for name, value in net.state_dict().items():
                merged[name] += value * (len(sets[client]) / total)
            samples += len(sets[client]) * LOCAL.epochs
        shared = merged
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - started, "samples": samples}


class Bare:
    """cnn4's training step as nothing but its kernels, for the floor: no autograd, no modules, no method."""

    def __init__(self, fed: Federation, precision: str):
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.initial = [leaf.contiguous() for leaf in models.build("cnn4", fed.shape, fed.classes, 42).params.values()]
        self.fed = fed

    def train(self, client: int) -> None:
        """A client's five epochs, judged before and after."""
        torch.set_grad_enabled(False)  # per thread
        sets = []
        for own in (self.fed.train[client], self.fed.test[client]):
            x = self.fed.normalize(self.fed.x[own]).permute(0, 2, 3, 1).contiguous().to(self.dtype)
            sets.append((x, self.fed.y[own]))
        (x, y), (tested, wanted) = sets
        params = [p.clone(memory_format=torch.channels_last if p.dim() == 4 else None) for p in self.initial]
        velocity = [torch.zeros_like(p) for p in params]
        self.judge(params, tested, wanted)
        for _ in range(LOCAL.epochs):
            for rows in torch.randperm(len(y)).split(LOCAL.batch_size):
                if len(rows) < 2:
                    continue
                grads = self.gradient([p.to(self.dtype) for p in params], x[rows].permute(0, 3, 1, 2), y[rows])
                torch._foreach_mul_(velocity, LOCAL.momentum)
                torch._foreach_add_(velocity, [grad.float() for grad in grads])
                torch._foreach_add_(params, velocity, alpha=-LOCAL.lr)
        self.judge(params, tested, wanted)

    def judge(self, params: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> int:
        """How many predictions are right."""
        cast = [p.to(self.dtype) for p in params]
        chunks = zip(x.permute(0, 3, 1, 2).split(256), y.split(256), strict=True)
        return sum(int((self.forward(cast, part)[-1].argmax(1) == own).sum()) for part, own in chunks)

    @staticmethod
    def forward(params: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        """Everything that the backward pass needs, the logits last."""
        w1, b1, w2, b2, w3, b3, w4, b4 = params
        wide1 = F.conv2d(x, w1, b1)
        hidden1, at1 = aten.max_pool2d_with_indices(wide1, [2, 2], [2, 2])
        wide2 = F.conv2d(hidden1.relu_(), w2, b2)
        hidden2, at2 = aten.max_pool2d_with_indices(wide2, [2, 2], [2, 2])
        flat = hidden2.relu_().flatten(1)
        hidden3 = F.linear(flat, w3, b3).relu_()
        return [wide1, at1, hidden1, wide2, at2, hidden2, flat, hidden3, F.linear(hidden3, w4, b4)]

    def gradient(self, params: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        """Of the mean cross-entropy, in the order of the parameters."""
        _, _, w2, _, w3, _, w4, _ = params
        wide1, at1, hidden1, wide2, at2, hidden2, flat, hidden3, logits = self.forward(params, x)
        error = logits.float().softmax(1)
        error[torch.arange(len(y)), y] -= 1
        error4 = (error / len(y)).to(self.dtype)
        error3 = aten.threshold_backward(error4 @ w4, hidden3, 0)
        back = aten.threshold_backward((error3 @ w3).view(hidden2.shape), hidden2, 0)
        pool = [[2, 2], [2, 2], [0, 0], [1, 1], False]
        back = aten.max_pool2d_with_indices_backward(back, wide2, *pool, at2)
        conv = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
        back, w2, b2 = aten.convolution_backward(back, hidden1, w2, [64], *conv, [True, True, True])
        back = aten.threshold_backward(back, hidden1, 0)
        back = aten.max_pool2d_with_indices_backward(back, wide1, *pool, at1)
        _, w1, b1 = aten.convolution_backward(back, x, params[0], [32], *conv, [False, True, True])
        return [w1, b1, w2, b2, error3.t() @ flat, error3.sum(0), error4.t() @ hidden3, error4.sum(0)]


def bare(fed: Federation, rounds: int, precision: str) -> dict[str, float]:
    """The kernels of the same rounds, arranged as the loop backend arranges them: a floor for its time."""
    loop.keep_memory()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    cohorts = engine.cohorts(42, 100, 0.1, rounds + 1)
    kernels, samples = Bare(fed, precision), 0
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(kernels.train, cohorts[rounds]))  # warm up
        started = time.perf_counter()
        for cohort in cohorts[:rounds]:
            list(pool.map(kernels.train, sorted(cohort, key=lambda client: -int(fed.train_sizes[client]))))
            samples += int(fed.train_sizes[cohort].sum()) * LOCAL.epochs
        return {"seconds": time.perf_counter() - started, "samples": samples}


def timed(method: Method, spent: dict[str, float]) -> Method:
    """The same method; the time inside its answers outside training and judging is added up in `spent`."""

    def clocked(name: str) -> Callable[..., Any]:
        def call(self: Method, *arguments: Any) -> Any:
            before = time.perf_counter()
            try:
                return getattr(super(type(self), self), name)(*arguments)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - before

        return call

    names = ("prepare", "start", "send", "measure", "finish", "merge")
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    return type(type(method).__name__, (type(method),), {name: clocked(name) for name in names})(**values)


def ours(fed: Federation, rounds: int, device: torch.device, backend: str, precision: str) -> dict[str, float]:
    """FedOBP on one of the backends, and the share of a round spent outside training and judging."""
    net = models.build("cnn4", fed.shape, fed.classes, 42)
    fed = fed.to(device)
    cores = len(os.sched_getaffinity(0))
    runner = engine.make(engine.Engine(backend, 0, precision), net, device)  # type: ignore[arg-type]
    spent: dict[str, float] = {}
    method = timed(FedOBP(q=0.99993), spent)
    state = engine.begin(method, net, fed.clients, device)
    cohorts = engine.cohorts(42, 100, 0.1, rounds + 1)
    state, _ = engine.play(runner, method, fed, state, cohorts[rounds], LOCAL, 42)  # warm up
    spent.clear()
    samples, started = 0, time.perf_counter()
    for cohort in cohorts[:rounds]:
        state, _ = engine.play(runner, method, fed, state, cohort, LOCAL, 42)
        samples += int(fed.train_sizes[cohort].sum()) * LOCAL.epochs
    seconds = time.perf_counter() - started
    before = time.perf_counter()
    tally = runner.evaluate(FedAvg(), fed, engine.begin(FedAvg(), net, fed.clients, device), list(range(fed.clients)))
    tested = int(tally.total.sum())
    judging = time.perf_counter() - before
    # Answers given per client run on the worker threads side by side, the merge on its own.
    outside = spent.pop("merge") + sum(spent.values()) / (cores if device.type == "cpu" else 1)
    return {
        "seconds": seconds,
        "samples": samples,
        "outside_share": outside / seconds,
        "tested_per_second": tested / judging,
        "state_mib": tree.nbytes(state.clients) / 2**20,
    }


def child(arguments: argparse.Namespace) -> None:
    """Measure one variant and print it as JSON."""
    device = find_device(arguments.device)
    shape = (3, 32, 32) if arguments.colour else (1, 28, 28)
    fed = federation(arguments.data, shape)
    variant = VARIANTS[device.type][arguments.variant]
    if isinstance(variant, str):
        result = bare(fed, arguments.rounds, variant)
    elif variant is None:
        result = plain(fed, arguments.rounds, device, one_by_one=arguments.variant == "one by one")
    else:
        result = ours(fed, arguments.rounds, device, *variant)
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def main() -> None:
    """Measure all variants in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with FashionMNIST in torchvision's layout")
    parser.add_argument("--colour", action="store_true", help="random images of CIFAR10's shape")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default="outputs/bench.json")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        child(arguments)
        return
    results: dict[str, list[dict[str, float]]] = {}
    names = list(VARIANTS[find_device(arguments.device).type])
    load = os.getloadavg()[0]
    for _ in range(arguments.repeats):
        for name in names:
            command = [sys.executable, *sys.argv, "--variant", name]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results.setdefault(name, []).append(json.loads(out.splitlines()[-1]))
    speed = {name: statistics.median(r["samples"] / r["seconds"] for r in rows) for name, rows in results.items()}
    print(f"{'':14}{'samples/s':>10}{'ratio':>8}{'s/round':>9}{'outside':>9}{'peak MiB':>10}")
    for name, rows in results.items():
        seconds = statistics.median(r["seconds"] for r in rows) / arguments.rounds
        outside = [r["outside_share"] for r in rows if "outside_share" in r]
        share = f"{100 * statistics.median(outside):.1f} %" if outside else "-"
        peak = max(r["peak_mib"] for r in rows)
        ratio = speed[name] / speed["plain"]
        print(f"{name:14}{speed[name]:>10,.0f}{ratio:>8.2f}{seconds:>9.2f}{share:>9}{peak:>10,.0f}")
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"load_before": load, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    out.write_text(json.dumps({**facts, "rounds": arguments.rounds, "results": results}, indent=1))
    print(f"load before: {load:.2f}; written to {out}")


if __name__ == "__main__":
    main()
