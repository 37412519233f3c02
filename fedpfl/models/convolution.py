"""Convolutions with weights in the memory format that is fastest on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LEAST_ROWS = 4
"""Rows of a kernel from which cuDNN has no fast grouped 16-bit kernel with channels first."""


class Conv2d(nn.Conv2d):
    """Convolve as `nn.Conv2d`, in bf16 on a GPU with channels last where that is faster.

    Several models side by side are one grouped convolution.
    """

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if prefers_channels_last(x, weight):
            weight = _ChannelsLast.apply(weight)
        return super()._conv_forward(x, weight, bias)


def prefers_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Check whether a convolution of images `x` is faster with channels last."""
    # A round of cnn4 on an H200 takes three quarters of the time in bf16, but longer in fp32 and
    # half as long again in tf32.
    is_half = x.device.type == "cuda" and torch.is_autocast_enabled("cuda")
    return is_half and weight.shape[2] >= LEAST_ROWS


class _ChannelsLast(torch.autograd.Function):
    """Return equal weights `[out, in, rows, columns]` with neighbouring input channels.

    PyTorch then convolves with channels last, forwards and backwards.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        # `contiguous` with a memory format is not there under vmap.
        return weight.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # In the layout of the weights, or an optimizer's step is no longer one kernel for all.
        return grad.contiguous()
