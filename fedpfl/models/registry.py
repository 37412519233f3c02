"""Model names and how a network is built and initialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedpfl.errors import FedpflError
from fedpfl.models.cnn4 import CNN4
from fedpfl.models.fedspu import fedspu_cifar10, fedspu_emnist, fedspu_speech
from fedpfl.models.har_cnn import HARCNN
from fedpfl.models.lenet5 import LeNet5
from fedpfl.models.mlp import mlp
from fedpfl.models.net import Net
from fedpfl.models.resnet import resnet8, resnet10, resnet18
from fedpfl.models.split import parts
from fedpfl.models.text import text
from fedpfl.models.weights import start_from

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn4": CNN4,
    "fedspu_cifar10": fedspu_cifar10,
    "fedspu_emnist": fedspu_emnist,
    "fedspu_speech": fedspu_speech,
    "har_cnn": HARCNN,
    "lenet5": LeNet5,
    "mlp": mlp,
    "resnet8": resnet8,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "text": text,
}
"""Called with the samples' shape, the number of classes, and the model's own options."""


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Net:
    """Build a network for samples of `shape` (images: channels, height, width), its initial values drawn from `seed`.

    weights: initial values by name instead; the classifier is still drawn, if theirs is for other classes.
    The global generator is seeded inside a fork, as the published runs seeded it, and left untouched.
    Raises FedpflError for an unknown name, a shape that the network cannot take, or weights of another one.
    """
    if name not in MODELS:
        raise FedpflError(f"model.name must be one of {', '.join(sorted(MODELS))}, got {name!r}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = MODELS[name](shape, classes, **options)
        if weights is not None:
            start_from(module, weights, parts(module, seed).head)
    except ValueError as error:
        raise FedpflError(f"model={name}: {error}") from None
    return Net(module, seed)
