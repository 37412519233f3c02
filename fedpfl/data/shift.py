"""Shifts laid over a data set: what images, labels and classes become at each client.

All is a pure function of (seed, client, world). A world is what all clients hold for some rounds; a
schedule leads from one to the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from fedpfl.data.augment import find_outside, rotate_positions
from fedpfl.data.federation import Federation, find_absent_classes
from fedpfl.data.partition import Partition
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import (
    AtLeast,
    AtMost,
    Between,
    Count,
    Proportion,
    ProportionBelowOne,
)
from fedpfl.ground.seeding import Key, hash_key

IMAGES_PER_CHUNK = 1_000
FEATURES = ("rotation", "colour", "contrast", "blur", "noise")
"""Shifts of images, in the order in which they come."""
Rounds = tuple[Count, ...]


@dataclass(frozen=True)
class Shift(Checked):
    """Set how clients' samples differ from the data set's, and from which round.

    Amounts of image shifts are for level 1; clients' levels are from 0 to below 1.
    """

    rotation: Annotated[float, Between(0, 360)] = 0.0
    """Degrees, counter-clockwise about the middle; the corners that turn in are black."""
    noise: Proportion = 0.0
    """Standard deviation of normal noise, of full brightness."""
    blur: Annotated[float, Between(0, 10)] = 0.0
    """Standard deviation of a Gaussian blur, in pixels."""
    contrast: Proportion = 0.0
    """Share of the deviations from the channel's mean that is lost."""
    colour: Annotated[float, Between(0, 360)] = 0.0
    """Degrees of the turn of colours about the grey axis."""
    label_permutation: bool = False
    """Permute the names of classes; clusters agree on none, if classes are enough."""
    label_noise: ProportionBelowOne = 0.0
    """Share of the training labels that are wrong."""
    label_noise_kind: Literal["symmetric", "pair"] = "symmetric"
    """Wrong labels are any other class, or the next one."""
    imbalance: Annotated[float, AtLeast(1), AtMost(10**6)] = 1.0
    """Share of its training samples that class 0 keeps, in those of the last class."""
    by: Literal["cluster", "client"] = "cluster"
    clusters: Annotated[int, AtLeast(2)] = 4
    """Clusters of clients, of equal size and drawn at random."""
    at: Rounds = ()
    """Rounds after which the next world begins."""
    drift: Literal["draw", "deal"] = "draw"
    """In a next world clusters are drawn new shifts, or clients are dealt to clusters anew."""
    recover: bool = False
    """Whether the last world is the first again."""
    test: Literal["shifted", "before"] = "shifted"
    """Whether test samples shift with their client."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ascending = list(self.at) == sorted({*self.at})
        self.check(is_ascending, "at", "rounds in ascending order, each once")
        moves = bool(self.image_shifts or self.label_permutation)
        self.check(moves or not self.at, "at", "[] where nothing moves: choose shift=rotation, say")
        returns = len(self.at) > 1 or not self.recover
        self.check(returns, "recover", "false unless shift.at has two rounds or more")
        can_deal = self.by == "cluster" or self.drift == "draw"
        self.check(can_deal, "drift", "draw with shift.by=client, where there are no clusters")

    def __bool__(self) -> bool:
        return self.is_laid_over or self.imbalance > 1

    @property
    def image_shifts(self) -> dict[str, float]:
        """Return the amounts of the image shifts that are on, in order."""
        amounts = {name: getattr(self, name) for name in FEATURES}
        return {name: amount for name, amount in amounts.items() if amount}

    @property
    def is_laid_over(self) -> bool:
        """True if any image or label changes."""
        return bool(self.image_shifts or self.label_permutation or self.label_noise)

    def find_world(self, round_number: int) -> int:
        """Return the number of the world that a round is played in, from 0 on."""
        world = sum(start < round_number for start in self.at)
        # The last world is the first again.
        return 0 if self.recover and world == len(self.at) else world

    def find_start(self, round_number: int) -> int | None:
        """Return the round after which a round's world began, None for the first world."""
        return max((start for start in self.at if start < round_number), default=None)

    def __str__(self) -> str:
        """List the keys that are not at their defaults."""
        changes = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        return ", ".join(f"{name}={value}" for name, value in changes.items())


# ---- Who has what


def draw_levels(shift: Shift, clients: int, seed: int, world: int) -> np.ndarray:
    """Return each client's share of the amounts, float64 `[clients]`, in [0, 1).

    In the first world clusters are spread evenly.
    """
    units = _deal_units(shift, clients, seed, world)
    if shift.by == "cluster" and not _drawn_world(shift, world):
        return units / shift.clusters
    generator = _make_generator(seed, "level", _drawn_world(shift, world))
    # A draw per cluster, or per client.
    return generator.random(int(units.max()) + 1)[units]


