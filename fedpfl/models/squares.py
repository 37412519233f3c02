"""Sums over samples of squared gradients, without a gradient of large tensors for each sample."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.models.net import Bound

SAMPLES_PER_CHUNK = 32  # their gradients are in memory together

Calls = dict[str, list[tuple[Tensor, Tensor]]]  # input and output of each call, by layer


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
    if not len(x):  # not every network can be asked what its layers make of no samples
        return tree.full_like(params, 0.0)

    # ---- Step 1: layers with differentiated outputs, and all other parameters.
    offsets = _find_offsets(net, loss, params, x, y)
    layers = {name: net.net.module.get_submodule(name) for name in offsets}
    layer_params = [name for name in params if name.rpartition(".")[0] in layers]
    other_params = tree.drop(params, layer_params)

    def differentiate_sample(x: Tensor, y: Tensor) -> tuple[tuple[Tree, Tree], Tree]:
        # The gradient at an offset of zeros is the gradient that reaches the layer's output.
        def objective(other_params: Tree, offsets: Tree) -> tuple[Tensor, Tree]:
            with _record_calls(layers, offsets) as calls:
                value = loss({**params, **other_params}, x[None], y[None])
            return value, {name: inputs for name, [(inputs, _)] in calls.items()}

        differentiate = grad(objective, argnums=(0, 1), has_aux=True)
        return differentiate(other_params, offsets)

    # ---- Step 2: squares, chunk by chunk, so that few gradients are in memory together.
    total = tree.full_like(params, 0.0)
    for start in range(0, len(x), SAMPLES_PER_CHUNK):
        chunk = slice(start, start + SAMPLES_PER_CHUNK)
        chunk_weight = weight[chunk]
        gradients, inputs = vmap(differentiate_sample)(x[chunk], y[chunk])
        other_gradients, output_gradients = gradients
        chunk_squares = {}
        for name, leaf in other_gradients.items():
            chunk_squares[name] = torch.tensordot(chunk_weight.to(leaf), leaf.square(), 1)
        for name, module in layers.items():
            a = inputs[name][:, 0]
            d = output_gradients[name][:, 0]
            for kind, squares in _layer_squares(module, a, d, chunk_weight).items():
                chunk_squares[f"{name}.{kind}"] = squares
        total = {name: value + chunk_squares[name] for name, value in total.items()}
    return total


def _find_offsets(
    net: Bound, loss: Callable[[Tree, Tensor, Tensor], Tensor], params: Tree, x: Tensor, y: Tensor
) -> Tree:
    """Return zeros of the output's shape for layers in `params` that a call uses once."""
    candidates: dict[str, nn.Module] = {}
    for name, module in net.net.module.named_modules():
        if f"{name}.weight" in params and (type(module) is nn.Linear or _is_plain_conv(module)):
            candidates[name] = module
    with torch.no_grad(), _record_calls(candidates) as calls_by_layer:
        loss(params, x[:1], y[:1])

    offsets = {}
    for name, calls in calls_by_layer.items():
        expected_dim = 2 if type(candidates[name]) is nn.Linear else 4
        # Gradients of a layer that is called twice add up before they are squared.
        if len(calls) == 1:
            inputs, output = calls[0]
            if inputs.dim() == expected_dim:
                offsets[name] = torch.zeros_like(output)
    return offsets


def _is_plain_conv(module: nn.Module) -> bool:
    """Check whether a layer is a convolution that F.unfold can spell out."""
    return (
        type(module) is nn.Conv2d
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


@contextmanager
def _record_calls(layers: dict[str, nn.Module], offsets: Tree | None = None) -> Iterator[Calls]:
    """Record input and output of each call of the layers; outputs are moved by `offsets`."""
    calls: Calls = {name: [] for name in layers}

    def record(name: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        calls[name].append((inputs[0], output))
        return output if offsets is None else output + offsets[name]

    hooks = [layer.register_forward_hook(partial(record, name)) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _layer_squares(module: nn.Module, a: Tensor, d: Tensor, weight: Tensor) -> Tree:
    """Return the weighted sums of squared gradients of a layer's weight and bias.

    Args:
        module: A linear layer or a convolution.
        a: Its inputs, `[samples, ...]`.
        d: The gradients that reach its outputs, `[samples, ...]`.
        weight: Weights `[samples]`.
    """
    if isinstance(module, nn.Conv2d):
        # A sample's gradient is a sum over positions, and is squared after that.
        patches = F.unfold(
            a,
            module.kernel_size,
            module.dilation,
            module.padding,  # type: ignore[arg-type]
            module.stride,
        )
        d = d.flatten(2)
        squares_by_sample = (d @ patches.transpose(1, 2)).square()
        total = torch.tensordot(weight, squares_by_sample, 1).view(module.weight.shape)
        return {
            "weight": total,
            "bias": torch.tensordot(weight, d.sum(2).square(), 1),
        }
    # (d a^T)^2 = d^2 (a^2)^T, entry by entry, so that the sum over samples is a product.
    squares = weight[:, None] * d.square()
    return {"weight": squares.t() @ a.square(), "bias": squares.sum(0)}
