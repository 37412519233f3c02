"""The layers of a network from samples to logits, and which is the head: found by following a
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedpfl.models.wiring import NORMALISATION


class Trace(NamedTuple):
    """The layers from samples to logits.

    Attributes:
        order: Names of the layers, in the order of their calls.
        head: Name of the head, "" where it is not clear.
        unclear: Why the head is not clear, in words; "" where it is.
    """

    order: list[str]
    head: str
    unclear: str


def trace_layers(module: nn.Module, x: Tensor, classes: int) -> Trace:
    """Follow samples `x` `[batch, ...]` through a network to its logits.

    The head is the last layer with parameters, normalisation aside, if it has an output for each
    class.
    """
    outputs, logits = _record_outputs(module, x)
    order = _list_sources([logits], outputs)
    layers = [name for name in order if not isinstance(module.get_submodule(name), NORMALISATION)]
    if not layers:
        return Trace(order, "", "no layer's output leads to the logits")

    # Outputs stand in the order of their calls, so no layer reads the last one's.
    *earlier_layers, head = layers
    read_by_head = _list_sources(outputs[head], {name: outputs[name] for name in earlier_layers})
    if ends := [name for name in earlier_layers if name not in read_by_head]:
        return Trace(order, "", f"{head} and {ends[-1]} end in the logits alike")
    if not _answers_classes(outputs[head][-1], classes):
        return Trace(order, "", f"{head} is the last layer and has no output for each class")
    return Trace(order, head, "")


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
    if logits.shape[1] > 1:
        difference = difference - difference.mean(1, keepdim=True)
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


def _record_outputs(module: nn.Module, x: Tensor) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Return the outputs of each layer with parameters in evaluation, and the logits.

    The module is changed: its layers get hooks.
    """
    outputs: dict[str, list[Tensor]] = {}

    def record(name: str) -> Callable[..., Any]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point():
                return None
            if not output.requires_grad:  # of a frozen layer: a point of the graph all the same
                with torch.enable_grad():
                    output = output.detach().requires_grad_() * 1
            # At the end: an output stands where its layer is called last.
            outputs[name] = [*outputs.pop(name, []), output]
            return output

        return hook

    for name, layer in _layers(module).items():
        layer.register_forward_hook(record(name))
    with torch.enable_grad():
        logits = module.eval()(x)
    return outputs, logits


def _layers(module: nn.Module) -> dict[str, nn.Module]:
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


def _list_sources(targets: list[Tensor], outputs: dict[str, list[Tensor]]) -> list[str]:
    """List the layers with outputs that change the targets."""
    names = [name for name, layer_outputs in outputs.items() for _ in layer_outputs]
    sources = [output for layer_outputs in outputs.values() for output in layer_outputs]
    influencing: dict[str, None] = {}
    for target in targets:
        if not sources or not target.requires_grad:
            continue
        # Fixed random weights: a plain sum does not change with the input of a softmax or a
        # normalisation.
        weights = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)).to(target)
        total = (target * weights).sum()
        gradients = torch.autograd.grad(total, sources, allow_unused=True, retain_graph=True)
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and bool(gradient.any()):
                influencing[name] = None
    return [name for name in outputs if name in influencing]


def _answers_classes(output: Tensor, classes: int) -> bool:
    """Check whether an output has an entry for each class: along its last axis, or as channels."""
    return output.dim() > 1 and classes in (output.shape[-1], output.shape[1])
