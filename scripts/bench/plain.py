"""The plain way: client after client, a DataLoader, nn.Module, torch.optim.SGD, PyTorch's default
threads, fp32.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bench.task import LOCAL, Task
from fedpfl import models
from fedpfl.data import Federation


def cnn4(fed: Federation) -> nn.Module:
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


def run(task: Task, device: torch.device, one_by_one: bool = False) -> dict[str, float]:
    """FedAvg the way that simulators usually run it; one_by_one: each sample normalised when it is
    asked for.
    """
    fed = task.federation()
    net = (
        cnn4(fed)
        if task.model == "cnn4"
        else models.build_network(task.model, fed.shape, fed.classes, 42).module
    ).to(device)
    shared = {name: value.clone() for name, value in net.state_dict().items()}
    sets, tests = (
        [
            OneByOne(fed, own)
            if one_by_one
            else TensorDataset(fed.normalize(fed.x[own]), fed.y[own])
            for own in split
        ]
        for split in (fed.train, fed.test)
    )

    def evaluate(client: int) -> int:
        net.eval()
        with torch.no_grad():
            loader = DataLoader(tests[client], batch_size=256)
            return sum(int((net(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)

    samples, started = 0, time.perf_counter()
    for cohort in task.cohorts()[: task.rounds]:
        total = sum(len(sets[client]) for client in cohort)
        merged = {name: torch.zeros_like(value) for name, value in shared.items()}
        for client in cohort:
            net.load_state_dict(shared)
            evaluate(client)
            net.train()
            optimizer = torch.optim.SGD(net.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum)
            loader = DataLoader(sets[client], batch_size=LOCAL.batch_size, shuffle=True)
            for _ in range(LOCAL.epochs):
                for x, y in loader:
                    if len(y) > 1:
                        optimizer.zero_grad()
                        F.cross_entropy(net(x.to(device)), y.to(device)).backward()
                        optimizer.step()
            evaluate(client)
            for name, value in net.state_dict().items():
                if value.is_floating_point():  # not BatchNorm's counters
                    merged[name] += value * (len(sets[client]) / total)
            samples += len(sets[client]) * LOCAL.epochs
        shared = merged
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - started, "samples": samples}
