"""What a data set is once it is read: images, token ids or signals, labels, groups, the constants
of scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpfl.ground.errors import FedpflError

MAX_CLASSES = (
    2**16
)  # at most: counts per client and class, and a classifier, are to fit into memory


@dataclass(frozen=True, eq=False)
class Samples:
    """One data set, its original parts merged in order (training, then validation where there is
    one, then test).
    """

    name: str
    x: Tensor
    """uint8 images `[samples, channels, height, width]`, int32 token ids `[samples, length]`, or
    float32 signals `[samples, channels or features, ...]`.
    """
    y: Tensor  # int64 [samples]
    classes: int
    mean: tuple[float, ...] | None
    """Per channel or feature, applied to x, of images to x / 255; empty: x is taken as it is; None:
    that of the samples that are trained on.
    """
    std: tuple[float, ...] | None
    groups: Tensor | None = None  # int64 [samples]: the domain or the person that a sample is from
    group_names: tuple[str, ...] = ()
    test_from: int | None = None  # where the original test part begins, if there is one


class Raw(NamedTuple):
    """What a reader returns, not yet checked."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None  # numbers of `group_names`
    group_names: tuple[str, ...] = ()
    test_from: int | None = None


def merge_parts(*parts: tuple[np.ndarray, np.ndarray]) -> Raw:
    """Join original parts (x, y), the last of which is the test part. Raises ValueError if x and y
    do not match.
    """
    for number, (x, labels) in enumerate(parts, start=1):
        if len(x) != len(labels):
            raise ValueError(
                f"part {number} of {len(parts)} has {len(x)} samples, but {len(labels)} labels"
            )
    y = [part[1] for part in parts]
    return Raw(
        np.concatenate([part[0] for part in parts]),
        np.concatenate(y),
        test_from=sum(map(len, y[:-1])),
    )


def number_groups(values: Sequence | np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return group numbers 0, 1, ... of any values, and the groups' names, in order of the values."""
    names, numbers = np.unique(np.asarray(values), return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names.tolist()))


def check_samples(
    name: str,
    raw: Raw,
    where: str,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    classes: int | None,
    normalize: bool,
) -> Samples:
    """Check what was read. Raises FedpflError."""
    try:
        x, y = torch.from_numpy(np.ascontiguousarray(_check_inputs(raw.x))), _check_labels(raw)
        classes, groups = _count_classes(y, classes), _check_groups(raw)
        if raw.test_from is not None and raw.test_from not in range(1, len(x)):
            raise ValueError(
                f"test_from must be from 1 to {len(x) - 1}, got {raw.test_from}; it is the first test sample"
            )
    except ValueError as error:
        raise FedpflError(f"{where}: {error}") from None
    mean, std = _check_scaling(x, mean, std, normalize)
    return Samples(
        name, x, torch.from_numpy(y), classes, mean, std, groups, raw.group_names, raw.test_from
    )


def select_classes(samples: Samples, labels: Sequence[int]) -> Samples:
    """Return the samples of some classes, numbered anew in the order of `labels`. Raises
    FedpflError.
    """
    if not labels or len(set(labels)) < len(labels):
        raise FedpflError(f"dataset.only must be labels, each once, got {list(labels)}")
    number = torch.full((MAX_CLASSES,), -1)
    number[list(labels)] = torch.arange(len(labels))
    y = number[samples.y]
    kept = y >= 0
    if empty := [label for at, label in enumerate(labels) if not (y == at).any()]:
        raise FedpflError(f"dataset.only: {samples.name} has no sample of label {empty[0]}")
    groups, test_from = samples.groups, samples.test_from and int(kept[: samples.test_from].sum())
    return replace(
        samples,
        x=samples.x[kept],
        y=y[kept],
        classes=len(labels),
        groups=None if groups is None else groups[kept],
        test_from=test_from if test_from in range(1, int(kept.sum())) else None,
    )


# Checks; they raise ValueError


