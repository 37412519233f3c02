"""Attacks on the data that attackers hold: flipped labels, and backdoors' triggers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedpfl.data import Federation
from fedpfl.data.datasets.shared.texts import find_class
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, PositiveProportion, WholeNumber
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import require_classification
from fedpfl.robust.attack import Attack

POISON_STREAM = 21
PATTERN_STREAM = 22
SINE_PERIODS = 6
OPACITIES = {"patch": 1.0, "blended": 0.2, "sine": 0.1}
"""How strong a pattern is unless the settings say so."""


@dataclass(frozen=True)
class DataAttack(Attack, ABC):
    """Alter attackers' training samples, and the samples that measure success."""

    poisoned: PositiveProportion = 1.0

    parts: ClassVar[int] = 1
    """In how many parts attackers share a pattern."""

    def check_federation(self, federation: Federation) -> None:
        """Raise FedpflError for samples that the attack is not for."""
        require_classification(
            federation.task, "an attack on data", "it is about classes; attack uploads"
        )

    def find_classes(self, federation: Federation) -> Self:
        """Return the attack with the numbers of the classes that its settings name.

        Raises:
            FedpflError: There is no such class.
        """
        numbers: Record = {}
        for key in ("source", "target"):
            label = getattr(self, key, None)
            if label is not None:
                names = federation.class_names
                numbers[key] = find_class(names, federation.classes, label, f"attack.{key}")
        return replace(self, **numbers)

    def describe_classes(self, federation: Federation) -> str:
        """Describe the classes of the attack by their names, "" where they are numbers alone."""
        names = federation.class_names
        numbers = [getattr(self, key, None) for key in ("source", "target")]
        texts = [f"class {names[number]}" for number in numbers if names and number is not None]
        return f" ({' becomes '.join(texts)}, of {', '.join(names[:10])})" if texts else ""

    @abstractmethod
    def alter_labels(self, y: Tensor, classes: int) -> Tensor:
        """Replace labels `[samples]` of so many classes."""

    def alter_samples(self, x: Tensor, seed: int, part: int | None = None) -> Tensor:
        """Alter stored samples as an attacker does.

        Args:
            x: As they are stored, `[samples, ...]`.
            seed: Of the run.
            part: Which part of a pattern an attacker has; None for the whole.
        """
        return x


@dataclass(frozen=True)
class LabelFlip(DataAttack):
    """Flip labels: each class to the next, or `source` to `target`."""

    source: WholeNumber | str | None = None
    target: WholeNumber | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        are_both = (self.source is None) == (self.target is None)
        self.check(are_both, "target", "set where source is, and nowhere else")
        differ = self.source is None or self.source != self.target
        self.check(differ, "target", "another class than source")

    def alter_labels(self, y: Tensor, classes: int) -> Tensor:
        """See DataAttack."""
        if self.source is None or self.target is None:
            return (y + 1) % classes
        return torch.where(y == int(self.source), int(self.target), y)


@dataclass(frozen=True)
class Backdoor(DataAttack):
    """Plant a pattern in images and label them as the target class."""

    poisoned: PositiveProportion = 0.5
    pattern: Literal["patch", "blended", "sine"] = "patch"
    target: WholeNumber | str = 0
    size: Count = 3
    opacity: PositiveProportion | None = None
    parts: Count = 1  # type: ignore[misc]

    def check_federation(self, federation: Federation) -> None:
        """Raise FedpflError where there are no images, or pattern or target do not fit."""
        super().check_federation(federation)
        shape = federation.shape
        if shape.kind != "images":
            raise FedpflError(
                f"an attack's pattern is for images, and data set {federation.name} has"
                f" {shape.kind}; choose attack=label_flip or one on uploads"
            )
        pixels = shape[-2] * shape[-1]
        if self.pattern == "patch":
            if self.size > min(shape[-2:]):
                raise FedpflError(
                    f"attack.size must be at most {min(shape[-2:])}, as images are"
                    f" {shape[-2]}x{shape[-1]}, got {self.size}"
                )
            pixels = self.size**2
        if self.parts > pixels:
            raise FedpflError(
                f"attack.parts must be at most {pixels}, the pixels of the pattern, got"
                f" {self.parts}"
            )

    def alter_labels(self, y: Tensor, classes: int) -> Tensor:
        """See DataAttack."""
        return torch.full_like(y, int(self.target))

    def alter_samples(self, x: Tensor, seed: int, part: int | None = None) -> Tensor:
        """See DataAttack."""
        paint = self.make_paint(tuple(x.shape[1:]), seed)
        if part is not None:
            paint = paint.cut_part(part, self.parts)
        painted = x.float() * paint.keep.to(x.device) + paint.shift.to(x.device)
        return painted.round().clamp(0, 255).to(x.dtype)

    def make_paint(self, shape: tuple[int, ...], seed: int) -> Paint:
        """Return the whole pattern for images of a shape (channels, height, width)."""
        opacity = self.opacity or OPACITIES[self.pattern]
        if self.pattern == "patch":
            cover = torch.zeros(shape)
            # The lower right corner, white.
            cover[..., -self.size :, -self.size :] = opacity
            return Paint(1 - cover, 255 * cover)
        if self.pattern == "blended":
            rng = np.random.default_rng([seed, PATTERN_STREAM])
            # One image of noise per seed, the same for all attackers and at test.
            image = torch.from_numpy(rng.random(shape)).float()
            return Paint(
                torch.full(shape, 1 - opacity),
                255 * opacity * image,
            )
        # Barni et al., 2019: a sine along the rows, six periods wide.
        phase = 2 * math.pi * SINE_PERIODS * torch.arange(shape[-1]) / shape[-1]
        return Paint(
            torch.ones(shape),
            (255 * opacity * phase.sin()).expand(shape),
        )