def draw_permutations(
    shift: Shift, clients: int, classes: int, seed: int, world: int
) -> np.ndarray:
    """Draw each client's names of the classes, int64 `[clients, classes]`.

    Rows of a random Latin square, so that so many clusters as there are classes agree on none.
    """
    rows = []
    for unit in _deal_units(shift, clients, seed, world).tolist():
        square, row = divmod(unit, classes)
        generator = _make_generator(seed, "classes", _drawn_world(shift, world), square)
        names = generator.permutation(classes)
        positions = generator.permutation(classes)
        rows.append(names[(positions + row) % classes])
    return np.stack(rows)


def _deal_units(shift: Shift, clients: int, seed: int, world: int) -> np.ndarray:
    """Return each client's cluster, or its number where each shifts by itself."""
    if shift.by == "client":
        return np.arange(clients)
    dealt_world = world if shift.drift == "deal" else 0
    order = _make_generator(seed, "clusters", dealt_world).permutation(clients)
    return order % shift.clusters


def _drawn_world(shift: Shift, world: int) -> int:
    """Return the world with the draws of shifts that hold."""
    return world if shift.drift == "draw" else 0


def _make_generator(seed: int, *key: Key) -> np.random.Generator:
    return np.random.default_rng(hash_key((seed, "shift", *key)))


# ---- What becomes of samples


def shift_images(
    images: Tensor, shift: Shift, level: float, generator: np.random.Generator
) -> Tensor:
    """Return images with a share of the shift's amounts.

    Args:
        images: uint8 `[images, channels, height, width]`.
        shift: The amounts.
        level: The share of them.
        generator: What noise is drawn from.
    """
    amounts = {name: level * amount for name, amount in shift.image_shifts.items() if level}
    if "rotation" in amounts:
        images = _rotate_images(images, amounts.pop("rotation"))
    if not amounts:
        return images
    pieces = []
    for chunk in images.split(IMAGES_PER_CHUNK):
        values = _shift_values(chunk.numpy() / 255, amounts, generator)
        pieces.append(torch.from_numpy((values.clip(0, 1) * 255).round().astype(np.uint8)))
    return torch.cat(pieces)


def _rotate_images(images: Tensor, degrees: float) -> Tensor:
    """Turn images counter-clockwise about the middle, each pixel the nearest one."""
    height, width = images.shape[-2:]
    angle = torch.tensor([[[np.deg2rad(degrees)]]], dtype=torch.float64)
    row, column = rotate_positions(
        torch.arange(height).view(1, -1, 1),
        torch.arange(width).view(1, 1, -1),
        angle,
        height,
        width,
    )
    is_corner = find_outside(row, height) | find_outside(column, width)
    turned = images[..., row[0].clamp(0, height - 1), column[0].clamp(0, width - 1)]
    turned[..., is_corner[0]] = 0
    return turned


def _shift_values(
    values: np.ndarray, amounts: dict[str, float], generator: np.random.Generator
) -> np.ndarray:
    """Return values, 1 being full brightness, after all shifts but the rotation."""
    if "colour" in amounts:
        turn = _make_colour_turn(np.deg2rad(amounts["colour"]))
        values = np.einsum("ij,njhw->nihw", turn, values)
    if "contrast" in amounts:
        means = values.mean((2, 3), keepdims=True)
        values = means + (1 - amounts["contrast"]) * (values - means)
    if "blur" in amounts:
        from scipy.ndimage import gaussian_filter  # slow to load

        width = amounts["blur"]
        values = gaussian_filter(values, (0, 0, width, width), mode="nearest")
    if "noise" in amounts:
        values = values + generator.normal(0, amounts["noise"], values.shape)
    return values


def _make_colour_turn(angle: float) -> np.ndarray:
    """Return the rotation of (red, green, blue) about the grey axis, by Rodrigues' formula."""
    cross = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
    cross /= np.sqrt(3)
    sine = np.sin(angle)
    cosine = np.cos(angle)
    return np.eye(3) + sine * cross + (1 - cosine) * cross @ cross


def flip_labels(
    labels: Tensor, shift: Shift, classes: int, generator: np.random.Generator
) -> Tensor:
    """Return labels, int64 `[samples]`, with a share of wrong ones."""
    count = len(labels)
    is_wrong = generator.random(count) < shift.label_noise
    steps = np.ones(count, np.int64)
    if shift.label_noise_kind == "symmetric":
        # From 1 on: no wrong label is the right one.
        steps = generator.integers(1, classes, count)
    return (labels + torch.from_numpy(steps * is_wrong)) % classes


