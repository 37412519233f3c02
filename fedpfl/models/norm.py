"""Batch normalisation that knows which rows of a padded batch are real."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    _Base = nn.modules.batchnorm._BatchNorm
else:
    _Base = object


class PaddedNorm(_Base):
    """Batch normalisation with statistics that leave out rows of weight 0.

    `sample_weight` is `[batch]`. The batched backend pads partial batches; without this a padded
    row would move mean and variance.
    """

    sample_weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[batch, channels, ...]` per channel."""
        if self.sample_weight is None:
            return super().forward(x)
        input_dtype = x.dtype
        # bf16 would round the statistics; torch's own are float32.
        x = x.to(torch.promote_types(input_dtype, torch.float32))
        if not self.training and self.running_mean is not None:
            return super().forward(x).to(input_dtype)
        self._check_input_dim(x)

        # ---- statistics of the real rows
        axes = [0, *range(2, x.dim())]
        per_row = [-1, *[1] * (x.dim() - 1)]
        per_channel = [1, -1, *[1] * (x.dim() - 2)]
        weight = self.sample_weight.to(x.dtype).view(per_row)
        count = self.sample_weight.sum() * math.prod(x.shape[2:])
        mean = (x * weight).sum(axes) / count
        centred = x - mean.view(per_channel)
        variance = (centred.square() * weight).sum(axes) / count

        # ---- running statistics, which are absent without track_running_stats
        if self.training and self.running_mean is not None:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            rate: Any = self.momentum
            if rate is None:  # the mean over all batches so far
                rate = 1 / self.num_batches_tracked.to(x.dtype)
            self.running_mean.mul_(1 - rate).add_(rate * mean.detach())
            # torch keeps the unbiased variance, but normalises by the biased one.
            self.running_var.mul_(1 - rate).add_(rate * variance.detach() * count / (count - 1))

        # ---- scale and shift
        x = centred * torch.rsqrt(variance + self.eps).view(per_channel)
        if self.weight is not None:
            x = x * self.weight.view(per_channel) + self.bias.view(per_channel)
        return x.to(input_dtype)


class BatchNorm1d(PaddedNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` that leaves padded rows out."""


class BatchNorm2d(PaddedNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` that leaves padded rows out."""


class BatchNorm3d(PaddedNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` that leaves padded rows out."""


PADDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


def leave_padding_out(module: nn.Module) -> None:
    """Make torch's batch normalisations in a network leave padded rows out, in place."""
    for layer in module.modules():
        # The class alone changes: parameters, buffers and their names stay.
        layer.__class__ = PADDED.get(type(layer), type(layer))
