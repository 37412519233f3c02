"""Sums over samples of squared gradients, without holding a large tensor's gradient for each
sample.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.models.net import Bound

SAMPLES_PER_CHUNK = 32  # whose gradients are in memory at once

Taps = dict[str, tuple[nn.Module, Tensor]]


def squared_gradients(
    net: Bound,
    loss: Callable[[Tree, Tensor, Tensor], Tensor],
    params: Tree,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
) -> Tree:
    """Return sum_n weight_n (d loss(params, x_n, y_n) / d params)^2 for each entry.

    The network is in evaluation mode. One sample's gradient of a linear layer's weight is the outer
    product of what reaches the output, d, and the input, a, so the sum of its squares is the matrix
    product (weight d^2)^T a^2 (F. Dangel, F. Kunstner, P. Hennig, BackPACK, ICLR 2020). A
    convolution's is summed over positions first. All other parameters are differentiated sample by
    sample.

    Args:
        net: The network.
        loss: Of a batch of one sample; it calls `net`.
        params: The parameters asked for, by their names in the network.
        x: Samples `[samples, ...]`.
        y: Labels `[samples]`.
        weight: Weights `[samples]`.
    """
    layers = _tappable_layers(net, loss, params, x, y)
    tapped = {
        f"{name}.{kind}"
        for name, (module, _) in layers.items()
        for kind, _ in module.named_parameters()
    }
    other_params = {name: value for name, value in params.items() if name not in tapped}

    def differentiate_sample(x: Tensor, y: Tensor) -> tuple[tuple[Tree, Tree], Tree]:
        def objective(other_params: Tree, offsets: Tree) -> tuple[Tensor, Tree]:
            with _record_calls(
                {name: module for name, (module, _) in layers.items()}, offsets
            ) as recorded:
                value = loss({**params, **other_params}, x[None], y[None])
            return value, {name: inputs[0] for name, [(inputs, _)] in recorded.items()}

        return grad(objective, argnums=(0, 1), has_aux=True)(
            other_params, {name: zeros for name, (_, zeros) in layers.items()}
        )

    total = tree.full_like(params, 0.0)
    for chunk in zip(*(tensor.split(SAMPLES_PER_CHUNK) for tensor in (x, y, weight)), strict=True):
        (other_gradients, output_gradients), inputs = vmap(differentiate_sample)(*chunk[:2])
        chunk_squares = {
            name: torch.tensordot(chunk[2], gradients.square(), 1)
            for name, gradients in other_gradients.items()
        }
        for name, (module, _) in layers.items():
            squares = _layer_squares(
                module, inputs[name][:, 0], output_gradients[name][:, 0], chunk[2]
            )
            chunk_squares |= {
                f"{name}.{kind}": value
                for kind, value in squares.items()
                if f"{name}.{kind}" in params
            }
        total = {name: value + chunk_squares[name] for name, value in total.items()}
    return total


def _tappable_layers(
    net: Bound, loss: Callable[[Tree, Tensor, Tensor], Tensor], params: Tree, x: Tensor, y: Tensor
) -> Taps:
    """Return layers in `params` that a call uses once, and zeros of their output's shape."""
    candidates: dict[str, nn.Module] = {
        name: module
        for name, module in net.net.module.named_modules()
        if f"{name}.weight" in params
        and (
            type(module) is nn.Linear
            or (type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros")
        )
        and not isinstance(getattr(module, "padding", None), str)
    }
    with torch.no_grad(), _record_calls(candidates) as recorded:
        loss(params, x[:1], y[:1])
    return {
        name: (candidates[name], torch.zeros_like(calls[0][1]))
        for name, calls in recorded.items()
        if len(calls) == 1
        and calls[0][0][0].dim() == (2 if type(candidates[name]) is nn.Linear else 4)
    }


@contextmanager
def _record_calls(
    layers: dict[str, nn.Module], offsets: Tree | None = None
) -> Iterator[dict[str, list[tuple[tuple[Tensor, ...], Tensor]]]]:
    """Record inputs and output of each call of the layers; outputs are moved by `offsets`."""
    calls: dict[str, list[tuple[tuple[Tensor, ...], Tensor]]] = {name: [] for name in layers}

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            calls[name].append((inputs, output))
            return output if offsets is None else output + offsets[name]

        return hook

    hooks = [module.register_forward_hook(make_hook(name)) for name, module in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _layer_squares(module: nn.Module, a: Tensor, d: Tensor, weight: Tensor) -> Tree:
    """For a layer's inputs and the gradients that reach its outputs, `[samples, ...]`."""
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
        d = d.flatten(2)
        squares_by_sample = (d @ patches.transpose(1, 2)).square()
        total = torch.tensordot(weight, squares_by_sample, 1).view(module.weight.shape)
        return {"weight": total, "bias": torch.tensordot(weight, d.sum(2).square(), 1)}
    squares = weight[:, None] * d.square()
    return {"weight": squares.t() @ a.square(), "bias": squares.sum(0)}
