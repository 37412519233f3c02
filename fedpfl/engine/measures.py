"""Measures of a client's predictions beside their accuracy, by torchmetrics.

It is loaded where it is asked for.

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
"""How many bins of equal width confidences have, as in Guo et al. (ICML 2017)."""


@functools.cache
def import_torchmetrics() -> Any:
    """Return torchmetrics' functions for classifications.

    Raises:
        FedpflError: It is not installed.
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


def _macro_f1(probabilities: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the mean F1 over the classes that the client has or that are predicted."""
    classes = probabilities.shape[1]
    score = import_torchmetrics().multiclass_f1_score
    return score(predicted, y, classes, average="macro", validate_args=False)


def _balanced_accuracy(probabilities: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the mean recall of the classes that the client has."""
    classes = probabilities.shape[1]
    recall = import_torchmetrics().multiclass_recall
    recalls = recall(predicted, y, classes, average="none", validate_args=False)
    return recalls[y.unique()].mean()


def _one_against_rest_auroc(probabilities: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the mean AUROC of one class against the rest; nan with one class alone."""
    classes = y.unique().tolist()
    if len(classes) < 2:
        return probabilities.new_tensor(torch.nan)
    auroc = import_torchmetrics().binary_auroc
    areas = [
        auroc(probabilities[:, label], (y == label).long(), validate_args=False)
        for label in classes
    ]
    return torch.stack(areas).mean()


def _calibration_error(probabilities: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the expected calibration error."""
    classes = probabilities.shape[1]
    error = import_torchmetrics().multiclass_calibration_error
    return error(probabilities, y, classes, n_bins=BINS, validate_args=False)


MEASURES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "f1": _macro_f1,
    "balanced": _balanced_accuracy,
    "auroc": _one_against_rest_auroc,
    "ece": _calibration_error,
}
"""From probabilities `[samples, classes]`, predictions and labels `[samples]` to a share."""


def compute_measures(names: Sequence[str], logits: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return a client's measures as shares, float32; nan where one is undefined.

    Args:
        names: Of MEASURES.
        logits: `[samples, classes]`.
        y: Labels, `[samples]`.
    """
    if not len(y):
        return {name: torch.full((), torch.nan, device=y.device) for name in names}
    probabilities = logits.float().softmax(1)
    predicted = logits.argmax(1)
    return {name: MEASURES[name](probabilities, predicted, y).float() for name in names}
