"""A convolutional network for raw motion signals, as is usual for UCI HAR in federated learning."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.models.shapes import signal


class HARCNN(nn.Module):
    """Two convolutions over time, two hidden layers and the classifier.

    conv 9 (32), pool 2, conv 9 (64), pool 2, fc 1024, fc 512, classifier; ReLU after each hidden
    layer, no padding.

    2,253,958 scalars for [9, 128] (UCI HAR's signals) and 6 classes. Its 561 features are for
    `mlp`.
    """

    def __init__(self, shape: tuple[int, ...], classes: int):
        super().__init__()
        channels, length = signal(shape, 28)
        self.conv1 = nn.Conv1d(channels, 32, 9)
        self.conv2 = nn.Conv1d(32, 64, 9)
        steps = ((length - 8) // 2 - 8) // 2
        self.fc1 = nn.Linear(64 * steps, 1024)
        self.fc2 = nn.Linear(1024, 512)
        self.classifier = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Signals `[batch, channels, length]` to logits `[batch, classes]`."""
        x = F.relu(F.max_pool1d(self.conv1(x), 2))
        x = F.relu(F.max_pool1d(self.conv2(x), 2)).flatten(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.classifier(x)
