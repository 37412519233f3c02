"""The layers of a network from samples to logits, and which is the head, found by calling it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedpfl.models.wiring import NORMALISATION


def trace_layers(module: nn.Module, x: Tensor, classes: int) -> tuple[list[str], str]:
    """Call a network; return its layers by their last calls, and the head.

    The head is the last one, normalisation aside, if it has an output for each class; "" where it
    has not.

    Args:
        module: The network; its layers get hooks.
        x: Samples `[batch, ...]`.
        classes: The number of classes.
    """
    shapes: dict[str, torch.Size] = {}

    def record(name: str, output: Any) -> None:
        shapes.pop(name, None)
        if isinstance(output, Tensor) and output.is_floating_point():
            shapes[name] = output.shape

    for name, layer in _list_layers(module).items():
        layer.register_forward_hook(lambda _, inputs, output, name=name: record(name, output))
    with torch.no_grad():
        module.eval()(x)
    layers = [name for name in shapes if not isinstance(module.get_submodule(name), NORMALISATION)]
    last = layers[-1] if layers else ""
    # Along its last axis, or as channels.
    has_classes = last and classes in (shapes[last][-1], *shapes[last][1:2])
    return list(shapes), last if has_classes else ""


def ends_in_linear(module: nn.Module, head: str, x: Tensor) -> bool:
    """Check whether logits are W z + b of a linear head alone.

    What all classes of a sample have in common does not count, as a softmax does not see it.

    Args:
        module: The network; its values are changed.
        head: The name of its head.
        x: Samples `[batch, ...]`.
    """
    layer = dict(module.named_modules()).get(head)
    if not isinstance(layer, nn.Linear) or parametrize.is_parametrized(layer):
        return False

    # ---- A factor, an offset or a map behind the head may be 1 or 0 at first, and is moved
    # for each class by another amount. The scale of layers' answers stays.
    with torch.no_grad():
        for leaf in [*module.parameters(), *module.buffers()]:
            if leaf.is_floating_point() and leaf.dim() > 1:
                leaf.add_(torch.randn_like(leaf), alpha=0.1 * leaf[0].numel() ** -0.5)
            elif leaf.is_floating_point():
                leaf.mul_(1.1).add_(torch.rand_like(leaf), alpha=0.1)

    # ---- A linear head's outputs beside the logits.
    expected: list[Tensor] = []
    hook = layer.register_forward_pre_hook(
        lambda _, inputs: expected.append(F.linear(inputs[0], layer.weight, layer.bias))
    )
    with torch.no_grad():
        logits = module.eval()(x)
    hook.remove()
    if len(expected) != 1 or expected[0].shape != logits.shape:
        return False
    difference = logits.double() - expected[0].double()
    if logits.shape[-1] > 1:
        difference = difference - difference.mean(-1, keepdim=True)
    return bool((difference.abs() <= 1e-4 * (1 + logits.double().abs())).all())


def check_head(module: nn.Module, name: str) -> None:
    """Raise ValueError where `name` is no trainable parameter or layer of the network."""
    names = [
        full for full, leaf in module.named_parameters(remove_duplicate=False) if leaf.requires_grad
    ]
    if not any(full == name or full.startswith(f"{name}.") for full in names):
        layers = dict.fromkeys(full.rpartition(".")[0] or full for full in names)
        raise ValueError(
            f"model.head={name} is no layer that trains; it has {', '.join(list(layers)[-8:])}"
        )


def _list_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the innermost modules with parameters, by name; a parametrised layer is one."""
    layers: dict[str, nn.Module] = {}
    for name, layer in module.named_modules():
        if ".parametrizations" in f".{name}":
            continue
        if parametrize.is_parametrized(layer):
            layers[name] = layer
            continue
        has_parameters = any(True for _ in layer.parameters(recurse=False))
        # A module with layers inside is no layer, though it may have a parameter.
        inner = any(True for child in layer.children() for _ in child.parameters())
        if has_parameters and not inner:
            layers[name] = layer
    return layers
