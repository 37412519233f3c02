"""LeNet-5 (LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998)."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.narrow import NarrowableConv2d
from fedpfl.models.pool import max_pool
from fedpfl.models.shapes import image


class LeNet5(nn.Module):
    """LeNet-5: two convolutions, two hidden layers and the classifier.

    conv 5x5 (6), pool 2, conv 5x5 (16), pool 2, fc 120, fc 84, classifier; no padding.

    ReLU, max pooling and fully connected maps, where LeCun had sigmoids, averages and a table of
    connections. 44,426 scalars for [1, 28, 28] and 10 classes, 62,006 for [3, 32, 32].
    """

    def __init__(self, shape: tuple[int, ...], classes: int):
        super().__init__()
        channels, height, width = image(shape, 16)
        rows = ((height - 4) // 2 - 4) // 2
        columns = ((width - 4) // 2 - 4) // 2
        self.conv1 = NarrowableConv2d(channels, 6, 5)
        self.conv2 = NarrowableConv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        # Pooling before the ReLU gives the same values and gradients with a quarter of the ReLU's
        # work.
        x = F.relu(max_pool(self.conv1(x), 2))
        x = F.relu(max_pool(self.conv2(x), 2)).flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.classifier(x)
