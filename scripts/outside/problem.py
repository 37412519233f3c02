"""The problem of fedpfl and its peers: some digits at four clients, and a small network.

Whoever plays it trains on the same samples in the same order from the same initial parameters, so
two right programs end with equal models but for float's rounding.
"""

from __future__ import annotations

import collections
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedpfl
from fedpfl import oracle
from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.resolution import escape_interpolations
from fedpfl.config.run import build_run
from fedpfl.engine import keys
from fedpfl.testing.trials import compose_choice

CLIENTS = 4
CLASSES = 10
SIDE = 8
FEATURES = SIDE**2
HIDDEN = 16
CHANNELS = 20
CONVOLVED_SIDE = 28
CONVOLVED_RATE = 0.02
"""A shorter step, as BatchNorm blows rounding up."""
BATCH = 16
EPOCHS = 3
LEARNING_RATE = 0.1
SEED = 42
CLIENT_CLASSES = ((0, 1, 2), (2, 3, 4, 5), (5, 6, 7), (7, 8, 9, 0, 1))
TRAIN_SIZES = (32, 48, 64, 48)
TEST_SIZES = (20, 25, 20, 30)
PARAMETERS = ("hidden.0.weight", "hidden.0.bias", "classifier.weight", "classifier.bias")
"""Parameters of the small network in fedpfl, in the order that peers have them."""

NAMES = {"base.1.weight": "hidden.0.weight", "base.1.bias": "hidden.0.bias"}
for _stage in (1, 2):
    for _entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        NAMES[f"base.conv{_stage}.{_entry}"] = f"conv{_stage}.{_entry}"
        NAMES[f"base.bn{_stage}.{_entry}"] = f"norm{_stage}.{_entry}"
"""Names in fedpfl, where those of the networks here differ."""

CONVOLVED_PARAMETERS = (
    *("conv1.weight", "conv1.bias", "norm1.weight", "norm1.bias"),
    *("conv2.weight", "conv2.bias", "norm2.weight", "norm2.bias"),
    *("classifier.weight", "classifier.bias"),
)
"""Parameters of the network with convolutions in fedpfl, in order."""

Models = dict[str, Tensor]
"""What there is after a round: `server/NAME` and, for each client, `0/NAME`."""


