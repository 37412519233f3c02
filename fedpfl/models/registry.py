"""Model names and how a network is built and initialised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedpfl.ground import memory
from fedpfl.ground.errors import FedpflError, reason
from fedpfl.models.adapter import none
from fedpfl.models.cnn4 import CNN4
from fedpfl.models.fedspu import fedspu_cifar10, fedspu_emnist, fedspu_speech
from fedpfl.models.har_cnn import HARCNN
from fedpfl.models.initial import start_from
from fedpfl.models.lenet5 import LeNet5
from fedpfl.models.lstm import LSTM
from fedpfl.models.mlp import MLP
from fedpfl.models.net import Net
from fedpfl.models.resnet import resnet8, resnet10, resnet18
from fedpfl.models.shapes import Unfit, kind
from fedpfl.models.split import parts
from fedpfl.models.text import Text
from fedpfl.models.transformer import Transformer
from fedpfl.models.vit import timm, vit, vit_base, vit_small, vit_tiny

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn4": CNN4,
    "fedspu_cifar10": fedspu_cifar10,
    "fedspu_emnist": fedspu_emnist,
    "fedspu_speech": fedspu_speech,
    "har_cnn": HARCNN,
    "lenet5": LeNet5,
    "lstm": LSTM,
    "mlp": MLP,
    "resnet8": resnet8,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "text": Text,
    "timm": timm,
    "transformer": Transformer,
    "vit": vit,
    "vit_base": vit_base,
    "vit_small": vit_small,
    "vit_tiny": vit_tiny,
}
"""Called with the samples' shape, the number of classes, and the model's own options."""


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
    adapter: Callable[..., None] = none,
    **options: Any,
) -> Net:
    """Build a network for samples of `shape` (images: channels, height, width), its initial values drawn from `seed`.

    weights: initial values by name instead; the classifier is still drawn, if theirs is for other classes.
    adapter: one of ADAPTERS, given its options.
    The global generator is seeded inside a fork, as the published runs seeded it, and left untouched.
    Raises FedpflError for samples that the network cannot take, weights of another one, or sizes that no memory holds.
    """
    make = partial(MODELS[name], shape, classes, **options)
    try:
        with torch.random.fork_rng(devices=[]):
            _check_size(make)
            torch.manual_seed(seed)
            module = make()
        top = parts(module).head
        if weights is not None:
            start_from(module, weights, top)
        adapter(module, top[0].rpartition(".")[0], seed)
        _try(module, shape, classes)
        return Net(module, seed=seed, sample=tuple(shape))
    except Unfit as error:
        others = ", ".join(_fitting(shape, classes)) or "none"
        raise FedpflError(f"model={name}: {error}; models that take these: {others}") from None
    except MemoryError as error:
        keys = " or ".join(f"model.{key}" for key, value in options.items() if not isinstance(value, str))
        raise FedpflError(f"model={name}: {error}; lower {keys or 'the size of the samples'}") from None
    except Exception as error:  # ValueError, or a mistake in the network
        raise FedpflError(f"model={name}: {reason(error, kind=not isinstance(error, ValueError))[:300]}") from error


class _Hollow(TorchFunctionMode):
    """On "meta", where tensors have no values: does not fill them, which would load much of torch first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func == Tensor.normal_ else func(*args, **(kwargs or {}))


def _check_size(make: Callable[[], nn.Module]) -> None:
    """Raise MemoryError for more parameters than this machine can hold, before any is made."""
    try:
        with torch.device("meta"), _Hollow():
            module = make()
    except ValueError:
        raise
    except Exception as error:
        if "overflow" in str(error).lower():  # of the sizes themselves
            raise MemoryError("its parameters would take more than any memory") from None
        return  # a network that cannot be made without values
    size = sum(value.nbytes for value in (*module.parameters(), *module.buffers()))
    memory.check(2 * size, "its parameters, held twice,")


def _try(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Raise what a network raises that does not answer two samples with their logits, ValueError for other answers."""
    x = torch.zeros(2, *shape, dtype=torch.int32 if kind(shape) == "token ids" else torch.float32)
    module.eval()
    with torch.no_grad():
        answer = module(x).shape
    module.train()
    if answer != (2, classes):
        raise ValueError(f"answers two samples by {list(answer)}, expected logits [2, {classes}]")


def _fitting(shape: tuple[int, ...], classes: int) -> list[str]:
    """The models that take such samples."""
    names = []
    for name, network in MODELS.items():
        if name == "timm":  # which takes what one of its hundreds takes
            continue
        with suppress(Exception), torch.device("meta"), _Hollow():
            network(shape, classes)
            names.append(name)
    return names
