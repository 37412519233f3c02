"""Measures of a client's predictions beside hits and loss.

Those of classes are by torchmetrics, which is loaded where it is asked for; those that a task
counts in any case need no package.

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

from fedpfl.ground.errors import missing_extra
from fedpfl.ground.tasks import MULTILABEL, REGRESSION, find_task
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
        raise missing_extra(
            "metrics needs torchmetrics, which is not installed", "metrics"
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
    # Classes that the client lacks have no recall, which torchmetrics would count as 0.
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


def compute_measures(names: Sequence[str], outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return a client's measures; those of classes and labels as shares, float32.

    Measures of a regression are sums and means in float64, from which scores follow exactly:
    `squared_error`, `label_mean`, and `label_spread`, the squared deviations from that mean.

    Args:
        names: Of MEASURES, or `Task.measures`.
        outputs: The network's, `[samples, classes]`.
        y: Labels, in the form of their task.

    Returns:
        Each measure by name; nan where one is undefined.
    """
    task = find_task(y)
    if task is REGRESSION:
        return _regression_sums(outputs, y)
    if not len(y):
        return {name: torch.full((), torch.nan, device=y.device) for name in names}
    if task is MULTILABEL:
        shares = {"auroc": _mean_label_auroc(outputs, y), "f1": _mean_label_f1(outputs, y)}
        return {name: shares[name].float() for name in names}
    probabilities = outputs.float().softmax(1)
    predicted = outputs.argmax(1)
    return {name: MEASURES[name](probabilities, predicted, y).float() for name in names}


def _mean_label_auroc(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean AUROC over the labels that have both values; nan without any."""
    areas = []
    for label in range(y.shape[1]):
        positives = outputs[y[:, label], label]
        negatives = outputs[~y[:, label], label].sort().values
        if len(positives) and len(negatives):
            # The share of pairs in which the positive is above the negative, ties being a half.
            below = torch.searchsorted(negatives, positives)
            not_above = torch.searchsorted(negatives, positives, right=True)
            areas.append((below + not_above).double().mean() / 2 / len(negatives))
    if not areas:
        return torch.full((), torch.nan, device=y.device)
    return torch.stack(areas).mean()


def _mean_label_f1(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean F1 at probability 0.5 over the labels that occur or are predicted."""
    # Logits: 0 is a probability of a half.
    predicted = outputs > 0
    hits = (predicted & y).sum(0).double()
    counted = (predicted.sum(0) + y.sum(0)).double()
    return (2 * hits / counted).nanmean()  # 0 / 0 is left out


def _regression_sums(outputs: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the sums that give RMSE and R2 of a client, and of clients together."""
    labels = y.double()
    if not len(labels):
        zero = torch.zeros((), dtype=torch.float64, device=y.device)
        return {"squared_error": zero, "label_mean": zero, "label_spread": zero}
    errors = outputs.double().squeeze(1) - labels
    # From the first label on, so that equal labels have a spread of exactly 0.
    offsets = labels - labels[0]
    return {
        "squared_error": errors.square().sum(),
        "label_mean": labels[0] + offsets.mean(),
        "label_spread": (offsets - offsets.mean()).square().sum(),
    }
