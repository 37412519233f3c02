"""The federation: one data set in memory, and the indices of each client's training and test
samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedpfl.data.augment import Augment
from fedpfl.data.datasets import Samples
from fedpfl.data.datasets.shared.samples import mean_and_std
from fedpfl.data.partition import Partition
from fedpfl.ground.errors import FedpflError

VALIDATION_STREAM, NEWCOMERS_STREAM = (
    1,
    2,
)  # tell the streams of random numbers for what is held out from the partition's


class Shape(tuple[int, ...]):
    """The shape of one sample, which knows what it is the shape of: networks differ in what they
    take.
    """

    kind: str
    """images, signals or token ids"""
    data_set: str

    def __new__(cls, axes: Iterable[int], kind: str = "samples", data_set: str = "") -> Shape:
        """Of the axes of one sample."""
        shape = super().__new__(cls, axes)
        shape.kind, shape.data_set = kind, data_set
        return shape


@dataclass(frozen=True, eq=False)
class Federation:
    """What the engine trains on: all samples once, as they are stored, and the indices of each
    client's.
    """

    name: str
    # Uint8 images [samples, channels, height, width], int32 token ids [samples, length] or float32
    # signals
    x: Tensor
    y: Tensor  # int64 [samples]
    classes: int
    mean: tuple[float, ...]  # empty: samples are not scaled
    std: tuple[float, ...]
    train: tuple[Tensor, ...]  # int64 [samples of the client], one per client
    test: tuple[Tensor, ...]
    validation: tuple[Tensor, ...] = ()  # where the run holds training samples out, else empty
    augment: Augment | None = None  # of images in training steps alone
    partition_numbers: tuple[
        int, ...
    ] = ()  # of the clients in the partition, where these are not all of it
    excluded_classes: Tensor | None = (
        None  # bool [clients, classes]: what no prediction for a client may be; None: it may be any
    )
    # [channels, 1, ...], made once on the device of x: a copy from the host for each batch would
    # stall a GPU
    _shift: Tensor = field(init=False, repr=False)
    _scale: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, values in (("_shift", self.mean), ("_scale", self.std)):
            tensor = torch.tensor(values, dtype=torch.float32, device=self.x.device)
            tensor = tensor.view(-1, *[1] * (self.x.dim() - 2))
            object.__setattr__(self, name, tensor)

    @property
    def validation_or_test(self) -> tuple[Tensor, ...]:
        """Return what methods validate on: the validation splits, or the test splits where there
        are none.
        """
        return self.validation or self.test

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.train)

    @property
    def shape(self) -> Shape:
        """Return the shape of one sample; of an image: channels, height, width."""
        kind = {torch.uint8: "images", torch.int32: "token ids"}.get(self.x.dtype, "signals")
        return Shape(self.x.shape[1:], kind, self.name)

    @cached_property
    def train_sizes(self) -> Tensor:
        """Count training samples per client, int64 `[clients]`, on the CPU."""
        return torch.tensor([len(index) for index in self.train], dtype=torch.int64)

    @cached_property
    def test_sizes(self) -> Tensor:
        """Count test samples per client, int64 `[clients]`, on the CPU."""
        return torch.tensor([len(index) for index in self.test], dtype=torch.int64)

    def count_untrainable(self, batch_size: int, together: int = 1) -> int:
        """Count the clients that never train: they have too few training samples for a step of
        `together` minibatches.

        A minibatch of a lone sample is skipped.
        """
        full, rest = self.train_sizes // batch_size, self.train_sizes % batch_size
        return int((full + (rest > 1) < together).sum())

    def label_counts(self) -> Tensor:
        """Count samples per client and class, of all splits together: int64 `[clients, classes]`,
        on the CPU.
        """
        y = self.y.cpu()
        clients = zip(*filter(len, (self.train, self.validation, self.test)), strict=True)
        return torch.stack(
            [torch.bincount(y[torch.cat(splits)], minlength=self.classes) for splits in clients]
        )

    def partition_number(self, client: int) -> int:
        """Return what the partition numbers a client."""
        return self.partition_numbers[client] if self.partition_numbers else client

    def select_clients(self, clients: Sequence[int]) -> Federation:
        """Return the federation of some clients alone, numbered anew from 0."""
        splits = (self.train, self.test, self.validation)
        train, test, validation = (
            tuple(split[client] for client in clients if split) for split in splits
        )
        partition_numbers = tuple(map(self.partition_number, clients))
        excluded_classes = (
            None if self.excluded_classes is None else self.excluded_classes[list(clients)]
        )
        return replace(
            self,
            train=train,
            test=test,
            validation=validation,
            partition_numbers=partition_numbers,
            excluded_classes=excluded_classes,
        )

    def split_newcomers(self, newcomers: Collection[int]) -> tuple[Federation, Federation | None]:
        """Return those who take part and, if there are any, those who never do."""
        if not newcomers:
            return self, None
        return self.select_clients(
            [client for client in range(self.clients) if client not in newcomers]
        ), self.select_clients(sorted(newcomers))

    def merge_clients(self, most: int) -> Federation:
        """Return a federation of at most `most` clients with the same test samples, no others, and
        no class excluded_classes.
        """
        size = -(-self.clients // most)
        test = tuple(torch.cat(self.test[at : at + size]) for at in range(0, self.clients, size))
        return replace(
            self,
            train=tuple(own[:0] for own in test),
            test=test,
            validation=(),
            partition_numbers=(),
            excluded_classes=None,
        )

    def to(self, device: torch.device | str) -> Federation:
        """Put samples and labels on `device`. The indices stay on the CPU, where batches are
        planned.
        """
        excluded_classes = (
            None if self.excluded_classes is None else self.excluded_classes.to(device)
        )
        return replace(
            self, x=self.x.to(device), y=self.y.to(device), excluded_classes=excluded_classes
        )

    def normalize(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std per channel of samples `[..., *shape]`, pixels divided by 255
        first; float32.

        What is not scaled (token ids, or signals taken as they are) is returned as it is.
        """
        if not self.mean:
            return x
        values = x.to(torch.float32).div(255) if x.dtype == torch.uint8 else x.clone()
        return values.sub_(self._shift.to(x.device)).div_(self._scale.to(x.device))

    @property
    def augment_numbers(self) -> int:
        """Return how many random numbers decide how a training step sees a sample; 0: as it is."""
        return Augment.NUMBERS if self.augment else 0

    def apply_augmentation(self, x: Tensor, views: Tensor) -> Tensor:
        """Return normalised samples `[..., *shape]` as training steps see them; views: uniform
        `[..., self.augment_numbers]`.
        """
        return self.augment(x, views, -self._shift / self._scale) if self.augment else x


