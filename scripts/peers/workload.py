"""What a user of a library brings to it: data of clients, a network, how to train and test one
client.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

FOLDER = Path(os.environ["WORKLOAD"])
ORDER = json.loads((FOLDER / "order.json").read_text())
DEVICE = ORDER["device"]


def cnn4() -> nn.Sequential:
    """Build the network of 582,026 parameters, the head last."""
    torch.manual_seed(42)
    body = [
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(
        *body, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)
    ).to(DEVICE)


class Clients:
    """Hold all samples once; clients' own are normalised when asked for."""

    def __init__(self) -> None:
        with np.load(FOLDER / "images.npz") as arrays:
            self.x, self.y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        self.split = json.loads((FOLDER / "split.json").read_text())

    def own(self, client: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images `[samples, 1, 28, 28]` and labels of a client's `train` or `test` part."""
        rows = self.split[client][part]
        return ((self.x[rows].float() / 255 - 0.286) / 0.3205).to(DEVICE), self.y[rows].to(DEVICE)

    def tested(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the test samples of all clients."""
        parts = [self.own(client, "test") for client in range(len(self.split))]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


@functools.cache
def clients() -> Clients:
    """Return the clients, whose images are read once in a process."""
    return Clients()


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take a client's local epochs of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=ORDER["lr"])
    for _ in range(ORDER["epochs"]):
        for rows in torch.randperm(len(y)).split(ORDER["batch"]):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the share of right answers in per cent."""
    right = sum(
        (model(a).argmax(1) == b).sum().item()
        for a, b in zip(x.split(256), y.split(256), strict=True)
    )
    return 100 * right / max(1, len(y))
