"""Train the plain way: client after client, DataLoader, nn.Module, torch.optim.SGD, fp32."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.harness import LOCAL, Task
from fedpfl.data import Federation


def make_cnn4(federation: Federation) -> nn.Module:
    """Return the paper's network as anyone would write it down."""
    channels, height, width = federation.shape
    flat = 64 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2)
    return nn.Sequential(
        *(nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, federation.classes)),
    )


class LazyDataset(Dataset):
    """Hold a client's samples, each normalised when it is asked for."""

    def __init__(self, federation: Federation, indices: torch.Tensor):
        self._federation = federation
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self._indices[i]
        federation = self._federation
        return federation.normalize(federation.x[sample]), federation.y[sample]


def run_plain(task: Task, device: torch.device, is_lazy: bool = False) -> dict[str, float]:
    """Train FedAvg the way that simulators usually do.

    Args:
        task: What is trained.
        device: Where.
        is_lazy: Whether each sample is normalised when it is asked for.
    """
    federation = task.federation()
    net = make_cnn4(federation) if task.model == "cnn4" else task.net(federation).module
    net = net.to(device)
    global_state = {name: value.clone() for name, value in net.state_dict().items()}
    train_sets = [_make_dataset(federation, indices, is_lazy) for indices in federation.train]
    test_sets = [_make_dataset(federation, indices, is_lazy) for indices in federation.test]

    # A round of one client warms up: a GPU loads its kernels then.
    warm_up = task.cohorts()[-1][:1]
    start_time = 0.0
    for cohort in [warm_up, *task.cohorts()[: task.rounds]]:
        if cohort is not warm_up and not start_time:
            start_time = time.perf_counter()
        cohort_size = sum(len(train_sets[client]) for client in cohort)
        averaged = {name: torch.zeros_like(value) for name, value in global_state.items()}
        for client in cohort:
            net.load_state_dict(global_state)
            _evaluate(net, test_sets[client], device)
            _train(net, train_sets[client], device)
            _evaluate(net, test_sets[client], device)
            for name, value in net.state_dict().items():
                if value.is_floating_point():  # not BatchNorm's counters
                    averaged[name] += value * (len(train_sets[client]) / cohort_size)
        global_state = averaged
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start_time
    return {"seconds": seconds, "samples": task.sample_steps(federation)}


def _make_dataset(federation: Federation, indices: torch.Tensor, is_lazy: bool) -> Dataset:
    if is_lazy:
        return LazyDataset(federation, indices)
    return TensorDataset(federation.normalize(federation.x[indices]), federation.y[indices])


def _train(net: nn.Module, dataset: Dataset, device: torch.device) -> None:
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum)
    loader = DataLoader(dataset, batch_size=LOCAL.batch_size, shuffle=True)
    for _ in range(LOCAL.epochs):
        for x, y in loader:
            if len(y) > 1:
                optimizer.zero_grad()
                F.cross_entropy(net(x.to(device)), y.to(device)).backward()
                optimizer.step()


@torch.no_grad()
def _evaluate(net: nn.Module, dataset: Dataset, device: torch.device) -> int:
    """Return how many predictions are right."""
    net.eval()
    loader = DataLoader(dataset, batch_size=256)
    return sum(int((net(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)
