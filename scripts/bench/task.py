"""The work that every variant does: a federation, its cohorts, how clients train."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fedpfl import engine
from fedpfl.data import Federation, build_federation, datasets, partition

LOCAL = engine.Local(epochs=5, batch_size=32, lr=0.01, momentum=0.7)
SHAPES = {28: (1, 28, 28), 32: (3, 32, 32)}
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Task:
    """model, images of `side` pixels, `rounds` rounds of `width` of 100 clients; data_dir: real
    FashionMNIST.
    """

    model: str = "cnn4"
    side: int = 28
    rounds: int = 3
    width: int = 10
    samples: int = 70_000
    data_dir: str | None = None

    def federation(self) -> Federation:
        """FashionMNIST, or random images; split as published (Dir(0.1))."""
        if self.data_dir:
            images = datasets.load_samples(
                "fmnist", Path(self.data_dir), mean=(0.286,), std=(0.3205,), download=False
            )
        else:
            shape, generator = SHAPES[self.side], torch.Generator().manual_seed(0)
            x = torch.randint(
                0, 256, (self.samples, *shape), dtype=torch.uint8, generator=generator
            )
            y = torch.arange(self.samples) % 10
            images = datasets.Samples("random", x, y, 10, (0.5,) * shape[0], (0.25,) * shape[0])
        return build_federation(images, partition.published(images.y.numpy(), 100, 42, alpha=0.1))

    def cohorts(self) -> list[list[int]]:
        """One cohort per round, and another one to warm up with, which is the last."""
        return list(engine.draw_cohorts(42, 100, self.width / 100, self.rounds + 1))
