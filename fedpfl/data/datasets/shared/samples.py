"""The samples of a data set, once they are read, and the checks of their form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpfl.data.datasets.shared.sums import scale_channels, sum_channels
from fedpfl.data.datasets.shared.texts import find_class
from fedpfl.data.fingerprint import FINGERPRINTED_IF_SET
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import (
    CLASSIFICATION,
    MULTILABEL,
    NEXT_TOKEN,
    SURVIVAL,
    Task,
    find_task,
    require_classification,
)

# Counts per client and class, and a classifier, must fit into memory.
MAX_CLASSES = 2**16


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
        feature_names: Names of a table's features; empty of arrays.
        units: int64 `[samples]`; samples of one unit, such as a patient, stay together.
        missing: What fills values of x that are absent (NaN), one of `missing.Missing`; empty: all
            are there.
        pad: The token id that fills texts up.
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
    missing: str = field(default="", metadata=FINGERPRINTED_IF_SET)
    pad: int = field(default=0, metadata=FINGERPRINTED_IF_SET)

    def take_rows(self, rows: Tensor, **changes: Any) -> Samples:
        """Return some of the samples, with changes of the fields that are not by sample."""
        for key in ("x", "y", "groups", "units"):
            values = getattr(self, key)
            changes[key] = None if values is None else values[rows]
        return replace(self, **changes)


class Raw(NamedTuple):
    """A reader's result, not yet checked; with the fields of Samples."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None = None  # numbers of `group_names`
    group_names: tuple[str, ...] = ()
    test_from: int | None = None
    class_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    units: np.ndarray | None = None  # whole numbers
    missing: str = ""
    pad: int = 0
    vocabulary: int = 0  # of task=next_token; 0: the largest id tells


def merge_parts(*parts: tuple[np.ndarray, np.ndarray]) -> Raw:
    """Join original parts (x, y); the last one is the test part.

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
    """Number any values 0, 1, ... in their order; return the numbers and the groups' names."""
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
    """Check a reader's result, and bring it into its final form.

    Args:
        name: Of the data set.
        raw: The reader's result.
        origin: The file or folder it is from, for errors.
        mean: See `load_samples`.
        std: See `load_samples`.
        classes: See `load_samples`.
        normalize: See `load_samples`.
        task: The purpose of the labels.

    Raises:
        FedpflError: If the samples have another form, or the constants do not fit them.
    """
    try:
        x = torch.from_numpy(np.ascontiguousarray(_check_inputs(raw.x, bool(raw.missing))))
        y, classes, class_names = _check_labels(raw, task, classes)
        require_test_part(raw.test_from, len(x))
        groups = _check_groups(raw)
    except ValueError as error:
        raise FedpflError(f"{origin}: {error}") from None
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
        class_names=class_names,
        feature_names=raw.feature_names,
        units=None if raw.units is None else torch.from_numpy(raw.units.astype(np.int64)),
        missing=raw.missing,
        pad=raw.pad,
    )


def select_classes(samples: Samples, labels: Sequence[int | str]) -> Samples:
    """Select the samples of some classes, and number these anew in the order of `labels`.

    Raises:
        FedpflError: A label is given twice, or labels are no classes.
    """
    require_classification(find_task(samples.y), "dataset.only", "it keeps classes")
    # Classes without names keep their numbers as names, so that 5 goes on being 5.
    names = samples.class_names or tuple(map(str, range(samples.classes)))
    positions = [
        find_class(samples.class_names, samples.classes, label, "dataset.only") for label in labels
    ]
    if not positions or len({*positions}) < len(positions):
        raise FedpflError(f"dataset.only must be labels, each once, got {list(labels)}")
    new_labels = torch.full((samples.classes,), -1)
    new_labels[positions] = torch.arange(len(positions))
    y = new_labels[samples.y]
    is_chosen = y >= 0
    test_from = int(is_chosen[: samples.test_from].sum())
    has_test_part = samples.test_from is not None and 0 < test_from < int(is_chosen.sum())
    new_names = tuple(names[position] for position in positions)
    are_unchanged = not samples.class_names and positions == list(range(len(positions)))
    return replace(samples, y=y).take_rows(
        is_chosen,
        classes=len(labels),
        test_from=test_from if has_test_part else None,
        class_names=() if are_unchanged else new_names,
    )


# ---- Checks; they raise ValueError


def _check_inputs(x: np.ndarray, may_lack_values: bool) -> np.ndarray:
    """Return images, signals or token ids in the form of `Samples`."""
    is_filled = 0 not in x.shape[1:]
    if x.dtype.kind == "f" and x.ndim > 1 and is_filled:
        return _channels_first(to_floats(x, may_lack_values))
    if x.dtype != np.uint8 and x.dtype.kind in "iu" and x.ndim == 2 and is_filled:
        if len(x) and not 0 <= x.min() <= x.max() < 2**31:
            raise ValueError(
                "integers [samples, length] are token ids and must be from 0 to 2147483647, found "
                f"{x.min()} to {x.max()}; save a table of features as floats"
            )
        return x.astype(np.int32)
    if x.dtype == np.uint8 and x.ndim in (3, 4) and is_filled:
        return _channels_first(x[:, None] if x.ndim == 3 else x)
    raise ValueError(
        "x must be uint8 (pixels 0..255) [samples, channels, height, width], also without channels "
        "or with channels last, floats [samples, channels or features, ...], or token ids int32 "
        f"[samples, length]; got {x.dtype} {list(x.shape)}"
    )


