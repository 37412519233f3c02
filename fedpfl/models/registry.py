"""Model names and how a network is built and initialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.origin import is_of_package
from fedpfl.ground.records import Record, Values
from fedpfl.ground.seeding import seeded_process
from fedpfl.models.adapter import ADAPTERS, none, require_additions
from fedpfl.models.cnn4 import CNN4
from fedpfl.models.fedspu import fedspu_cifar10, fedspu_emnist, fedspu_speech
from fedpfl.models.har_cnn import HARCNN
from fedpfl.models.heads import check_head, ends_in_linear, trace_layers
from fedpfl.models.hf import hf
from fedpfl.models.initial import start_additions_from, start_from
from fedpfl.models.lenet5 import LeNet5
from fedpfl.models.lstm import LSTM
from fedpfl.models.mlp import MLP
from fedpfl.models.net import Net, find_aliases
from fedpfl.models.norm import leave_padding_out
from fedpfl.models.resnet import resnet8, resnet10, resnet18
from fedpfl.models.shapes import answer_axes, sample_kind
from fedpfl.models.split import find_parts
from fedpfl.models.text import Text
from fedpfl.models.traits import (
    SEED,
    Traits,
    copy_network,
    made_up_samples,
    observe,
)
from fedpfl.models.transformer import Transformer
from fedpfl.models.vit import timm, vit, vit_base, vit_small, vit_tiny

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn4": CNN4,
    "fedspu_cifar10": fedspu_cifar10,
    "fedspu_emnist": fedspu_emnist,
    "fedspu_speech": fedspu_speech,
    "har_cnn": HARCNN,
    "hf": hf,
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

WRAPPERS = {"DataParallel", "DistributedDataParallel", "OptimizedModule", "RecursiveScriptModule"}
"""Classes that wrap a network, which neither vmap nor other parameters enter."""


def build_network(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
    adapter: Callable[..., None] = none,
    head: str | None = None,
    **options: Any,
) -> Net:
    """Build a network with initial values drawn from `seed`.

    The generators of the process are seeded while it is built, torch's as the published runs seeded
    it, and restored afterwards.

    Args:
        name: One of MODELS.
        shape: Of the samples (images: channels, height, width).
        classes: Number of classes.
        seed: Of the initial values.
        weights: Initial values by name instead; the classifier is still drawn if theirs is for
            other classes.
        adapter: One of ADAPTERS, given its options.
        head: The name of the layer that answers the classes, where it cannot be found
            (`model.head`).
        options: The model's options.

    Raises:
        FedpflError: For samples that the network cannot take, weights of another network, and mistakes
            in its code.
    """
    # Tests prove this package's networks free of side effects; a user's is observed.
    is_trusted = is_of_package(MODELS[name]) and name not in ("hf", "timm")
    with explain_errors(name):
        # ---- Step 1: the network, with initial values, and its head.
        module = _make_module(name, shape, classes, seed, options)
        check_logits(module, shape, classes)
        facts: Record = {"seed": seed, "sample": shape, "classes": classes}
        if not is_trusted:
            facts |= _trace_head(name, module, shape, classes)
        if head is not None:
            check_head(module, head)
            facts |= {"head_layer": head, "unclear": ""}
        parts = find_parts(module, **facts)

        # ---- Step 2: weights from elsewhere, and adapters.
        has_additions = any(".lora_" in name for name in weights or ())
        if weights is not None and not has_additions:
            head_entries = () if parts.unclear else parts.head
            start_from(module, _complete_weights(module, weights), head_entries)
        if getattr(adapter, "func", adapter) is not none:
            adapter(module, parts.head_layer, seed)
            # The map to the vocabulary is large, and frozen as in peft.
            if answer_axes(shape) and getattr(adapter, "func", adapter) is not ADAPTERS["head"]:
                module.get_submodule(parts.head_layer).requires_grad_(False)
            if weights is not None and has_additions:
                start_additions_from(module, weights)
            check_logits(module, shape, classes)
            if not is_trusted:
                require_additions(copy_network(module), made_up_samples(shape, 3))

        # ---- Step 3: side effects of its calls.
        if is_trusted:
            return Net(module, Traits(), name, **facts)
        traits = observe(module, shape)
        with seeded_process(seed):
            facts["is_linear_end"] = ends_in_linear(
                copy_network(module), parts.head_name, made_up_samples(shape, 2)
            )
        return Net(module, traits, name, **facts)


def make_module(
    name: str, shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> nn.Module:
    """Make the module of `build_network` alone, without weights or an adapter."""
    with explain_errors(name):
        return _make_module(name, shape, classes, seed, options)


@contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Turn errors of a network's code into a line that names the model."""
    try:
        yield
    except FedpflError:
        raise
    except Exception as error:  # ValueError, or a mistake in the network
        raise FedpflError(
            f"model={name}: {error_text(error, with_class=not isinstance(error, ValueError))[:300]}"
        ) from error


def _make_module(
    name: str, shape: tuple[int, ...], classes: int, seed: int, options: Values
) -> nn.Module:
    """Return a new network; lazy layers are called once, which gives them sizes and values."""
    with seeded_process(seed):
        module = MODELS[name](shape, classes, **options)
        wrapper = type(module).__name__
        if wrapper in WRAPPERS:
            raise ValueError(f"must be the network itself, without {wrapper}; the engine runs it")
        # Layers keep the mode in which they were made: calls set a mode only where it changes.
        if module.train() is not module:
            raise ValueError("its train(mode) does not return self, as torch.nn.Module's does")
        if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
            with torch.no_grad():
                module.eval()(_zero_samples(shape))
    leave_padding_out(module)
    return module


def _trace_head(name: str, module: nn.Module, shape: tuple[int, ...], classes: int) -> Record:
    """Return the layers' order and the head, or a message if it is unclear."""
    order, head = trace_layers(copy_network(module), made_up_samples(shape, 2), classes)
    facts: Record = {"order": tuple(order), "head_layer": head}
    if not head:
        last = f"{order[-1]} is the last layer" if order else "forward calls no layer"
        facts["unclear"] = (
            f"model={name}: which layer is the head is not clear ({last}, and has no output for"
            " each class); say which by model.head=NAME"
        )
    return facts


def _complete_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under all names of shared tensors.

    Buffers that no state_dict has are left out.
    """
    shared = {
        alias: weights[name] for alias, name in find_aliases(module).items() if name in weights
    }
    transient_buffers = dict(module.named_buffers()).keys() - module.state_dict().keys()
    return {
        name: value
        for name, value in {**shared, **weights}.items()
        if name not in transient_buffers
    }


def check_logits(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """Raise ValueError where a network does not answer two samples with their logits.

    Errors of the network itself are raised as they are.
    """
    module = copy_network(module).eval()  # which calls may change
    with torch.no_grad(), seeded_process(SEED):
        answer = module(_zero_samples(shape))
    if not isinstance(answer, Tensor):
        type_name = type(answer).__name__
        raise ValueError(
            f"answers with a {type_name}; forward must return the logits [batch, {classes}] "
            "alone, a tensor"
        )
    expected = [2, *answer_axes(shape), classes]
    if [*answer.shape] != expected:
        raise ValueError(f"answers two samples by {list(answer.shape)}, expected logits {expected}")


def _zero_samples(shape: tuple[int, ...]) -> Tensor:
    """Return two samples of zeros."""
    dtype = torch.int32 if sample_kind(shape) == "token ids" else torch.float32
    return torch.zeros((2, *shape), dtype=dtype)
