"""Residual networks of basic blocks (He et al., Deep Residual Learning for Image Recognition, CVPR
2016).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.norm import BatchNorm2d
from fedpfl.models.shapes import image

Norm = Literal["batch", "group"]
Stem = Literal["large", "small"]

GROUPS = 32  # as Wu and He, Group Normalization, ECCV 2018; every width here is a multiple
NORMS: dict[Norm, Callable[[int], nn.Module]] = {
    "batch": BatchNorm2d,
    "group": partial(nn.GroupNorm, GROUPS),
}
STEMS = {"large": (7, 2, 3), "small": (3, 1, 1)}  # kernel, stride, padding


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a norm, beside the input.

    conv 3x3, norm, ReLU, conv 3x3, norm, plus the input, ReLU; the input is projected where its
    shape changes.
    """

    def __init__(self, inside: int, outside: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(
            inside,
            outside,
            3,
            stride,
            padding=1,
            bias=False,
        )
        self.norm1 = NORMS[norm](outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm2 = NORMS[norm](outside)
        self.project: nn.Module | None = None
        if stride != 1 or inside != outside:
            self.project = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), NORMS[norm](outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, inside, height, width]` to `[batch, outside, height / stride, width / stride]`."""
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + (x if self.project is None else self.project(x)))


class ResNet(nn.Module):
    """Stem, stages of 64, 128, ... channels with `blocks` basic blocks each, mean over the image,
    classifier.

    stem: large is ImageNet's (conv 7x7 / 2, norm, ReLU, max pool 3x3 / 2), which the papers use on
    32x32 images too; small is usual for small images (conv 3x3, norm, ReLU). norm: batch, or group,
    which keeps no statistics. Convolutions start Kaiming-normal over the fan-out (He et al., ICCV
    2015), the classifier as PyTorch's default: one seed gives torchvision's initial values bit for
    bit. Images may have any size; padding leaves none too small.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        blocks: tuple[int, ...],
        norm: Norm = "batch",
        stem: Stem = "large",
    ):
        super().__init__()

        # ---- Step 1: stem, stages and classifier.
        self.large = stem == "large"
        self.conv = nn.Conv2d(
            image(shape)[0],
            64,
            *STEMS[stem],
            bias=False,
        )
        self.norm = NORMS[norm](64)
        self.blocks = nn.Sequential()
        inside = 64
        for number, count in enumerate(blocks):
            outside = 64 * 2**number
            # Each stage but the first halves the image in its first block.
            strides = [1 if number == 0 else 2] + [1] * (count - 1)
            widths = [inside] + [outside] * (count - 1)
            for width, stride in zip(widths, strides, strict=True):
                self.blocks.append(BasicBlock(width, outside, stride, norm))
            inside = outside
        self.classifier = nn.Linear(inside, classes)

        # ---- Step 2: initial values, once more and last, as torchvision does: this order is the
        # order in which the seed's random numbers are spent.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        x = F.relu(self.norm(self.conv(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, padding=1)
        return self.classifier(self.blocks(x).mean((2, 3)))


def resnet8(
    shape: tuple[int, ...], classes: int, norm: Norm = "batch", stem: Stem = "large"
) -> ResNet:
    """Build three blocks of 64, 128, 256 channels: 1,235,274 scalars for [3, 32, 32] and 10 classes
    (FedPURIN).
    """
    return ResNet(shape, classes, (1, 1, 1), norm, stem)


def resnet10(
    shape: tuple[int, ...], classes: int, norm: Norm = "batch", stem: Stem = "large"
) -> ResNet:
    """Build four blocks of 64 to 512 channels: 4,957,092 scalars for [3, 32, 32] and 100 classes
    (FedPURIN).
    """
    return ResNet(shape, classes, (1, 1, 1, 1), norm, stem)


def resnet18(
    shape: tuple[int, ...], classes: int, norm: Norm = "batch", stem: Stem = "large"
) -> ResNet:
    """Build four stages of two blocks: 11,181,642 scalars for [3, 32, 32] and 10 classes
    (FedSelect), as torchvision's.

    stem=small, as usual for CIFAR: 11,173,962.
    """
    return ResNet(shape, classes, (2, 2, 2, 2), norm, stem)