class SmallNet(nn.Module):
    """A network of one hidden layer, with the parts that peers look for."""

    def __init__(self, features: int = FEATURES, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(features, hidden), nn.ReLU())
        self.classifier = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, classes]`."""
        return self.classifier(self.base(images))


class NamedLayers(nn.Module):
    """The small network with layers by name, as some peers want it."""

    def __init__(self, network: Any):
        super().__init__()
        self.hidden, self.fc = network.base[1], network.classifier

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, classes]`."""
        return self.fc(torch.relu(self.hidden(images.flatten(1))))


class ConvolvedNet(nn.Module):
    """FedSPU's network for EMNIST: two convolutions with BatchNorm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[tuple[str, nn.Module]] = []
        for stage, inputs in ((1, 1), (2, CHANNELS)):
            layers += [
                (f"conv{stage}", nn.Conv2d(inputs, CHANNELS, 3, padding=1)),
                (f"bn{stage}", nn.BatchNorm2d(CHANNELS)),
                (f"relu{stage}", nn.ReLU()),
                (f"pool{stage}", nn.MaxPool2d(2)),
            ]
        layers.append(("flatten", nn.Flatten()))
        self.base = nn.Sequential(collections.OrderedDict(layers))
        self.classifier = nn.Linear(CHANNELS * (CONVOLVED_SIDE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `[batch, classes]`."""
        return self.classifier(self.base(images))


WORDS = (
    f"dataset=npz dataset.mean=[0.0] dataset.std=[1.0] dataset.classes={CLASSES} clients={CLIENTS}"
    f" partition=file participation=1 local.epochs={EPOCHS} local.batch_size={BATCH} seed={SEED}"
    " local.momentum=0.0 eval.every=1 device=cpu"
)


class Problem(oracle.Problem):
    """Hold the samples, their split and the initial network.

    Of more than 8 pixels a side are digits beside each other; a convolved network has BatchNorm.
    """

    def __init__(
        self,
        folder: Path,
        engine: str = "loop",
        validation: float = 0.0,
        train_sizes: Sequence[int] = TRAIN_SIZES,
        side: int = SIDE,
        is_convolved: bool = False,
    ):
        self.folder, self.engine, self.is_convolved = folder, engine, is_convolved
        self.side = CONVOLVED_SIDE if is_convolved else side
        # As the loop has images: BatchNorm's sums depend on it in the fifth digit.
        is_loop = engine == "loop" and is_convolved
        self.layout = torch.channels_last if is_loop else torch.contiguous_format
        pixels, labels, parts = deal_digits(train_sizes, validation)
        border = (self.side - SIDE) // 2
        pixels = np.pad(pixels, ((0, 0), (0, 0), (border, border), (border, border)), "wrap")
        np.savez(folder / "digits.npz", x=pixels, y=labels)
        (folder / "split.json").write_text(json.dumps(parts))
        initial = self.make_network().state_dict()
        torch.save(
            {NAMES.get(name, name): initial[name] for name in initial}, folder / "initial.pt"
        )
        config = compose_choice("the problem", self._list_words(2, ["method=fedavg"]))
        super().__init__(build_run(check_config(escape_interpolations(config))))

    def make_network(self) -> Any:
        """Return the network as it is before the first round, in two parts: base, classifier."""
        with torch.random.fork_rng():
            torch.manual_seed(5)
            network = ConvolvedNet() if self.is_convolved else SmallNet(self.side**2)
            return network.to(memory_format=self.layout)

    def samples(self, client: int, split: str = "train") -> tuple[Tensor, Tensor]:
        """Return a client's images and labels."""
        chosen = self.parts[client][split]
        return self.images[chosen], self.labels[chosen]

    def batches(self, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return a client's minibatches, in the order in which everybody takes them."""
        images, labels = self.samples(client)
        return [*zip(images.split(BATCH), labels.split(BATCH), strict=True)]

    def size(self, client: int) -> int:
        """Return how many training samples a client has."""
        return len(self.parts[client]["train"])

    def shares(self) -> list[float]:
        """Return the clients' shares of all training samples."""
        sizes = [self.size(client) for client in range(CLIENTS)]
        return [size / sum(sizes) for size in sizes]

    def play(self, *settings: str, rounds: int = 2) -> list[Models]:
        """Train with fedpfl by these settings, and return the models after each round."""
        words = self._list_words(rounds, settings)
        folder = tempfile.mkdtemp(dir=self.folder)
        with oracle.note_loop(oracle.Notes(list)):
            return [*map(gather_models, fedpfl.rounds(*words, directory=f"{folder}/run"))]

    def play_to_the_end(self, *settings: str, rounds: int) -> Any:
        """Train with fedpfl, and return the run."""
        words = self._list_words(rounds, settings)
        folder = tempfile.mkdtemp(dir=self.folder)
        with oracle.note_loop(oracle.Notes(list)):
            return fedpfl.run(*words, directory=f"{folder}/run", progress=False)

    def _list_words(self, rounds: int, settings: Sequence[str]) -> list[str]:
        """Return the settings and what they do not say."""
        model = f"model=mlp model.hidden=[{HIDDEN}] local.lr={LEARNING_RATE}"
        if self.is_convolved:
            model = f"model=fedspu_emnist local.lr={CONVOLVED_RATE}"
        words = f"{WORDS} {model} rounds={rounds} engine={self.engine}".split()
        files = {"dataset.path": "digits.npz", "partition.path": "split.json"}
        for key, name in {**files, "model.weights": "initial.pt"}.items():
            words += overrides.format_words(key, str(self.folder / name))
        named = {setting.partition("=")[0] for setting in settings}
        return [*settings, *(word for word in words if word.partition("=")[0] not in named)]


def deal_digits(
    train_sizes: Sequence[int], validation: float
) -> tuple[np.ndarray, np.ndarray, list[dict[str, list[int]]]]:
    """Return pixels, labels and the clients' numbers of samples; validation ones are the last."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    free = np.random.RandomState(0).permutation(len(digits.target))
    chosen, parts = [], []
    for client, classes in enumerate(CLIENT_CLASSES):
        train_size = train_sizes[client]
        wanted = free[np.isin(digits.target[free], classes)][: train_size + TEST_SIZES[client]]
        free = free[~np.isin(free, wanted)]
        start = sum(map(len, chosen))
        chosen.append(wanted)
        numbers = list(range(start, start + len(wanted)))
        train = numbers[:train_size]
        validation_size = int(validation * train_size)
        part = {"train": train[: train_size - validation_size], "test": numbers[train_size:]}
        if validation_size:
            part["val"] = train[-validation_size:]
        parts.append(part)
    rows = np.concatenate(chosen)
    pixels = (digits.images[rows] * 15).astype(np.uint8)[:, None]
    return pixels, digits.target[rows], parts


def draw_halves(rounds: int) -> list[list[int]]:
    """Return the cohorts that fedpfl draws with `participation=0.5`."""
    return list(keys.draw_cohorts(SEED, CLIENTS, 0.5, rounds))


def gather_models(played: Any) -> Models:
    """Return the server's model and the clients' personal ones after a round of fedpfl."""
    models = {}
    # A method without a global model refuses.
    with contextlib.suppress(fedpfl.FedpflError):
        models.update(name_entries("server/", played.global_model()))
    for client in range(CLIENTS):
        models.update(name_entries(f"{client}/", played.personal(client)))
    return models


def name_entries(owner: str, model: Mapping[str, Tensor] | nn.Module | Sequence[Tensor]) -> Models:
    """Return a model's tensors behind its owner's name; a peer's get the names that fedpfl has."""
    if isinstance(model, nn.Module):
        model = list(model.parameters())
    if not isinstance(model, Mapping):
        names = CONVOLVED_PARAMETERS if len(model) > len(PARAMETERS) else PARAMETERS
        model = dict(zip(names, model, strict=True))
    return {f"{owner}{name}": tensor.detach().clone() for name, tensor in model.items()}


def rename_entries(owner: str, model: Mapping[str, Tensor]) -> Models:
    """Return a state of one of the networks behind its owner's name, by fedpfl's names.

    BatchNorm's counters are left out: some peers average them, and nothing depends on them.
    """
    names = [name for name in model if not name.endswith("num_batches_tracked")]
    return name_entries(owner, {NAMES.get(name, name): model[name] for name in names})


@contextlib.contextmanager
def keep_drawn_state(method_type: Any) -> Iterator[dict[str, Any]]:
    """Put the parameters that a method of fedpfl begins with, and its server's, into a dict."""
    drawn: dict[str, Any] = {}
    draw = method_type.init

    def draw_and_keep(method: Any, params: Mapping[str, Tensor], parts: Any) -> Any:
        drawn.update({name: entry.detach().clone() for name, entry in params.items()})
        server, client = draw(method, params, parts)
        drawn.update(server)
        return server, client

    method_type.init = draw_and_keep
    yield drawn
    method_type.init = draw


def find_largest_difference(ours: Sequence[Models], theirs: Sequence[Models]) -> float:
    """Return the largest difference of any entry that the peer has, over all rounds."""
    if len(ours) != len(theirs):
        raise ValueError(f"fedpfl played {len(ours)} rounds, the peer {len(theirs)}")
    largest = 0.0
    for models, peer_models in zip(ours, theirs, strict=True):
        if not peer_models:
            raise ValueError("the peer has no models")
        for name, tensor in peer_models.items():
            # nan is a difference, which max() would lose.
            difference = (models[name].double() - tensor.double().reshape(models[name].shape)).abs()
            largest = float(np.fmax(largest, difference.nan_to_num(nan=np.inf).max().item()))
    return largest
