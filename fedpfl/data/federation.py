"""The federation: one data set in memory, and each client's training and test indices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpfl.data.augment import Augment
from fedpfl.data.datasets import Samples
from fedpfl.data.datasets.shared.missing import measure_fill
from fedpfl.data.datasets.shared.samples import measure_channels
from fedpfl.data.heterogeneity import Heterogeneity, gini_coefficient, measure_heterogeneity
from fedpfl.data.partition import Partition
from fedpfl.data.partition.common import make_site_generator
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION, NEXT_TOKEN, Task, find_task

# Streams of random numbers beside the partition's, which has the seed alone.
VALIDATION_STREAM = 1
NEWCOMERS_STREAM = 2


class Shape(tuple[int, ...]):
    """The shape of one sample.

    Attributes:
        kind: "images", "signals" or "token ids", as each network takes one kind.
        data_set: The name of the data set.
        answer_axes: Axes of a network's answer to one sample before that of classes.
        pad: The id that fills texts up.
    """

    kind: str = "samples"
    data_set: str = ""
    answer_axes: tuple[int, ...] = ()
    pad: int = 0

    def __new__(cls, axes: Iterable[int], **facts: Any) -> Shape:
        """Make it from the axes of one sample, and its attributes."""
        shape = super().__new__(cls, axes)
        vars(shape).update(facts)
        return shape


@dataclass(frozen=True, eq=False)
class Federation:
    """All samples once, as they are stored, and the indices of each client's samples.

    Attributes:
        name: Of the data set.
        x: uint8 images `[samples, channels, height, width]`, int32 token ids `[samples, length]`,
            or float32 signals.
        y: labels in the form of their task: int64 classes `[samples]`, bools `[samples, labels]` or
            float32 `[samples]`.
        classes: Number of classes, or of what else a network answers: labels, or 1 number.
        mean: Per channel; empty where samples are not scaled.
        std: Per channel; empty where samples are not scaled.
        train: int64 indices of each client's training samples.
        test: int64 indices of each client's test samples.
        validation: int64 indices of each client's validation samples; empty without validation.
        augment: Random changes of images, in training steps alone.
        partition_numbers: Of the clients in the partition; empty where these are all of it.
        excluded_classes: Bool `[clients, classes]`, the classes that no prediction for a client may
            be; None: all classes may be predicted.
        client_names: Of these clients; empty where they are numbers alone.
        class_names: Empty where classes are numbers alone.
        feature_names: Of a table; empty of anything else.
        fill: Per channel, for values that are absent (NaN); empty where none may be.
        is_elsewhere: Whether samples are at nodes, and x and y have their form alone: who holds
            which labels is not known.
        pad: The id that fills texts up.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]
    validation: tuple[Tensor, ...] = ()
    augment: Augment | None = None
    partition_numbers: tuple[int, ...] = ()
    excluded_classes: Tensor | None = None
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    is_elsewhere: bool = False
    pad: int = 0
    # Mean, std and fill as `[channels, 1, ...]`, made once on the device of x: a copy from the host
    # for each batch would stall a GPU.
    _shift: Tensor = field(init=False, repr=False)
    _scale: Tensor = field(init=False, repr=False)
    _fill: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape = (-1, *[1] * (self.x.dim() - 2))
        constants = {"_shift": self.mean, "_scale": self.std, "_fill": self.fill}
        for name, values in constants.items():
            tensor = torch.tensor(values, dtype=torch.float32, device=self.x.device)
            object.__setattr__(self, name, tensor.view(shape))

    @property
    def validation_or_test(self) -> tuple[Tensor, ...]:
        """Return the validation splits, or else the test splits."""
        return self.validation or self.test

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.train)

    @property
    def shape(self) -> Shape:
        """Return the shape of one sample; of an image: channels, height, width."""
        kind = {torch.uint8: "images", torch.int32: "token ids"}.get(self.x.dtype, "signals")
        axes = tuple(self.y.shape[1:]) if self.task is NEXT_TOKEN else ()
        facts: Record = {"data_set": self.name, "answer_axes": axes, "pad": self.pad}
        return Shape(self.x.shape[1:], kind=kind, **facts)

    @cached_property
    def train_sizes(self) -> Tensor:
        """Count training samples per client, int64 `[clients]`, on the CPU."""
        return _count_samples(self.train)

    @cached_property
    def test_sizes(self) -> Tensor:
        """Count test samples per client, int64 `[clients]`, on the CPU."""
        return _count_samples(self.test)

    def count_untrainable(self, batch_size: int, batches_per_step: int = 1) -> int:
        """Count the clients with too few training samples for a single step.

        Args:
            batch_size: Samples per minibatch. A minibatch of a single sample is skipped.
            batches_per_step: Minibatches that a step needs.
        """
        full_batches = self.train_sizes // batch_size
        remainder = self.train_sizes % batch_size
        # A remainder of one sample is no batch.
        batches = full_batches + (remainder > 1)
        return int((batches < batches_per_step).sum())

    def label_counts(self) -> Tensor:
        """Count samples per client and class, int64 `[clients, classes]`, on the CPU.

        Of several labels those with a label are counted; where labels are numbers, or samples are
        at nodes, the result has no columns.
        """
        return self._label_counts

    @cached_property
    def _label_counts(self) -> Tensor:
        if self.is_elsewhere or self.task.output:
            return torch.zeros((self.clients, 0), dtype=torch.int64)
        labels = self.y.cpu()
        counts = []
        for splits in zip(*filter(len, (self.train, self.validation, self.test)), strict=True):
            own = labels[torch.cat(splits)]
            is_single = self.task is CLASSIFICATION
            counts.append(torch.bincount(own, minlength=self.classes) if is_single else own.sum(0))
        return torch.stack(counts)

    @property
    def task(self) -> Task:
        """Return the purpose of the labels."""
        return find_task(self.y)

    def count_labels(self, indices: Tensor) -> int:
        """Count what scores of some samples are means over: the samples, or their tokens."""
        if self.task is not NEXT_TOKEN:
            return len(indices)
        return int((self.y[tree.send(indices, self.y.device)] >= 0).sum())

    def sample_counts(self) -> Tensor:
        """Count all samples per client, int64 `[clients]`, on the CPU."""
        splits = filter(len, (self.train, self.validation, self.test))
        return torch.stack([_count_samples(split) for split in splits]).sum(0)

    @cached_property
    def heterogeneity(self) -> Heterogeneity:
        """Measure the clients' differences in labels and sizes."""
        if self.task is CLASSIFICATION and not self.is_elsewhere:
            return measure_heterogeneity(self._label_counts.numpy())
        sizes = self.sample_counts()
        return Heterogeneity(None, gini_coefficient(sizes[sizes > 0].numpy()))

    def partition_number(self, client: int) -> int:
        """Return a client's number in the partition."""
        return self.partition_numbers[client] if self.partition_numbers else client

    def client_label(self, client: int) -> str:
        """Name a client in messages: its number in the partition, and its name if any."""
        number = self.partition_number(client)
        return f"{number} ({self.client_names[client]})" if self.client_names else str(number)

    def select_clients(self, clients: Sequence[int]) -> Federation:
        """Return the federation of some clients alone, numbered anew from 0."""

        def select(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[client] for client in clients if values)

        excluded_classes = self.excluded_classes
        if excluded_classes is not None:
            excluded_classes = excluded_classes[list(clients)]
        return replace(
            self,
            train=select(self.train),
            test=select(self.test),
            validation=select(self.validation),
            partition_numbers=tuple(map(self.partition_number, clients)),
            excluded_classes=excluded_classes,
            client_names=select(self.client_names),
        )

    def with_samples_of(self, client: int, positions: Tensor, x: Tensor, y: Tensor) -> Federation:
        """Return the federation of one client's node, where no other client has samples.

        Args:
            client: The client.
            positions: Its samples in all samples, ascending, int64 `[samples]`.
            x: These samples.
            y: Their labels.
        """

        def keep_own(splits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nothing = positions[:0]
            return tuple(
                torch.searchsorted(positions, indices) if number == client else nothing
                for number, indices in enumerate(splits)
            )

        train = keep_own(self.train)
        excluded_classes = self.excluded_classes
        if excluded_classes is not None:
            excluded_classes = find_absent_classes(y.cpu(), self.classes, train).to(x.device)
        return replace(
            self,
            x=x,
            y=y,
            train=train,
            test=keep_own(self.test),
            validation=keep_own(self.validation),
            excluded_classes=excluded_classes,
        )

    def split_newcomers(self, newcomers: Collection[int]) -> tuple[Federation, Federation | None]:
        """Return the clients that take part and, if there are any, those that never do."""
        if not newcomers:
            return self, None
        participants = [client for client in range(self.clients) if client not in newcomers]
        return self.select_clients(participants), self.select_clients(sorted(newcomers))

    def pool_samples(self, client: int) -> Federation:
        """Give the samples of all clients to one of them, which stands for all."""
        pooled: Record = {}
        for split in ("train", "test", "validation"):
            indices = [*getattr(self, split)]
            if indices:
                indices[client] = torch.cat(indices)
            pooled[split] = tuple(indices)
        return replace(self, **pooled)

    def merge_clients(self, limit: int) -> Federation:
        """Return a federation of at most `limit` clients that hold the same test samples.

        They have no other samples, and no class is excluded.
        """
        size = -(-self.clients // limit)  # rounded up
        test = tuple(
            torch.cat(self.test[start : start + size]) for start in range(0, self.clients, size)
        )
        return replace(
            self,
            train=tuple(indices[:0] for indices in test),
            test=test,
            validation=(),
            partition_numbers=(),
            excluded_classes=None,
            client_names=(),
        )

    def to(self, device: torch.device | str) -> Federation:
        """Move samples and labels to a device.

        The indices stay on the CPU, where batches are planned.
        """
        excluded_classes = self.excluded_classes
        if excluded_classes is not None:
            excluded_classes = excluded_classes.to(device)
        return replace(
            self, x=self.x.to(device), y=self.y.to(device), excluded_classes=excluded_classes
        )

    def normalize(self, x: Tensor) -> Tensor:
        """Return samples `[..., *shape]` as (x - mean) / std per channel, float32.

        Pixels are divided by 255 first. Token ids, and signals without mean and std, are returned
        as they are. Absent values are filled first.
        """
        if self.fill:
            x = torch.where(x.isnan(), self._fill.to(x.device), x)
        if not self.mean:
            return x
        values = x.to(torch.float32).div(255) if x.dtype == torch.uint8 else x.clone()
        return values.sub_(self._shift.to(x.device)).div_(self._scale.to(x.device))

    @property
    def augment_numbers(self) -> int:
        """Count the random numbers that augment one sample; 0 without augmentation."""
        return Augment.NUMBERS if self.augment else 0

    def apply_augmentation(self, x: Tensor, views: Tensor) -> Tensor:
        """Augment normalised samples `[..., *shape]` for a training step.

        Args:
            x: The samples.
            views: Random numbers `[..., augment_numbers]`, uniform in [0, 1).
        """
        return self.augment(x, views, self.black) if self.augment else x

    @property
    def black(self) -> Tensor:
        """Return the value of a black pixel after normalisation, `[channels, 1, 1]`."""
        return -self._shift / self._scale


def build_federation(
    samples: Samples,
    partition: Partition,
    validation: float = 0.0,
    seed: int = 0,
    augment: Augment | None = None,
    newcomers: Collection[int] = (),
    only_local_classes: bool = False,
) -> Federation:
    """Distribute a data set to clients.

    A mean or standard deviation that is not given is that of the training samples, each as often as
    clients hold it, without validation samples and those of newcomers.

    Args:
        samples: The data set.
        partition: Each client's samples.
        validation: Share of a client's n training samples that is held out for validation, at
            random: `int(validation * n)`.
        seed: Of the run.
        augment: Random changes of training images.
        newcomers: Clients that never take part.
        only_local_classes: Whether predictions for a client are limited to the classes of its
            training samples, if it has any.

    Raises:
        FedpflError: If the partition holds samples out itself, or augmented samples are no images.
    """
    _require_fit(samples, partition, validation, augment)

    # ---- Step 1: hold validation samples out.
    train_indices, validation_indices = _hold_out_validation(
        partition, validation, seed, samples.units
    )
    train = _to_tensors(train_indices)

    # ---- Step 2: scale by the training samples of participants, so that nothing leaks.
    mean = samples.mean
    std = samples.std
    participants = [indices for client, indices in enumerate(train) if client not in newcomers]
    known = torch.cat(participants)
    if mean is None or std is None:
        train_mean, train_std = measure_channels(samples.x, known, samples.feature_names)
        mean = train_mean if mean is None else mean
        std = train_std if std is None else std

    # ---- Step 3: exclude classes that a client does not train on.
    excluded_classes = None
    if only_local_classes:
        excluded_classes = find_absent_classes(samples.y.cpu(), samples.classes, train)
    return Federation(
        name=samples.name,
        x=samples.x,
        y=samples.y,
        classes=samples.classes,
        mean=mean,
        std=std,
        train=train,
        test=_to_tensors(partition.test),
        validation=_to_tensors(validation_indices or partition.validation),
        augment=augment or None,
        excluded_classes=excluded_classes,
        client_names=partition.client_names,
        class_names=samples.class_names,
        feature_names=samples.feature_names,
        fill=measure_fill(samples, known, mean),
        is_elsewhere=samples.are_elsewhere,
        pad=samples.pad,
    )


def _require_fit(
    samples: Samples, partition: Partition, validation: float, augment: Augment | None
) -> None:
    """Raise FedpflError for two validation splits, or augmentation of other samples than images."""
    if validation and partition.validation:
        raise FedpflError(
            f"validation must be 0, as the partition holds samples out itself, got {validation}; "
            "set validation=0"
        )
    if augment and samples.x.dtype != torch.uint8:
        raise FedpflError(
            f"augment is for images, but data set {samples.name} has none; set augment=none"
        )


def find_absent_classes(labels: Tensor, classes: int, train: Sequence[Tensor]) -> Tensor:
    """Mark the classes that each client lacks in training, bool `[clients, classes]`.

    A client without training samples lacks none, as nothing is known of it.

    Args:
        labels: Of all samples, on the CPU.
        classes: Number of classes.
        train: Each client's training samples.
    """
    counts = torch.stack([torch.bincount(labels[indices], minlength=classes) for indices in train])
    return (counts == 0) & counts.any(1, keepdim=True)


def draw_newcomers(clients: int, count: int, seed: int) -> list[int]:
    """Draw `count` clients that never take part, in ascending order."""
    rng = np.random.default_rng([seed, NEWCOMERS_STREAM])
    return sorted(rng.permutation(clients)[:count].tolist())


def find_clients_of_groups(
    samples: Samples, partition: Partition, names: Sequence[str]
) -> list[int]:
    """Return the clients that hold samples of these groups, or have these names, ascending.

    Raises:
        FedpflError: A name is neither, a client holds samples of further groups, or it is all
            clients.
    """
    # ---- Step 1: all names.
    known_names = dict.fromkeys([*samples.group_names, *partition.client_names])
    if not known_names:
        raise FedpflError(
            f"unseen_groups names groups of samples, and data set {samples.name} has none; "
            "use unseen=0.2 for a share of the clients"
        )
    for name in names:
        if name not in known_names:
            raise FedpflError(f"unseen_groups must be {choices_text(known_names, name)}")

    # ---- Step 2: clients that hold the named groups alone, or have such a name.
    newcomers: list[int] = []
    for client in range(len(partition.train)):
        is_named = not {*names}.isdisjoint(partition.client_names[client : client + 1])
        held_names = _list_groups(samples, partition, client)
        further_names = held_names - {*names}
        if further_names != held_names or is_named:
            newcomers.append(client)
        if 0 < len(further_names) < len(held_names) and not is_named:
            raise FedpflError(
                f"unseen_groups: client {client} holds samples of {min(further_names)} too; "
                "partition=groups makes clients of one group each"
            )
    if len(newcomers) in (0, len(partition.train)):
        raise FedpflError(
            f"unseen_groups leaves {len(newcomers)} of {len(partition.train)} clients out; name "
            "groups of some of them"
        )
    return newcomers


def _list_groups(samples: Samples, partition: Partition, client: int) -> set[str]:
    """List the names of the groups that a client has samples of."""
    if samples.groups is None:
        return set()
    splits = filter(len, (partition.train, partition.test, partition.validation))
    rows = np.concatenate([split[client] for split in splits])
    numbers = samples.groups.cpu()[rows].unique().tolist()
    return {samples.group_names[number] for number in numbers}


def _hold_out_validation(
    partition: Partition, share: float, seed: int, units: Tensor | None
) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Split each client's samples, or units, into training and validation, in their order.

    Without a share there is no validation split. Of a client with a name no other one moves it.
    """
    if not share:
        return partition.train, ()
    rng = np.random.default_rng([seed, VALIDATION_STREAM])
    train_splits = []
    validation_splits = []
    for client, indices in enumerate(partition.train):
        if partition.client_names:
            name = partition.client_names[client]
            rng = make_site_generator(seed, VALIDATION_STREAM, name=name)
        numbers = np.arange(len(indices))
        if units is not None:  # samples of a unit, such as a patient, are held out together
            _, numbers = np.unique(units[indices].numpy(), return_inverse=True)
        count = int(numbers.max()) + 1
        # Flags, so that both splits keep the partition's order.
        is_validation = np.isin(numbers, rng.permutation(count)[: int(share * count)])
        train_splits.append(indices[~is_validation])
        validation_splits.append(indices[is_validation])
    return train_splits, validation_splits


def _count_samples(splits: Sequence[Tensor]) -> Tensor:
    """Count the samples of each client, int64 `[clients]`."""
    return torch.tensor([*map(len, splits)], dtype=torch.int64)


def _to_tensors(splits: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.array(indices, np.int64)) for indices in splits)