def build_federation(
    samples: Samples,
    partition: Partition,
    validation: float = 0.0,
    seed: int = 0,
    augment: Augment | None = None,
    newcomers: Collection[int] = (),
    only_local_classes: bool = False,
) -> Federation:
    """Deal a data set to clients; `int(validation * n)` of a client's n training samples are held
    out, at random.

    A mean or standard deviation that is not given is that of the training samples, as often as
    clients hold them, but for what is held out and what the newcomers have, who never take part.
    own_classes: a client is judged by predictions among the classes of its training samples, if it
    has any.

    Raises: FedpflError if the partition holds samples out itself, or what is to be augmented are no
    images.
    """
    if validation and partition.validation:
        raise FedpflError(
            f"validation must be 0, as the partition holds samples out itself, got {validation}; set validation=0"
        )
    if augment and samples.x.dtype != torch.uint8:
        raise FedpflError(
            f"augment is for images, but data set {samples.name} has none; set augment=none"
        )
    kept, held = _hold_out_validation(partition.train, validation, seed)
    train, mean, std = _to_tensors(kept), samples.mean, samples.std
    if mean is None or std is None:
        found = mean_and_std(
            samples.x,
            torch.cat([own for client, own in enumerate(train) if client not in newcomers]),
        )
        mean, std = (found[0] if mean is None else mean), (found[1] if std is None else std)
    excluded_classes = None
    if only_local_classes:
        counts = torch.stack(
            [torch.bincount(samples.y.cpu()[own], minlength=samples.classes) for own in train]
        )
        excluded_classes = (counts == 0) & counts.any(1, keepdim=True)
    return Federation(
        samples.name,
        samples.x,
        samples.y,
        samples.classes,
        mean,
        std,
        train=train,
        test=_to_tensors(partition.test),
        validation=_to_tensors(held or partition.validation),
        augment=augment or None,
        excluded_classes=excluded_classes,
    )


def draw_newcomers(clients: int, count: int, seed: int) -> list[int]:
    """Draw so many of the clients, who never take part; ascending."""
    return sorted(
        np.random.default_rng([seed, NEWCOMERS_STREAM]).permutation(clients)[:count].tolist()
    )


def _hold_out_validation(
    train: Sequence[np.ndarray], share: float, seed: int
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """What each client still trains on, in its order, and what is held out of it; nothing if the
    share is 0.
    """
    if not share:
        return train, ()
    rng = np.random.default_rng([seed, VALIDATION_STREAM])
    kept, held = [], []
    for index in train:
        out = np.zeros(len(index), bool)
        out[rng.permutation(len(index))[: int(share * len(index))]] = True
        kept.append(index[~out])
        held.append(index[out])
    return kept, held


def _to_tensors(indices: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.array(index, np.int64)) for index in indices)
