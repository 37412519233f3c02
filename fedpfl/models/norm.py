"""Batch normalisation that knows which rows of a padded batch are real."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, except that rows of weight 0 (`sample_weight` `[batch]`) take no part in the statistics.

    The batched backend pads partial batches; without this a padded row would move mean and variance.
    """

    sample_weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[batch, channels, height, width]` per channel."""
        if self.sample_weight is None:
            return super().forward(x)
        given = x.dtype
        x = x.to(torch.promote_types(given, torch.float32))  # bf16 would round the statistics; torch's own are float32
        if not self.training:
            return super().forward(x).to(given)
        weight = self.sample_weight.to(x.dtype).view(-1, 1, 1, 1)
        count = self.sample_weight.sum() * x.shape[2] * x.shape[3]
        mean = (x * weight).sum((0, 2, 3)) / count
        centred = x - mean.view(1, -1, 1, 1)
        variance = (centred.square() * weight).sum((0, 2, 3)) / count
        rate, counter = self.momentum, self.num_batches_tracked
        assert rate is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert counter is not None
        self.running_mean.mul_(1 - rate).add_(rate * mean.detach())
        self.running_var.mul_(1 - rate).add_(rate * variance.detach() * count / (count - 1))
        counter.add_(1)
        x = centred * torch.rsqrt(variance + self.eps).view(1, -1, 1, 1)
        return (x * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)).to(given)