def _check_inputs(x: np.ndarray) -> np.ndarray:
    """Images, signals or token ids in the form that `Samples` has them."""
    if not x.ndim:
        raise ValueError(f"x must be one entry per sample, got {x.dtype} []; see docs/data.md")
    if x.dtype.kind == "f":
        if x.ndim < 2 or 0 in x.shape[1:]:
            raise ValueError(
                f"signals must be [samples, channels or features, ...], got {list(x.shape)}"
            )
        with np.errstate(over="ignore"):  # what is too large becomes infinite
            x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            raise ValueError(
                "x holds values that are not finite (or not as float32); mend or leave out those samples"
            )
        return _channels_first(x)
    if x.dtype != np.uint8 and x.dtype.kind in "iu" and x.ndim == 2 and x.shape[1]:
        worst = min(int(x.min(initial=0)), 2**31 - 1 - int(x.max(initial=0)))
        if worst < 0:
            raise ValueError(
                f"integers [samples, length] are token ids and must be from 0 to 2147483647, found {x.min()} to "
                f"{x.max()}; save a table of features as floats"
            )
        return x.astype(np.int32)
    if x.dtype != np.uint8:
        raise ValueError(
            f"x must be uint8 (pixels 0..255), got {x.dtype} {list(x.shape)}; convert it, or give signals "
            "as floats, token ids as int32 [samples, length]"
        )
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise ValueError(
            "x must be [samples, channels, height, width], or without channels, or with channels last; "
            f"got shape {list(x.shape)}{'; save a table of features as floats' if x.ndim == 2 else ''}"
        )
    return _channels_first(x)


def _channels_first(x: np.ndarray) -> np.ndarray:
    """`[n, a, b, c]` as `[n, c, a, b]` where a is no usual number of channels, and c is, or a x b
    is square.
    """
    usual, shape = (1, 3, 4), x.shape
    last = (
        x.ndim == 4
        and shape[1] not in usual
        and (shape[3] in usual or shape[1] == shape[2] != shape[3])
    )
    return x.transpose(0, 3, 1, 2) if last else x


def _check_labels(raw: Raw) -> np.ndarray:
    """Labels as int64 `[samples]`."""
    y, samples = raw.y, len(raw.x)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise ValueError(
            f"y must be integers [samples], got {y.dtype} {list(y.shape)}; convert the labels"
        )
    if samples != len(y):
        raise ValueError(f"x has {samples} samples but y has {len(y)}; they must be of one length")
    if not len(y):
        raise ValueError("there are no samples; x and y must hold at least one")
    if y.min() < 0:
        raise ValueError(f"labels must be 0..C-1, found {y.min()}; number the classes from 0")
    if y.max() >= MAX_CLASSES:
        raise ValueError(
            f"labels must be below {MAX_CLASSES:,}, found {y.max()}; number the classes from 0"
        )
    return y.astype(np.int64)


def _count_classes(y: np.ndarray, classes: int | None) -> int:
    if classes is not None:
        if y.max() >= classes:
            raise ValueError(
                f"found label {y.max()}, but dataset.classes={classes} allows 0..{classes - 1}"
            )
        return classes
    present = np.unique(y)
    classes = int(present[-1]) + 1
    if len(present) != classes:
        absent = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise ValueError(
            f"labels must be 0..C-1, but no sample has label {absent} and the largest is {present[-1]}; "
            "number the classes from 0, or set dataset.classes if a class is empty on purpose"
        )
    return classes


def _check_groups(raw: Raw) -> Tensor | None:
    groups = raw.groups
    if groups is None:
        return None
    if groups.shape != (len(raw.x),) or groups.dtype.kind not in "iu":
        raise ValueError(
            f"groups must be integers [samples], got {groups.dtype} {list(groups.shape)}; number them from 0"
        )
    if groups.min() < 0 or groups.max() >= len(raw.group_names):
        raise ValueError(
            f"groups must be from 0 to {len(raw.group_names) - 1}, the number of names less one"
        )
    return torch.from_numpy(groups.astype(np.int64))


# Constants


def _check_scaling(
    x: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, normalize: bool
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and standard deviation to scale with, None where they are to be computed; none for token
    ids.
    """
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
                f"dataset.{key} has {len(values)} entries, but the samples have {channels} channels; give one per "
                "channel, or null to compute it"
            )
    return None if mean is None else tuple(map(float, mean)), None if std is None else tuple(
        map(float, std)
    )


def mean_and_std(x: Tensor, index: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel or feature of some samples, of images those of
    x / 255.

    Where a channel is constant, the deviation is one grey level, of signals 1. The device of x does
    not matter.
    """
    means, deviations = [], []
    for channel in x.unbind(1):
        values = channel[index.to(x.device)]
        if x.dtype == torch.uint8:  # exact, from the histogram
            counts = torch.bincount(values.flatten(), minlength=256).cpu().double()
            levels, share = torch.arange(256, dtype=torch.float64) / 255, counts / counts.sum()
            means.append(float((share * levels).sum()))
            deviations.append(max(float((share * (levels - means[-1]) ** 2).sum()) ** 0.5, 1 / 255))
        else:
            values = values.cpu().double()
            means.append(float(values.mean()))
            spread = float(values.std(correction=0))
            deviations.append(spread if spread > 1e-6 * max(1.0, abs(means[-1])) else 1.0)
    return tuple(means), tuple(deviations)
