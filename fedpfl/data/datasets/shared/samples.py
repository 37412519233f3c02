"""The samples of a data set, once they are read, and the checks of their form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpfl.data.datasets.shared.sums import scale_channels, sum_channels
from fedpfl.data.datasets.shared.texts import find_class, require_unmasked
from fedpfl.data.fingerprint import FINGERPRINTED_IF_SET
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import (
    CLASSIFICATION,
    MULTILABEL,
    REGRESSION,
    Task,
    find_task,
    require_classification,
)

# Counts per client and class, and a classifier, must fit into memory.
MAX_CLASSES = 2**16

MOST_ROUNDING = 0.5
"""Standard deviations of a feature that float32 may round it by."""

LAST_BITS = 1e-13
"""Relative to the largest number, what equal ones differ by that were computed in two ways."""


@dataclass(frozen=True, eq=False)
class Samples:
    """One data set, its original parts joined: training, validation if there is one, test.

    Attributes:
        name: Of the data set.
        x: uint8 images `[samples, channels, height, width]`, int32 token ids `[samples, length]`,
            or float32 signals `[samples, channels or features, ...]`.
        y: int64 classes `[samples]`, bools `[samples, labels]` or float32 `[samples]`, by task.
        classes: Number of classes, or of what else a network answers: labels, or 1 number.
        mean: Per channel or feature of x, of images of x / 255; empty: x is not scaled; None: of
            the training samples.
        std: As mean.
        groups: int64 `[samples]`, the domain or person that each sample is from.
        group_names: The names of the groups.
        test_from: The first sample of the original test part, if there is one.
        class_names: The names of the classes or labels, empty where they are numbers alone.
        are_elsewhere: Whether all samples are at nodes, and x and y have their form alone.
        feature_names: What the features of a table are called; empty of anything else.
        units: int64 `[samples]`; samples of one unit, such as a patient, stay together.
    """

    name: str
    x: Tensor
    y: Tensor
    classes: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    test_from: int | None = None
    class_names: tuple[str, ...] = field(default=(), metadata=FINGERPRINTED_IF_SET)
    are_elsewhere: bool = field(default=False, metadata=FINGERPRINTED_IF_SET)
    feature_names: tuple[str, ...] = field(default=(), metadata=FINGERPRINTED_IF_SET)
    units: Tensor | None = field(default=None, metadata=FINGERPRINTED_IF_SET)


class Raw(NamedTuple):
    """A reader's result, not yet checked; its fields are as of Samples."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None  # numbers of `group_names`
    group_names: tuple[str, ...] = ()
    test_from: int | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    units: np.ndarray | None = None  # whole numbers


def merge_parts(*parts: tuple[np.ndarray, np.ndarray]) -> Raw:
    """Join original parts (x, y), the last of which is the test part.

    Raises:
        ValueError: If x and y of a part have different lengths.
    """
    for number, (x, labels) in enumerate(parts, start=1):
        if len(x) != len(labels):
            raise ValueError(
                f"part {number} of {len(parts)} has {len(x)} samples, but {len(labels)} labels"
            )
    x = np.concatenate([part_x for part_x, _ in parts])
    y = np.concatenate([labels for _, labels in parts])
    test_samples = len(parts[-1][1])
    return Raw(x, y, test_from=len(y) - test_samples)


