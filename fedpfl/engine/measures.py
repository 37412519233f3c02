"""What is said of a client's predictions beside their accuracy, by torchmetrics, which is loaded
where it is asked for.

A class that a client has no test samples of counts nowhere but in F1, where it is predicted; see
`MEASURES`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.vision import load_torchvision

BINS = 15
"""Of the confidences from 0 to 1, of equal width, as Guo et al. have them (ICML 2017)."""


@functools.cache
def import_torchmetrics() -> Any:
    """Return torchmetrics' functions for classifications. Raises FedpflError where it is not
    installed.
    """
    with contextlib.suppress(ImportError):
        load_torchvision()  # which it imports, and which may not load by itself
    try:
        from torchmetrics.functional import classification
    except ImportError:
        raise FedpflError(
            "metrics needs torchmetrics, which is not installed; pip install 'fedpfl[metrics]'"
        ) from None
    return classification


def _f1(shares: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    classes = shares.shape[1]
    return import_torchmetrics().multiclass_f1_score(
        predicted, y, classes, average="macro", validate_args=False
    )


def _balanced(shares: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    classes = shares.shape[1]
    each = import_torchmetrics().multiclass_recall(
        predicted, y, classes, average="none", validate_args=False
    )
    return each[y.unique()].mean()


def _auroc(shares: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    held = y.unique().tolist()
    if len(held) < 2:
        return shares.new_tensor(torch.nan)
    each = [
        import_torchmetrics().binary_auroc(shares[:, one], (y == one).long(), validate_args=False)
        for one in held
    ]
    return torch.stack(each).mean()


def _ece(shares: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    return import_torchmetrics().multiclass_calibration_error(
        shares, y, shares.shape[1], n_bins=BINS, validate_args=False
    )


MEASURES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "f1": _f1,
    "balanced": _balanced,
    "auroc": _auroc,
    "ece": _ece,
}
"""From probabilities `[samples, classes]`, predictions and labels `[samples]` to a share.

f1: mean over the classes that the client has or that are predicted. balanced: mean recall of the
classes that it has.
auroc: mean over these of one against the rest; undefined with one class alone. ece: expected
calibration error.
"""


def compute_measures(names: Sequence[str], logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return a client's measures as shares, float32; nan where one is undefined.

    logits: `[samples, classes]`. y: `[samples]`.
    """
    if not len(y):
        return {name: torch.full((), torch.nan, device=y.device) for name in names}
    shares, predicted = logits.float().softmax(1), logits.argmax(1)
    return {name: MEASURES[name](shares, predicted, y).float() for name in names}
