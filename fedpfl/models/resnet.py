"""Residual networks of basic blocks (He et al., Deep Residual Learning for Image Recognition, CVPR 2016)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.norm import BatchNorm2d

Norm = Literal["batch", "group"]
Stem = Literal["large", "small"]
GROUPS = 32  # of GroupNorm (Wu and He, ECCV 2018); every width here is a multiple


def _normalise(kind: str, channels: int) -> nn.Module:
    return BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(GROUPS, channels)


class BasicBlock(nn.Module):
    """conv 3x3, norm, ReLU, conv 3x3, norm, plus the input, ReLU; the input is projected where its shape changes."""

    def __init__(self, inside: int, outside: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm1 = _normalise(norm, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = _normalise(norm, outside)
        self.project: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.project = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), _normalise(norm, outside))

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, inside, height, width]` to `[batch, outside, height / stride, width / stride]`."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + (x if self.project is None else self.project(x)))


class ResNet(nn.Module):
    """Stem, stages of 64, 128, ... channels with `blocks` basic blocks each, mean over the image, classifier.

    stem: large is ImageNet's (conv 7x7 / 2, norm, ReLU, max pool 3x3 / 2), which the papers use on 32x32 images too;
    small is usual for small images (conv 3x3, norm, ReLU). norm: batch, or group, which keeps no statistics.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        blocks: tuple[int, ...],
        norm: Norm = "batch",
        stem: Stem = "large",
    ):
        super().__init__()
        self.large = stem == "large"
        size, stride, padding = (7, 2, 3) if self.large else (3, 1, 1)
        self.conv = nn.Conv2d(shape[0], 64, size, stride, padding, bias=False)
        self.norm = _normalise(norm, 64)
        stages, inside = [], 64
        for number, count in enumerate(blocks):
            outside = 64 * 2**number
            strides = [1 if number == 0 else 2] + [1] * (count - 1)
            widths = [inside] + [outside] * (count - 1)
            stages += [BasicBlock(width, outside, stride, norm) for width, stride in zip(widths, strides, strict=True)]
            inside = outside
        self.blocks = nn.Sequential(*stages)
        self.classifier = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        x = F.relu(self.norm(self.conv(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, padding=1)
        return self.classifier(self.blocks(x).mean((2, 3)))


def resnet8(shape: tuple[int, int, int], classes: int, norm: Norm = "batch", stem: Stem = "large") -> ResNet:
    """1,235,274 scalars for [3, 32, 32] and 10 classes (FedPURIN's and FedCAC's)."""
    return ResNet(shape, classes, (1, 1, 1), norm, stem)


def resnet10(shape: tuple[int, int, int], classes: int, norm: Norm = "batch", stem: Stem = "large") -> ResNet:
    """4,957,092 scalars for [3, 32, 32] and 100 classes (FedPURIN's)."""
    return ResNet(shape, classes, (1, 1, 1, 1), norm, stem)


def resnet18(shape: tuple[int, int, int], classes: int, norm: Norm = "batch", stem: Stem = "large") -> ResNet:
    """11,181,642 scalars for [3, 32, 32] and 10 classes (torchvision's topology; FedSelect's)."""
    return ResNet(shape, classes, (2, 2, 2, 2), norm, stem)