def number_groups(values: Sequence | np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number any values 0, 1, ... in their order; return the numbers and the groups' names.

    Raises:
        ValueError: A sample has no value.
    """
    values = np.asarray(values)
    is_missing = np.zeros(len(values), bool)
    if values.dtype.kind in "fcmM":
        is_missing = np.isnan(values) if values.dtype.kind in "fc" else np.isnat(values)
    if is_missing.any():
        sample = int(np.flatnonzero(is_missing)[0])
        raise ValueError(f"sample {sample} belongs to no group; fill in its group, or leave it out")
    names, numbers = np.unique(values, return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names.tolist()))


def check_samples(  # noqa: PLR0913 - its arguments are those of `load_samples`
    *,
    name: str,
    raw: Raw,
    origin: str,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    classes: int | None,
    normalize: bool,
    task: Task = CLASSIFICATION,
) -> Samples:
    """Check what a reader returned, and bring it into its final form.

    Args:
        name: Of the data set.
        raw: The reader's result.
        origin: The file or folder it is from, for errors.
        mean: As of `load_samples`.
        std: As of `load_samples`.
        classes: As of `load_samples`.
        normalize: As of `load_samples`.
        task: What the labels are for.

    Raises:
        FedpflError: If the samples have another form, or the constants do not fit them.
    """
    # ---- Step 1: samples, labels and groups in their final form.
    for part, array in (("x", raw.x), ("y", raw.y), ("groups", raw.groups)):
        require_unmasked(array, f"{origin}: {part}")
    try:
        x = torch.from_numpy(np.ascontiguousarray(_check_inputs(raw.x)))
        raw = _name_classes(raw, task, classes)
        y, classes = _check_labels(raw, task, classes)
        groups = _check_groups(raw)
        _check_names(raw, y)
        if raw.test_from is not None and raw.test_from not in range(1, len(x)):
            raise ValueError(
                f"test_from must be from 1 to {len(x) - 1}, got {raw.test_from}; "
                "it is the first test sample"
            )
    except ValueError as error:
        raise FedpflError(f"{origin}: {error}") from None

    # ---- Step 2: the constants of scaling, as far as they are given.
    mean, std = _check_scaling(x, mean, std, normalize)
    return Samples(
        name=name,
        x=x,
        y=torch.from_numpy(y),
        classes=classes,
        mean=mean,
        std=std,
        groups=groups,
        group_names=raw.group_names,
        test_from=raw.test_from,
        class_names=raw.class_names,
        feature_names=raw.feature_names,
        units=None if raw.units is None else torch.from_numpy(raw.units.astype(np.int64)),
    )


def select_classes(samples: Samples, labels: Sequence[int | str]) -> Samples:
    """Select the samples of some classes, and number these anew in the order of `labels`.

    Raises:
        FedpflError: A label is given twice or no sample has it, or labels are no classes.
    """
    # ---- Step 1: new labels, -1 for classes that are left out.
    require_classification(find_task(samples.y), "dataset.only", "it keeps classes")
    names = samples.class_names
    kept = [find_class(names, samples.classes, label, "dataset.only") for label in labels]
    if not kept or len(set(kept)) < len(kept):
        raise FedpflError(f"dataset.only must be labels, each once, got {list(labels)}")
    new_labels = torch.full((samples.classes,), -1)
    new_labels[kept] = torch.arange(len(kept))
    y = new_labels[samples.y]
    for new_label, label in enumerate(labels):
        if not (y == new_label).any():
            raise FedpflError(f"dataset.only: {samples.name} has no sample of label {label}")
    # Classes without names keep their numbers as names, so that 5 goes on being 5.
    new_names = tuple(names[label] if names else str(label) for label in kept)
    if not names and kept == list(range(len(kept))):
        new_names = ()

    # ---- Step 2: what is kept, and where the test part begins in it.
    selected = y >= 0
    test_from = samples.test_from
    if test_from is not None:
        test_from = int(selected[:test_from].sum())
        if test_from not in range(1, int(selected.sum())):
            test_from = None
    return replace(
        samples,
        x=samples.x[selected],
        y=y[selected],
        classes=len(labels),
        groups=None if samples.groups is None else samples.groups[selected],
        units=None if samples.units is None else samples.units[selected],
        test_from=test_from,
        class_names=new_names,
    )


# ---- Checks; they raise ValueError


def _check_names(raw: Raw, y: np.ndarray) -> None:
    """Require a name for each class and feature, if there are any."""
    for class_name in raw.class_names:
        if not class_name.isprintable():
            raise ValueError(
                f"a label is {class_name!r}; texts of labels must be printable, on one line"
            )
    named = len(raw.class_names)
    if named and y.dtype.kind in "iu" and y.max() >= named:
        raise ValueError(f"label {y.max()} has no name; class_names has {named}, from label 0 on")
    features = raw.x.shape[1] if raw.x.ndim > 1 else 0
    if raw.feature_names and len(raw.feature_names) != features:
        raise ValueError(
            f"feature_names must be {features}, one for each feature of x, got "
            f"{len(raw.feature_names)}"
        )


def _check_inputs(x: np.ndarray) -> np.ndarray:
    """Return images, signals or token ids in the form of `Samples`."""
    # ---- Step 1: floats are signals or features.
    if not x.ndim:
        raise ValueError(f"x must be one entry per sample, got {x.dtype} []; see docs/data.md")
    if x.dtype.kind == "f":
        if x.ndim < 2 or 0 in x.shape[1:]:
            raise ValueError(
                f"signals must be [samples, channels or features, ...], got {list(x.shape)}"
            )
        return _channels_first(to_finite_floats(x))

    # ---- Step 2: whole numbers [samples, length] are token ids.
    if x.dtype != np.uint8 and x.dtype.kind in "iu" and x.ndim == 2 and x.shape[1]:
        worst = min(
            int(x.min(initial=0)),
            2**31 - 1 - int(x.max(initial=0)),
        )
        if worst < 0:
            raise ValueError(
                "integers [samples, length] are token ids and must be from 0 to 2147483647, "
                f"found {x.min()} to "
                f"{x.max()}; save a table of features as floats"
            )
        return x.astype(np.int32)

    # ---- Step 3: bytes are pixels.
    if x.dtype != np.uint8:
        raise ValueError(
            f"x must be uint8 (pixels 0..255), got {x.dtype} {list(x.shape)}; convert it, or "
            "give signals "
            "as floats, token ids as int32 [samples, length]"
        )
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(
            "x must be [samples, channels, height, width], or without channels, or with channels "
            "last; "
            "got shape "
            f"{list(x.shape)}{'; save a table of features as floats' if x.ndim == 2 else ''}"
        )
    return _channels_first(x)


def to_finite_floats(x: np.ndarray) -> np.ndarray:
    """Return floats as float32.

    Raises:
        ValueError: A sample is not finite, or float32 does not tell samples apart by a feature.
    """
    exact = x
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        x = x.astype(np.float32, copy=False)
    is_finite = np.isfinite(x)
    if not is_finite.all():
        sample = int(np.flatnonzero(~is_finite.reshape(len(x), -1).all(1))[0])
        raise ValueError(
            f"x holds values that are not finite (or not as float32), first in sample {sample}; "
            "mend or leave out those samples"
        )
    if x.ndim == 2:
        for feature, values in enumerate(exact.T):
            if problem := explain_rounding(values):
                raise ValueError(f"x[:, {feature}] {problem}")
    return x


def explain_rounding(values: np.ndarray) -> str:
    """Say what float32 loses of numbers `[samples]`, "" where that is little."""
    if values.dtype == np.float32 or not len(values):
        return ""
    exact = values.astype(np.float64)
    largest = np.abs(exact).max()
    deviation = exact.std()
    rounding = np.abs(exact.astype(np.float32) - exact).max()
    # Equal numbers that were computed in two ways differ in their last bits.
    is_constant = deviation <= LAST_BITS * largest
    if is_constant or rounding <= MOST_ROUNDING * deviation:
        return ""
    return (
        f"holds numbers up to {largest:g} with a standard deviation of {deviation:.2g}, which "
        f"float32 rounds by up to {rounding:.2g}; subtract a constant from all of them"
    )


def _channels_first(x: np.ndarray) -> np.ndarray:
    """Move channels to axis 1 where the shape says that they are last.

    Of `[n, a, b, c]`, a is no usual number of channels then, and c is one, or a x b is square.
    """
    if x.ndim != 4:
        return x
    usual_channels = (1, 3, 4)
    _, a, b, c = x.shape
    is_last = a not in usual_channels and (c in usual_channels or a == b != c)
    return x.transpose(0, 3, 1, 2) if is_last else x


def _check_labels(raw: Raw, task: Task, classes: int | None) -> tuple[np.ndarray, int]:
    """Return labels in the form of their task, and the number of a network's outputs."""
    y = convert_labels(raw.y, task)
    if len(raw.x) != len(y):
        raise ValueError(
            f"x has {len(raw.x)} samples but y has {len(y)}; they must be of one length"
        )
    if not len(y):
        raise ValueError("there are no samples; x and y must hold at least one")
    if task is CLASSIFICATION:
        y = _check_classes(y)
        return y, _count_classes(y, classes)
    outputs = y.shape[1] if task is MULTILABEL else 1
    if classes not in (None, outputs):
        raise ValueError(
            f"dataset.classes={classes} does not fit task={task.name}, of which this is {outputs}; "
            "leave it out"
        )
    return y, outputs


def convert_labels(y: np.ndarray, task: Task) -> np.ndarray:
    """Return integers `[samples]`, bools `[samples, labels]` or float32 `[samples]`.

    Raises:
        ValueError: The labels are of another form than their task's.
    """
    is_column = y.ndim == 2 and y.shape[1] == 1
    flat = y[:, 0] if is_column and task is not MULTILABEL else y
    problem = f"y must be {task.labels}, got {y.dtype} {list(y.shape)}; convert the labels, or set task=..."
    if task is CLASSIFICATION:
        if flat.ndim == 1 and flat.dtype.kind in "iu":
            return flat
        raise ValueError(problem)
    if task is REGRESSION:
        if flat.ndim != 1 or flat.dtype.kind not in "iuf":
            raise ValueError(problem)
        exact = flat
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            flat = flat.astype(np.float32)
        if not np.isfinite(flat).all():
            raise ValueError("y holds values that are not finite (or not as float32)")
        if problem := explain_rounding(exact):
            raise ValueError(f"y {problem}")
        return flat
    if y.ndim != 2 or not y.shape[1] or y.dtype.kind not in "biuf":
        raise ValueError(problem)
    others = y[(y != 0) & (y != 1)]
    if len(others):
        raise ValueError(f"y must be {task.labels}, found {others[0]}; convert the labels")
    return y.astype(bool)


def _name_classes(raw: Raw, task: Task, classes: int | None) -> Raw:
    """Return numbers of classes and their names, where labels are whole numbers with gaps."""
    y = raw.y
    is_numbered = task is not CLASSIFICATION or classes is not None or raw.class_names
    if is_numbered or y.ndim != 1 or y.dtype.kind not in "iu" or not len(y) or y.min() < 0:
        return raw
    values, codes = np.unique(y, return_inverse=True)
    if len(values) == 1 or values[-1] == len(values) - 1:
        return raw
    return raw._replace(y=codes, class_names=tuple(map(str, values.tolist())))


def _check_classes(y: np.ndarray) -> np.ndarray:
    """Return classes as int64 `[samples]`."""
    if y.min() < 0:
        raise ValueError(f"labels must be 0..C-1, found {y.min()}; number the classes from 0")
    if y.max() >= MAX_CLASSES:
        raise ValueError(
            f"labels must be below {MAX_CLASSES:,}, found {y.max()}; number the classes from 0"
        )
    return y.astype(np.int64)


def _count_classes(y: np.ndarray, classes: int | None) -> int:
    """Return the number of classes; if not given, the largest label plus one."""
    if classes is not None:
        if y.max() >= classes:
            raise ValueError(
                f"found label {y.max()}, but dataset.classes={classes} allows 0..{classes - 1}"
            )
        return classes
    if y.min() == y.max():
        raise ValueError("all samples have one label; there must be two classes at least")
    return int(y.max()) + 1


def _check_groups(raw: Raw) -> Tensor | None:
    """Return group numbers as int64 `[samples]`, None without groups."""
    groups = raw.groups
    if groups is None:
        return None
    if groups.shape != (len(raw.x),) or groups.dtype.kind not in "iu":
        raise ValueError(
            f"groups must be integers [samples], got {groups.dtype} {list(groups.shape)}; number "
            "them from 0"
        )
    if groups.min() < 0 or groups.max() >= len(raw.group_names):
        raise ValueError(
            f"groups must be from 0 to {len(raw.group_names) - 1}, the number of names less one"
        )
    return torch.from_numpy(groups.astype(np.int64))


# ---- Constants of scaling


def _check_scaling(
    x: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, normalize: bool
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return mean and std to scale with: None where they are to be computed, () for no scaling."""
    channels = x.shape[1]
    if x.dtype == torch.int32:
        if mean or std:
            raise FedpflError(
                "dataset.mean and dataset.std must be null for token ids, which are not scaled"
            )
        return (), ()
    if not normalize:
        return ((0.0,) * channels, (1.0,) * channels) if x.dtype == torch.uint8 else ((), ())
    for key, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) != channels:
            raise FedpflError(
                f"dataset.{key} has {len(values)} entries, but the samples have {channels} "
                "channels; give one per "
                "channel, or null to compute it"
            )
    return (
        None if mean is None else tuple(map(float, mean)),
        None if std is None else tuple(map(float, std)),
    )


def mean_and_std(x: Tensor, index: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel or feature of some samples.

    Those of images are of x / 255. The deviation of a constant channel is one grey level, of
    signals 1. The device of x does not matter.
    """
    is_image = x.dtype == torch.uint8
    values_per_channel = len(index) * math.prod(x.shape[2:])
    return scale_channels(sum_channels(x, index), values_per_channel, is_image)
