"""Max pooling: of several models side by side without copies, and faster without a gradient."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Dims = tuple[int | None, ...]


def max_pool(x: Tensor, size: int) -> Tensor:
    """Pool `[batch, channels, height, width]` by windows of `size`, as F.max_pool2d, to the bit.

    Under vmap a convolution leaves its result as `[batch, models * channels, ...]` in memory.
    PyTorch's own rule pools `[models * batch, ...]`, for which it copies the images twice on the
    way there and twice back. PyTorch's kernel for CPUs writes down where each largest value was
    also when no gradient will ask.
    """
    if not isinstance(x, Tensor):  # a tracer's proxy
        return F.max_pool2d(x, size)
    # Under vmap: the function has its own rule.
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return _MaxPool.apply(x, size)[0]
    # Two passes along an axis each are faster than the kernel that keeps positions.
    if x.device.type == "cpu" and not x.requires_grad:
        return _largest(_largest(x, size, -2), size, -1)
    return F.max_pool2d(x, size)


def _largest(x: Tensor, size: int, axis: int) -> Tensor:
    """Return the largest of each `size` neighbours along an axis, without a remainder."""
    count = x.shape[axis] // size
    windows = x.narrow(axis, 0, count * size).unflatten(axis, (count, size))
    return reduce(torch.maximum, windows.unbind(axis))


class _MaxPool(torch.autograd.Function):
    """Pool images; return the largest values and their positions in the image.

    Both are `[batch, channels, rows, columns]`.
    """

    @staticmethod
    def forward(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.max_pool2d_with_indices(x, [size, size])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # of the positions, which would be zeros
        ctx.size = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, *ctx.saved_tensors, ctx.size), None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, x: Tensor, size: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        models = info.batch_size
        values, positions = _MaxPool.apply(
            _join_axes(x, dims[0], models),
            size,
        )
        return (_split_axes(values, models), _split_axes(positions, models)), (1, 1)


class _Spread(torch.autograd.Function):
    """Return the gradient at `x`: that of each largest value at its position, 0 elsewhere."""

    @staticmethod
    def forward(grad: Tensor, x: Tensor, positions: Tensor, size: int) -> Tensor:
        window = [size, size]
        return torch.ops.aten.max_pool2d_with_indices_backward(
            grad, x, window, window, [0, 0], [1, 1], False, positions
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # The gradient of a gradient reads it at the same positions.
        (positions,) = ctx.saved_tensors
        at_largest = grad.flatten(2).gather(2, positions.flatten(2)).view(positions.shape)
        return at_largest, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Dims, grad: Tensor, x: Tensor, positions: Tensor, size: int
    ) -> tuple[Tensor, int]:
        models = info.batch_size
        grad = _join_axes(grad, dims[0], models)
        x = _join_axes(x, dims[1], models)
        positions = _join_axes(positions, dims[2], models)
        return _split_axes(_Spread.apply(grad, x, positions, size), models), 1


def _join_axes(x: Tensor, models_axis: int | None, models: int) -> Tensor:
    """Return images as `[batch, models * channels, height, width]`."""
    if models_axis is None:
        x = x.unsqueeze(1).expand(-1, models, -1, -1, -1)
    else:
        x = x.movedim(models_axis, 1)
    return x.flatten(1, 2)


def _split_axes(x: Tensor, models: int) -> Tensor:
    """Return images as `[batch, models, channels, height, width]`."""
    return x.unflatten(1, (models, -1))
