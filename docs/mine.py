"""A method, a model, a data set, a partition and a callback of one's own: docs/extend.md."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import nn

from fedpfl import Callback
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition
from fedpfl.ground.ranges import Between
from fedpfl.methods import FedAvg


@dataclass(frozen=True)
class Halfway(FedAvg):
    """Evaluate clients between the global model and their own last one."""

    title = "Halfway"
    share: Annotated[float, Between(0, 1)] = 0.5  # of the own one

    def init(self, params, parts):
        return params, {"own": params}

    def finish(self, server, client, start, params):
        return params, {"own": params}

    def personal(self, server, client):
        return {
            name: (1 - self.share) * server[name] + self.share * client["own"][name]
            for name in server
        }


class Wide(nn.Sequential):
    """One hidden layer."""

    def __init__(self, shape: tuple, classes: int, width: int = 64):
        super().__init__(
            nn.Flatten(),
            nn.Linear(int(np.prod(shape)), width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )


def stripes(source, count: int = 600) -> Raw:
    """Return images of noise with a bright row; `source.folder` is `data_dir`."""
    random = np.random.default_rng(0)
    y = random.integers(0, 3, count)
    x = random.integers(0, 100, (count, 1, 8, 8))
    x[np.arange(count), 0, y] += 100
    return Raw(x.astype(np.uint8), y)


def equal(y: np.ndarray, clients: int, seed: int, test_fraction: float = 0.25) -> Partition:
    """Deal all clients as many samples, at random."""
    own = np.array_split(np.random.default_rng(seed).permutation(len(y)), clients)
    return Partition(
        train=tuple(part[int(test_fraction * len(part)) :] for part in own),
        test=tuple(part[: int(test_fraction * len(part))] for part in own),
    )


class Best(Callback):
    """Keep the best accuracy so far in the run directory, in best.txt."""

    def on_begin(self, run):
        self.file, self.best = run.path / "best.txt", 0.0

    def on_round(self, round):
        accuracy = round.row["accuracy"]  # None where nobody was judged
        if accuracy is not None and accuracy > self.best:
            self.best = accuracy
            self.file.write_text(f"round {round.row['round']}: {accuracy:.2f} %\n")


METHODS = {"halfway": Halfway}
SPACES = {"halfway": {"method.share": "choice(0.2, 0.5, 0.8)"}}
MODELS = {"wide": Wide}
DATASETS = {"stripes": stripes}
PARTITIONS = {"equal": equal}
CALLBACKS = [Best]