def thin_classes(partition: Partition, labels: np.ndarray, shift: Shift, seed: int) -> Partition:
    """Thin training samples to a long tail: class c keeps f^(-c / last).

    Raises:
        FedpflError: A client is left without training samples.
    """
    if shift.imbalance == 1:
        return partition
    rows = np.concatenate(partition.train)
    classes = int(labels.max()) + 1
    generator = _make_generator(seed, "tail")
    is_kept = np.zeros(len(rows), bool)
    for label in range(classes):
        positions = generator.permutation(np.flatnonzero(labels[rows] == label))
        # From 1 for class 0 down to 1 / imbalance for the last.
        share = shift.imbalance ** (-label / max(1, classes - 1))
        is_kept[positions[: round(share * len(positions))]] = True
    offsets = np.cumsum([len(indices) for indices in partition.train])
    flags_by_client = np.split(is_kept, offsets[:-1])
    for client, flags in enumerate(flags_by_client):
        if not flags.any():
            raise FedpflError(
                f"shift.imbalance={shift.imbalance:g} leaves client {client} no training samples; "
                "lower it, or use fewer clients"
            )
    train = zip(partition.train, flags_by_client, strict=True)
    return replace(partition, train=tuple(indices[flags] for indices, flags in train))


# ---- The federation of each world


def require_fit_of_shift(shift: Shift, federation: Federation) -> None:
    """Raise FedpflError for a shift that is for other samples or more clients."""
    if (shift.label_permutation or shift.label_noise) and federation.classes < 2:
        raise FedpflError("shift: labels cannot change where there is 1 class; use shift=none")
    kind = federation.shape.kind
    for name in shift.image_shifts:
        if kind != "images" or (name == "colour" and federation.shape[0] != 3):
            raise FedpflError(
                f"shift.{name} is for images, colour for three channels, and samples of data set "
                f"{federation.name} are {kind} {list(federation.shape)}; leave it out"
            )


@dataclass(frozen=True, eq=False)
class ShiftedClients:
    """Make the federation of a world, and keep the last one in memory.

    Attributes:
        everyone: All clients of the partition, as the data set has their samples.
        newcomers: Clients that never take part.
        shift: The amounts.
        seed: The seed of the draws.
    """

    everyone: Federation
    newcomers: Collection[int]
    shift: Shift
    seed: int
    _by_world: dict[int, tuple[Federation, Federation | None]] = field(default_factory=dict)

    def in_world(self, world: int) -> tuple[Federation, Federation | None]:
        """Return the clients that take part and, if there are any, those that never do."""
        if world not in self._by_world:
            self._by_world.clear()  # so that two worlds are not in memory at a time
            shifted = shift_federation(self.everyone, self.shift, self.seed, world)
            self._by_world[world] = shifted.split_newcomers(self.newcomers)
        return self._by_world[world]


def shift_federation(federation: Federation, shift: Shift, seed: int, world: int) -> Federation:
    """Return a federation with the samples of a world.

    Clients share no rows, even if they share samples in the data set.

    Args:
        federation: All clients of the partition, as the data set has their samples.
        shift: The amounts.
        seed: The seed of the draws.
        world: Its number.
    """
    # ---- Step 1: the splits of a client behind those of clients before it.
    x = federation.x.cpu()
    y = federation.y.cpu()
    levels = draw_levels(shift, federation.clients, seed, world)
    names = draw_permutations(shift, federation.clients, federation.classes, seed, world)
    shifted_x: list[Tensor] = []
    shifted_y: list[Tensor] = []
    splits: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    start = 0
    for client in range(federation.clients):
        for split, shifted_indices in splits.items():
            if not getattr(federation, split):
                continue
            indices = getattr(federation, split)[client]
            images = x[indices]
            labels = y[indices]
            if split == "train" and shift.label_noise:
                # Without the world: labels that are wrong once are wrong in all.
                generator = _make_generator(seed, "labels", client)
                labels = flip_labels(labels, shift, federation.classes, generator)
            if split != "test" or shift.test == "shifted":
                generator = _make_generator(seed, "pixels", client, split)
                images = shift_images(images, shift, float(levels[client]), generator)
                if shift.label_permutation:
                    labels = torch.from_numpy(names[client])[labels]
            shifted_x.append(images)
            shifted_y.append(labels)
            shifted_indices.append(torch.arange(start, start + len(indices)))
            start += len(indices)

    # ---- Step 2: all together.
    labels = torch.cat(shifted_y)
    train = tuple(splits["train"])
    excluded_classes = federation.excluded_classes
    if excluded_classes is not None:
        excluded_classes = find_absent_classes(labels, federation.classes, train)
    shifted = replace(
        federation,
        x=torch.cat(shifted_x),
        y=labels,
        train=train,
        validation=tuple(splits["validation"]),
        test=tuple(splits["test"]),
        excluded_classes=excluded_classes,
    )
    return shifted.to(federation.x.device)
