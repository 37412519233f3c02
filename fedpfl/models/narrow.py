"""Convolutions of the few channels that a narrow sub-model has, as matrix products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_CHANNELS = 8
"""With fewer, PyTorch's kernels, which take channels by the vector, compute mostly zeros."""

Pair = tuple[int, ...]


class Geometry(NamedTuple):
    """How a kernel moves over an image."""

    kernel: Pair
    stride: Pair
    padding: Pair


class NarrowableConv2d(nn.Conv2d):
    """`nn.Conv2d` that takes a product where its weight was cut down to few channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve `[batch, channels, height, width]`."""
        # At full size PyTorch's kernel stays, and every bit with it.
        channels = self.weight.shape[:2]
        kernel = self.weight.shape[2:]
        is_cut = channels != (self.out_channels, self.in_channels)
        is_narrow = is_cut and max(channels) < FEW_CHANNELS
        if not is_narrow or not _takes_product(x):
            return super().forward(x)
        assert not isinstance(self.padding, str)
        geometry = Geometry(kernel, self.stride, self.padding)
        return _Product.apply(x, self.weight, self.bias, geometry)


def _takes_product(x: Tensor) -> bool:
    """Check whether values are plain ones on a CPU, in full precision."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class _Product(torch.autograd.Function):
    """Convolve by one product with the columns of all samples."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        # All samples in one product, or it would be one of a few rows for each.
        windows = _view_windows(x, geometry)
        columns = windows.flatten(3).flatten(0, 2)
        ctx.save_for_backward(x, weight, columns)
        ctx.geometry = geometry
        ctx.has_bias = bias is not None
        rows = weight.flatten(1)
        if bias is None:
            outputs = rows @ columns
        else:
            outputs = torch.addmm(bias[:, None], rows, columns)
        by_sample = outputs.unflatten(1, windows.shape[3:])
        return by_sample.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, columns = ctx.saved_tensors
        # The gradient of a gradient sees the source of the columns.
        if torch.is_grad_enabled():
            return _differentiate_twice(ctx, grad, x, weight)

        # ---- Channel by channel, as the columns are
        geometry = ctx.geometry
        by_channel = grad.transpose(0, 1).flatten(1)
        grad_weight = by_channel @ columns.t()
        grad_bias = None
        if ctx.has_bias:
            grad_bias = by_channel.sum(1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            products = weight.flatten(1).t() @ by_channel
            by_sample = products.unflatten(1, (len(x), -1)).transpose(0, 1)
            grad_x = F.fold(
                by_sample,
                x.shape[2:],
                geometry.kernel,
                padding=geometry.padding,
                stride=geometry.stride,
            )
        return grad_x, grad_weight.view(weight.shape), grad_bias, None


def _differentiate_twice(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Return the gradients of a convolution in a way that has a gradient."""
    bias_shape = None
    if ctx.has_bias:
        bias_shape = [len(weight)]
    grads = torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        bias_shape,
        ctx.geometry.stride,
        ctx.geometry.padding,
        dilation=(1, 1),
        transposed=False,
        output_padding=(0, 0),
        groups=1,
        output_mask=[*ctx.needs_input_grad[:2], ctx.has_bias],
    )
    return *grads, None


def _view_windows(x: Tensor, geometry: Geometry) -> Tensor:
    """Gather the inputs of each output, `[channels, *kernel, batch, rows, columns]`."""
    height, width = geometry.kernel
    row_step, column_step = geometry.stride
    if any(geometry.padding):
        rows, columns = geometry.padding
        x = F.pad(x, (columns, columns, rows, rows))
    bands = x.unfold(2, height, row_step)
    windows = bands.unfold(3, width, column_step)
    return windows.permute(1, 4, 5, 0, 2, 3)
