"""Model names and how a network is built and initialised."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fedpfl.errors import FedpflError
from fedpfl.models.cnn4 import CNN4
from fedpfl.models.net import Net

MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {"cnn4": CNN4}


def build(name: str, shape: tuple[int, int, int], classes: int, seed: int) -> Net:
    """Build a network for images `shape` (channels, height, width), PyTorch's default initialisation drawn from `seed`.

    The global generator is seeded inside a fork, as the published runs seeded it, and left untouched.
    Raises FedpflError for an unknown name or a shape that the network cannot take.
    """
    if name not in MODELS:
        raise FedpflError(f"model.name must be one of {', '.join(sorted(MODELS))}, got {name!r}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = MODELS[name](shape, classes)
    except ValueError as error:
        raise FedpflError(str(error)) from None
    return Net(module)
