"""The four-layer CNN of the FedOBP paper (two convolutions, two fully connected layers)."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.ground.ranges import WholeNumber
from fedpfl.models.convolution import Conv2d
from fedpfl.models.pool import max_pool
from fedpfl.models.shapes import image


class CNN4(nn.Module):
    """Two convolutions, a hidden layer and the classifier.

    conv 5x5 (32), pool 2, conv 5x5 (64), pool 2, fc 512, classifier; ReLU after each hidden
    layer, no padding.

    878,538 scalars for [3, 32, 32] and 10 classes, 582,026 for [1, 28, 28] and 10 classes (FedOBP,
    section V).
    projection: the width of MOON's projection (fc 512, ReLU, fc) before the classifier; 0 is none,
    the paper's is 256.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, projection: WholeNumber = 0):
        super().__init__()
        channels, height, width = image(shape, 16)
        rows = ((height - 4) // 2 - 4) // 2
        columns = ((width - 4) // 2 - 4) // 2
        # The order of construction is the order in which the seed's random numbers are spent: keep
        # it.
        self.conv1 = Conv2d(channels, 32, 5)
        self.conv2 = Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * rows * columns, 512)
        self.projection = nn.Sequential()
        if projection:
            self.projection.extend([nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, projection)])
        self.classifier = nn.Linear(projection or 512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` to logits `[batch, classes]`."""
        # Pooling before the ReLU gives the same values and gradients with a quarter of the ReLU's
        # work.
        x = F.relu(max_pool(self.conv1(x), 2))
        x = F.relu(max_pool(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.classifier(self.projection(x))
