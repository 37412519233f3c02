"""Model names and how a network is built and initialised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fedpfl.ground import memory
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.origin import is_of_package
from fedpfl.ground.seeding import seeded_process
from fedpfl.ground.torch_defaults import torch_defaults
from fedpfl.models.adapter import none, require_additions
from fedpfl.models.cnn4 import CNN4
from fedpfl.models.fedspu import fedspu_cifar10, fedspu_emnist, fedspu_speech
from fedpfl.models.har_cnn import HARCNN
from fedpfl.models.heads import Trace, check_head, ends_in_linear, trace_layers
from fedpfl.models.initial import start_from
from fedpfl.models.lenet5 import LeNet5
from fedpfl.models.lstm import LSTM
from fedpfl.models.mlp import MLP
from fedpfl.models.net import Net, find_aliases
from fedpfl.models.norm import leave_padding_out
from fedpfl.models.resnet import resnet8, resnet10, resnet18
from fedpfl.models.shapes import UnfitSamples, sample_kind
from fedpfl.models.split import Parts, find_parts
from fedpfl.models.text import Text
from fedpfl.models.traits import (
    SEED,
    Traits,
    copy_network,
    made_up_samples,
    observe,
    require_equal_builds,
    require_true_copy,
)
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

WRAPPERS = {
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "OptimizedModule": "torch.compile",
    "RecursiveScriptModule": "torch.jit",
    "TopLevelTracedModule": "torch.jit",
}
"""What made a wrapped network, by its class: one that neither vmap nor other parameters enter."""


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
    it, and restored afterwards, as is what the network sets of torch.

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
        FedpflError: For samples that the network cannot take, weights of another one, sizes that no
            memory holds, and for side effects of calls that no run could keep apart between
            clients.
    """
    make_module = partial(MODELS[name], shape, classes, **options)
    # Networks of this package are known to do nothing else; a user's is observed.
    is_trusted = is_of_package(MODELS[name]) and name != "timm"
    with torch_defaults(), _explain_errors(name, shape, classes, options):
        # ---- Step 1: the network, with initial values.
        with seeded_process(seed):
            _check_size(make_module)
        facts: dict[str, Any] = {"seed": seed, "sample": shape, "classes": classes}
        if is_trusted:
            with seeded_process(seed):
                module = _make_module(make_module, shape)
            leave_padding_out(module)
            _check_logits(module, shape, classes)
        else:
            module = _make_foreign_module(make_module, shape, classes, seed)
            facts |= _trace_head(name, module, shape, classes)

        # ---- Step 2: its head, weights from elsewhere and adapters.
        if head is not None:
            check_head(module, head)
            facts |= {"head_layer": head, "unclear": ""}
        _load_values(module, find_parts(module, **facts), weights, adapter, seed)
        if getattr(adapter, "func", adapter) is not none:
            _check_logits(module, shape, classes)
            if not is_trusted:
                require_additions(copy_network(module), made_up_samples(shape, 3))

        # ---- Step 3: what calls of it do beside computing logits.
        if is_trusted:
            traits = Traits()
        else:
            traits = observe(module, shape)
            head_layer = find_parts(module, **facts).head_name
            with seeded_process(seed):
                facts["is_linear_end"] = ends_in_linear(
                    copy_network(module), head_layer, made_up_samples(shape, 2)
                )
        return Net(module, traits, name, **facts)


def require_equal_twin(
    name: str,
    twin: Callable[..., nn.Module],
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    **options: Any,
) -> None:
    """Raise FedpflError where a network is another one once its code is imported anew.

    Args:
        name: One of MODELS.
        twin: Makes the network by the code that was imported anew.
        shape: Of the samples.
        classes: Number of classes.
        seed: Of the initial values.
        options: The model's options.
    """
    if twin is MODELS[name]:
        return
    modules = []
    with torch_defaults(), _explain_errors(name, shape, classes, options):
        for make in (MODELS[name], twin):
            with seeded_process(seed):
                modules.append(_make_module(partial(make, shape, classes, **options), shape))
        try:
            require_equal_builds(modules[0], modules[1])
            require_true_copy(modules[0], modules[1], shape)
        except ValueError:
            raise ValueError(
                "it is another network where its file is imported anew, as by a run that is "
                "resumed: keep nothing in the module or on the class between calls, seed what is "
                "drawn at the import, and sort what sets hold"
            ) from None


