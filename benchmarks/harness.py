"""Share what the measurements repeat: the task, child processes, options and tables."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from fedpfl import engine, models
from fedpfl.config import run
from fedpfl.config.plan import check_config
from fedpfl.config.run_location import register_resolver
from fedpfl.data import Federation, build_federation, datasets, partition
from fedpfl.models import Net
from fedpfl.train import CONF

LOCAL = engine.Local(epochs=5, batch_size=32, lr=0.01, momentum=0.7)
SHAPES = {28: (1, 28, 28), 32: (3, 32, 32)}
CORES = len(os.sched_getaffinity(0))
CLIENTS = 100
SEED = 42
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Task:
    """Describe the work that every variant does.

    Attributes:
        model: The network.
        side: Pixels of an image's side.
        rounds: Rounds that are timed.
        width: Clients in a cohort, of 100.
        samples: Random images.
        data_dir: Folder with FashionMNIST, instead of random images.
    """

    model: str = "cnn4"
    side: int = 28
    rounds: int = 3
    width: int = 10
    samples: int = 70_000
    data_dir: str | None = None

    def federation(self) -> Federation:
        """Return FashionMNIST or random images, split as published (Dir(0.1))."""
        if self.data_dir:
            images = datasets.load_samples(
                "fmnist", Path(self.data_dir), mean=(0.286,), std=(0.3205,), download=False
            )
        else:
            shape = SHAPES[self.side]
            x, y = random_images(self.samples, shape)
            images = datasets.Samples("random", x, y, 10, (0.5,) * shape[0], (0.25,) * shape[0])
        split = partition.published(images.y.numpy(), CLIENTS, SEED, alpha=0.1)
        return build_federation(images, split)

    def net(self, federation: Federation) -> Net:
        """Return the network with its initial values."""
        return models.build_network(self.model, federation.shape, federation.classes, SEED)

    def cohorts(self) -> list[list[int]]:
        """Return one cohort per round, and last another one to warm up with."""
        return list(engine.draw_cohorts(SEED, CLIENTS, self.width / CLIENTS, self.rounds + 1))

    def sample_steps(self, federation: Federation) -> int:
        """Return how many training samples pass in the timed rounds."""
        cohorts = self.cohorts()[: self.rounds]
        return sum(int(federation.train_sizes[cohort].sum()) for cohort in cohorts) * LOCAL.epochs


def random_images(count: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    return x, torch.arange(count) % 10


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration of the overrides of `python -m fedpfl.train`."""
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("train", list(overrides))


def build_run(overrides: Sequence[str]) -> run.Run:
    """Return the run of some overrides; nothing is trained."""
    return run.build_run(check_config(compose_config(overrides)))


# ---- Options and tables


def make_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a measurement's options."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_task_options(parser: argparse.ArgumentParser, repeats: int | None = None) -> None:
    """Add the options of a Task, and how often it is measured."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=70_000, help="random images without --data")
    parser.add_argument("--data", help="folder with FashionMNIST in torchvision's layout")
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)


def format_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [tuple(titles), ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def machine_load() -> float:
    """Return how many processes are running or waiting, a mean of the last minute."""
    return os.getloadavg()[0]


def peak_memory() -> float:
    """Return the most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- Child processes: a measurement has a process of its own


def run_child(name: str, order: dict[str, Any], launcher: Sequence[str] = ()) -> Any:
    """Run `python -m benchmarks NAME --measure ORDER`; return what it prints as JSON.

    Args:
        name: The measurement.
        order: What the child measures.
        launcher: Options of Python before, such as torchrun's.

    Returns:
        None if the child failed, which has said why.
    """
    command = [sys.executable, *launcher, "-m", "benchmarks", name, "--measure", json.dumps(order)]
    search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "PYTHONPATH": search_path}
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if child.returncode:
        return None
    return json.loads(child.stdout.splitlines()[-1])


def run_children_in_turns(
    name: str, orders: Sequence[dict[str, Any]], repeats: int
) -> list[list[Any]]:
    """Run each order several times, in turns: load on the machine hits all alike.

    Returns:
        The results of each order. The process ends where a child failed.
    """
    results: list[list[Any]] = [[] for _ in orders]
    for _ in range(repeats):
        for order, order_results in zip(orders, results, strict=True):
            result = run_child(name, order, order.get("launcher", ()))
            if result is None:
                sys.exit(1)
            order_results.append(result)
    return results
