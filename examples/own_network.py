"""A network of your own under any method: `python examples/own_network.py`."""

from torch import nn

import fedpfl


class Small(nn.Module):
    """A convolution and a layer, for images of any size."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: int = 16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(shape[0], width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(16 * width, classes)

    def forward(self, x):
        return self.head(self.features(x))


MODELS = {"small": Small}  # its arguments are keys: model.width=32

if __name__ == "__main__":
    settings = {"plugins": [__file__], "clients": 10, "participation": 0.5}
    for method in ("fedavg", "fedbn", "fedper"):
        run = fedpfl.run(
            f"method={method}", "model=small", "model.width=8", rounds=3, progress=False, **settings
        )
        print(method, round(run.rounds["accuracy"].iloc[-1], 2))
    print(*run.personal(0))  # parameters and statistics of client 0, by name