@contextmanager
def _explain_errors(
    name: str, shape: tuple[int, ...], classes: int, options: Mapping[str, Any]
) -> Iterator[None]:
    """Turn what a network's code raises into a line that names the model."""
    try:
        yield
    except UnfitSamples as error:
        fitting_names = ", ".join(_fitting_models(shape, classes)) or "none"
        raise FedpflError(
            f"model={name}: {error}; models that take these: {fitting_names}"
        ) from None
    except MemoryError as error:
        keys = " or ".join(
            f"model.{key}" for key, value in options.items() if not isinstance(value, str)
        )
        raise FedpflError(
            f"model={name}: {error}; lower {keys or 'the size of the samples'}"
        ) from None
    except FedpflError:
        raise
    except Exception as error:  # ValueError, or a mistake in the network
        raise FedpflError(
            f"model={name}: {error_text(error, with_class=not isinstance(error, ValueError))[:300]}"
        ) from error


def _make_foreign_module(
    make_module: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, seed: int
) -> nn.Module:
    """Make a user's or timm's network; check that it can be made again and copied."""
    with seeded_process(seed):
        module = _make_module(make_module, shape)
    with seeded_process(seed):
        # Copies are what workers compute with, and a second build tells whether copies are true.
        second_build = _make_module(make_module, shape)
    require_equal_builds(module, second_build)
    leave_padding_out(module)
    _check_logits(module, shape, classes)
    require_true_copy(module, second_build, shape)
    return module


def _load_values(
    module: nn.Module,
    parts: Parts,
    weights: Mapping[str, Tensor] | None,
    adapter: Callable[..., None],
    seed: int,
) -> None:
    """Copy initial weights, if any, into a network, then adapt it, in place."""
    if weights is not None:
        head_entries = () if parts.unclear else parts.head
        start_from(module, _complete_weights(module, weights), head_entries)
    if getattr(adapter, "func", adapter) is not none:
        adapter(module, parts.head_layer, seed)


def _make_module(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """Return a new network; lazy layers are called once, which gives them sizes and values."""
    module = make()
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"must be made by a class or function that returns a torch.nn.Module, got {module!r}"
        )
    wrapper = WRAPPERS.get(type(module).__name__)
    if wrapper:
        raise ValueError(f"must be the network itself, without {wrapper}; the engine runs it")
    # In whatever mode its layers were made: calls set a mode only where it changes.
    if module.train() is not module:
        raise ValueError("its train(mode) does not return self, as torch.nn.Module's does")
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        with torch.no_grad():
            module.eval()(_zero_samples(shape))
        module.train()
    return module


def _trace_head(
    name: str, module: nn.Module, shape: tuple[int, ...], classes: int
) -> dict[str, Any]:
    """Return the layers' order and the head, or why these are unclear."""
    try:
        trace = trace_layers(copy_network(module), made_up_samples(shape, 2), classes)
    except Exception as error:  # of a network that cannot be differentiated by its layers' outputs
        trace = Trace([], "", error_text(error, with_class=True)[:120])
    facts: dict[str, Any] = {
        "order": tuple(trace.order),
        "head_layer": trace.head,
    }
    if trace.unclear:
        message = (
            f"model={name}: which layer is the head is not clear ({trace.unclear}); say which by"
            " model.head=NAME"
        )
        facts["unclear"] = message
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


class _SkipFilling(TorchFunctionMode):
    """On "meta", where tensors have no values: does not fill them, which would load much of torch
    first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func == Tensor.normal_ else func(*args, **(kwargs or {}))


def _check_size(make: Callable[[], nn.Module]) -> None:
    """Raise MemoryError for more parameters than this machine can hold, before any is made."""
    try:
        with torch.device("meta"), _SkipFilling():
            module = make()
    except ValueError:
        raise
    except Exception as error:
        if "overflow" in str(error).lower():  # of the sizes themselves
            raise MemoryError("its parameters would take more than any memory") from None
        return  # a network that cannot be made without values
    # On "meta" tensors have sizes and take no memory.
    size = sum(value.nbytes for value in (*module.parameters(), *module.buffers()))
    memory.require_memory(2 * size, "its parameters, held twice,")


def _check_logits(module: nn.Module, shape: tuple[int, ...], classes: int) -> None:
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
    if answer.shape != (2, classes):
        raise ValueError(
            f"answers two samples by {list(answer.shape)}, expected logits [2, {classes}]"
        )


def _zero_samples(shape: tuple[int, ...]) -> Tensor:
    """Return two samples of zeros."""
    dtype = torch.int32 if sample_kind(shape) == "token ids" else torch.float32
    return torch.zeros((2, *shape), dtype=dtype)


def _fitting_models(shape: tuple[int, ...], classes: int) -> list[str]:
    """Return the names of the models that take such samples."""
    names = []
    for name, network in MODELS.items():
        if name == "timm":  # which takes what one of its hundreds takes
            continue
        with suppress(Exception), torch.device("meta"), _SkipFilling():
            network(shape, classes)
            names.append(name)
    return names
