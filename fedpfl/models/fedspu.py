"""The networks of the FedSPU paper, from its reference code (Niu et al., FedSPU, AAAI 2025)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.narrow import NarrowableConv2d
from fedpfl.models.norm import BatchNorm2d
from fedpfl.models.pool import max_pool
from fedpfl.models.shapes import image


class FedSPU(nn.Module):
    """Two convolutional stages, linear layers without bias and the classifier.

    A stage is convolution, BatchNorm, ReLU and max pool 2; a linear layer has ReLU.

    widths: channels of both stages. hidden: widths of the linear layers. kernel: size, stride,
    padding.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        widths: tuple[int, int],
        hidden: tuple[int, ...] = (),
        kernel: tuple[int, int, int] = (3, 1, 1),
    ):
        super().__init__()
        size, stride, padding = kernel
        channels, *sides = image(shape)
        for _ in widths:
            sides = [((side + 2 * padding - size) // stride + 1) // 2 for side in sides]
        if min(sides) < 1:
            raise ValueError(
                f"nothing is left of images of {shape[1]}x{shape[2]} pixels after two poolings"
            )
        self.conv1 = NarrowableConv2d(channels, widths[0], size, stride, padding)
        self.norm1 = BatchNorm2d(widths[0])
        self.conv2 = NarrowableConv2d(widths[0], widths[1], size, stride, padding)
        self.norm2 = BatchNorm2d(widths[1])
        inputs = [widths[1] * sides[0] * sides[1], *hidden]
        self.hidden = nn.ModuleList(
            nn.Linear(a, b, bias=False) for a, b in zip(inputs, hidden, strict=False)
        )
        self.classifier = nn.Linear(inputs[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        # Pooling before the ReLU gives the same values and gradients with a quarter of the ReLU's
        # work.
        x = F.relu(max_pool(self.norm1(self.conv1(x)), 2))
        x = F.relu(max_pool(self.norm2(self.conv2(x)), 2)).flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.classifier(x)


def fedspu_emnist(shape: tuple[int, ...], classes: int) -> FedSPU:
    """Build conv 3x3 (20), conv 3x3 (20), classifier.

    It has 64,722 scalars for [1, 28, 28] and 62 classes.
    """
    return FedSPU(shape, classes, (20, 20))


def fedspu_cifar10(shape: tuple[int, ...], classes: int) -> FedSPU:
    """Build conv 3x3 (6), conv 3x3 (16), fc 120, fc 84, classifier.

    It has 134,902 scalars for [3, 32, 32] and 10 classes.
    """
    return FedSPU(shape, classes, (6, 16), (120, 84))


def fedspu_speech(shape: tuple[int, ...], classes: int) -> FedSPU:
    """Build twice conv 2x2 / 2 (50), padding 2, and a classifier.

    It has 26,285 scalars for [1, 32, 32] and 35 classes.
    """
    return FedSPU(shape, classes, (50, 50), kernel=(2, 2, 2))