def to_floats(x: np.ndarray, may_lack_values: bool = False) -> np.ndarray:
    """Convert floats to float32. Raises ValueError for a value that is not finite."""
    with np.errstate(over="ignore"):  # too large a value becomes infinite
        x = x.astype(np.float32, copy=False)
    is_right = np.isfinite(x) | (np.isnan(x) & may_lack_values)
    if not is_right.all():
        row = int(np.argwhere(~is_right)[0][0])
        raise ValueError(f"a number in row {row + 1} is not finite, or not as float32")
    return x


def require_test_part(test_from: int | None, samples: int) -> None:
    """Raise ValueError for a first test sample that leaves training or testing no sample."""
    if test_from is not None and test_from not in range(1, samples):
        raise ValueError(
            f"test_from must be from 1 to {samples - 1}, got {test_from}; it is the first test "
            "sample"
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


def _check_labels(
    raw: Raw, task: Task, classes: int | None
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """Return labels in their task's form, the number of outputs, and class names."""
    y = convert_labels(raw.y, task)
    if len(raw.x) != len(y):
        raise ValueError(f"x has {len(raw.x)} samples, and y has {len(y)}")
    if not len(y):
        raise ValueError("there are no samples; x and y must hold at least one")
    if task is CLASSIFICATION:
        return _number_classes(y, raw.class_names, classes)
    if task is NEXT_TOKEN:
        return y, classes or raw.vocabulary or int(y.max()) + 1, ()
    outputs = y.shape[1] if task is MULTILABEL else 1
    if classes not in (None, outputs):
        raise ValueError(
            f"dataset.classes={classes} does not fit task={task.name}, of which this is {outputs}; "
            "leave it out"
        )
    return y, outputs, raw.class_names


def convert_labels(y: np.ndarray, task: Task) -> np.ndarray:
    """Return integers `[samples]`, bools `[samples, labels]` or float32 `[samples]`.

    Raises:
        ValueError: The labels are of another form than their task's.
    """
    problem = f"y must be {task.labels}, got {y.dtype} {list(y.shape)}; convert the labels, or set task=..."
    if task is MULTILABEL:
        if y.ndim != 2 or not y.shape[1] or y.dtype.kind not in "biuf":
            raise ValueError(problem)
        wrong_labels = y[(y != 0) & (y != 1)]
        if len(wrong_labels):
            raise ValueError(f"y must be {task.labels}, found {wrong_labels[0]}")
        return y.astype(bool)
    if task is SURVIVAL:
        if y.shape[1:] != (2,) or y.dtype.kind not in "biuf":
            raise ValueError(problem)
        wrong_labels = y[(y[:, 0] < 0) | (y[:, 1] != 0) & (y[:, 1] != 1)]
        if len(wrong_labels):
            raise ValueError(f"y must be {task.labels}, found {wrong_labels[0].tolist()}")
        return to_floats(y.astype(np.float32))
    if task is NEXT_TOKEN:
        if y.ndim != 2 or y.dtype.kind != "i" or y.min(initial=0) < -1:
            raise ValueError(problem)
        return y.astype(np.int64)
    flat = y[:, 0] if y.shape[1:] == (1,) else y
    if flat.ndim != 1 or flat.dtype.kind not in ("iu" if task is CLASSIFICATION else "iuf"):
        raise ValueError(problem)
    return flat if task is CLASSIFICATION else to_floats(flat)


def _number_classes(
    y: np.ndarray, names: tuple[str, ...], classes: int | None
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """Return int64 labels, their number and names; whole numbers with gaps become names."""
    for name in names:
        if not name.isprintable():
            raise ValueError(f"a label is {name!r}; labels must be printable, on one line")
    if classes is None and not names and y.min() >= 0:
        values, codes = np.unique(y, return_inverse=True)
        if 1 < len(values) <= values[-1]:
            y = codes
            names = tuple(map(str, values.tolist()))
    limit = classes or MAX_CLASSES
    if y.min() < 0 or y.max() >= limit:
        raise ValueError(
            f"labels must be from 0 to {limit - 1}, found {y.min()} to {y.max()}; number the "
            "classes from 0, or set dataset.classes"
        )
    if classes is None and y.min() == y.max():
        raise ValueError("all samples have one label; there must be two classes at least")
    return y.astype(np.int64), classes or int(y.max()) + 1, names


def _check_groups(raw: Raw) -> Tensor | None:
    """Return group numbers as int64 `[samples]`, None without groups."""
    groups = raw.groups
    if groups is None:
        return None
    is_right = groups.shape == (len(raw.x),) and groups.dtype.kind in "iu"
    if not is_right or groups.min() < 0 or groups.max() >= len(raw.group_names):
        raise ValueError(
            f"groups must be integers [samples], from 0 to {len(raw.group_names) - 1}, a number for "
            f"each name, got {groups.dtype} {list(groups.shape)}"
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
                "channels; give one per channel, or null to compute it"
            )
    return _to_scale(mean), _to_scale(std)


def _to_scale(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))


def measure_channels(
    x: Tensor, index: Tensor, names: Sequence[str] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation per channel or feature of some samples.

    Those of images are of x / 255. The deviation of a constant channel is one grey level, of
    signals 1. The device of x does not matter. Raises FedpflError for a feature without a value.
    """
    return scale_channels(sum_channels(x, index), x.dtype == torch.uint8, names)