class Paint(NamedTuple):
    """Paint images: `keep * image + shift`.

    Attributes:
        keep: `[channels, height, width]`.
        shift: On the scale of pixels, `[channels, height, width]`.
    """

    keep: Tensor
    shift: Tensor

    def cut_part(self, part: int, parts: int) -> Paint:
        """Return a part of the painted pixels, in the order of rows."""
        is_painted = ((self.keep != 1) | (self.shift != 0)).any(0)
        # Parts are equal in pixels, as DBA gives each attacker a piece of one trigger.
        position = is_painted.flatten().cumsum(0) - 1
        part_of_pixel = position * parts // is_painted.sum()
        is_part = is_painted & (part_of_pixel == part).view_as(is_painted)
        return Paint(
            torch.where(is_part, self.keep, 1.0),
            torch.where(is_part, self.shift, 0.0),
        )


def poison_federations(
    attack: DataAttack, federations: Sequence[Federation], attackers: Sequence[int], seed: int
) -> tuple[Federation, tuple[Federation, ...]]:
    """Return clients that train on altered samples, and altered test samples of the honest.

    All share one store of samples. The second are those of each of the given federations that
    measure success; their labels are the attack's targets.

    Args:
        attack: How.
        federations: The clients that take part and, if any, newcomers; they share samples.
        attackers: Positions among those that take part.
        seed: Of the run.
    """
    participants = federations[0]
    # Backends join jobs with images in one tensor, so all of these lie in one.
    pool = _SamplePool(attack, participants, seed)

    # ---- Step 1: what attackers train on.
    train = list(participants.train)
    for rank, client in enumerate(attackers):
        indices = train[client]
        # A stream per client: one more attacker changes no other client's samples.
        rng = np.random.default_rng([seed, POISON_STREAM, participants.partition_number(client)])
        count = round(attack.poisoned * len(indices))
        positions = torch.from_numpy(rng.permutation(len(indices))[:count])
        part = rank % attack.parts if attack.parts > 1 else None
        # The same sample may be another client's, who has it clean.
        changed_indices = indices.clone()
        changed_indices[positions] = pool.add_altered(indices[positions], part)
        train[client] = changed_indices

    # ---- Step 2: test samples of the honest that the attack would turn into another class.
    test_splits = []
    for federation in federations:
        hostile = set(attackers) if federation is participants else set()
        splits = []
        for client, indices in enumerate(federation.test):
            honest_indices = indices[:0] if client in hostile else indices
            splits.append(pool.add_victims(honest_indices))
        test_splits.append(tuple(splits))

    # ---- Step 3: all of them in one store.
    x, y = pool.join_samples()
    triggered = []
    for federation, test in zip(federations, test_splits, strict=True):
        triggered.append(replace(federation, x=x, y=y, test=test))
    poisoned = replace(participants, x=x, y=y, train=tuple(train))
    return poisoned, tuple(triggered)


class _SamplePool:
    """Collect altered samples behind those of a federation."""

    def __init__(self, attack: DataAttack, federation: Federation, seed: int):
        self._attack = attack
        self._federation = federation
        self._seed = seed
        self._x = [federation.x]
        self._y = [federation.y]
        self._size = len(federation.y)

    def add_altered(self, indices: Tensor, part: int | None) -> Tensor:
        """Alter samples, and return the indices of the altered ones."""
        federation = self._federation
        rows = indices.to(federation.y.device)
        self._x.append(self._attack.alter_samples(federation.x[rows], self._seed, part))
        self._y.append(self._attack.alter_labels(federation.y[rows], federation.classes))
        start, self._size = self._size, self._size + len(indices)
        return torch.arange(start, self._size)

    def add_victims(self, indices: Tensor) -> Tensor:
        """Alter the samples with labels that the attack changes; return their indices."""
        federation = self._federation
        labels = federation.y[indices.to(federation.y.device)]
        altered_labels = self._attack.alter_labels(labels, federation.classes)
        # Samples that have the target's label already would count as success without an attack.
        return self.add_altered(indices[(altered_labels != labels).cpu()], part=None)

    def join_samples(self) -> tuple[Tensor, Tensor]:
        """Return all samples, and all labels."""
        return torch.cat(self._x), torch.cat(self._y)
