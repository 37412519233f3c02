"""Fully connected networks."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.ground.ranges import Count
from fedpfl.models.shapes import numbers


class MLP(nn.Module):
    """Linear layers of the widths `hidden`, each with a ReLU, and a classifier.

    Samples of any shape are flattened.

    Two of 200 are McMahan et al.'s 2NN (Communication-Efficient Learning, AISTATS 2017): 199,210
    scalars for [1, 28, 28] and 10 classes; 153,806 for the 561 features of UCI HAR and 6 classes.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        hidden: tuple[Count, ...] = (200, 200),
    ):
        super().__init__()
        inputs = [numbers(shape), *hidden]
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(inputs, hidden, strict=False))
        self.classifier = nn.Linear(inputs[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Samples `[batch, ...]` to logits `[batch, classes]`."""
        x = x.flatten(1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.classifier(x)
