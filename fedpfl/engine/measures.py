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

from fedpfl.ground.errors import FedpflError, missing_extra
from fedpfl.ground.intervals import HIGH, LEVEL, LOW
from fedpfl.ground.survival import Horizon, count_pairs, measure_survival
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL, Task, find_task
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
    is_class = y[:, None] == torch.arange(probabilities.shape[1], device=y.device)
    return _mean_area(import_torchmetrics().binary_auroc, probabilities, is_class)


def _average_precision(probabilities: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the average precision of class 1, or its mean over several classes."""
    if y.dim() == 1:
        y = y[:, None] == torch.arange(probabilities.shape[1], device=y.device)
        if y.shape[1] == 2:
            probabilities, y = probabilities[:, 1:], y[:, 1:]
    return _mean_area(import_torchmetrics().binary_average_precision, probabilities, y)


def _mean_area(find_area: Callable[..., Tensor], probabilities: Tensor, y: Tensor) -> Tensor:
    """Return the mean area over the labels that have both values; nan without any."""
    has_both_values = y.any(0) & ~y.all(0)
    areas = [
        find_area(probabilities[:, label], y[:, label].long(), validate_args=False)
        for label in has_both_values.nonzero().flatten().tolist()
    ]
    return torch.stack(areas).mean() if areas else probabilities.new_tensor(torch.nan)


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
    "auprc": _average_precision,
}
"""From probabilities `[samples, classes]`, predictions and labels `[samples]` to a share."""
PLUGIN_MEASURES: dict[str, Callable[..., Any]] = {}
"""Those that plugins add. Their arguments are the same, their answer is any number."""


INTERVAL = "interval"
"""Asks for the interval of the task's score by the bootstrap, in tasks without classes."""
RESAMPLES = 400
SUMMED_MEASURES = ("precision", "recall", "sensitivity", "specificity", "kappa")
"""These follow from outcomes that are summed over clients as well, so they are pooled, too."""


def score_outcomes(name: str, outcomes: Tensor, task: Task) -> Tensor:
    """Return a measure of SUMMED_MEASURES as a share, nan where it is undefined.

    Args:
        name: The measure.
        outcomes: Hits, false alarms, rejections and misses of each class, `[..., classes, 4]`.
        task: Of the labels. Of two classes class 1 counts; else classes and labels are averaged.
    """
    hits, false_alarms, rejections, misses = outcomes.double().unbind(-1)
    predicted, present, absent = hits + false_alarms, hits + misses, rejections + false_alarms
    if task is CLASSIFICATION and name == "kappa":
        samples = (present + absent)[..., 0]
        expected = (predicted * present).sum(-1)
        return (hits.sum(-1) * samples - expected) / (samples.square() - expected)
    expected = predicted * absent + present * (misses + rejections)
    shares_by_name = {
        "precision": hits / predicted,
        "recall": hits / present,
        "sensitivity": hits / present,
        "specificity": rejections / absent,
        "kappa": 2 * (hits * rejections - misses * false_alarms) / expected,
    }
    shares = shares_by_name[name]
    if task is CLASSIFICATION and shares.shape[-1] == 2:
        shares = shares[..., 1:]
    return shares.nanmean(-1)  # 0 / 0 is left out


def score_measure(name: str, values: Tensor, task: Task) -> Tensor:
    """Return each client's measure as columns have it: in percent, but for a plugin's."""
    if name in PLUGIN_MEASURES:
        return values
    if name in SUMMED_MEASURES:
        values = score_outcomes(name, values, task)
    return 100 * values.double()


def compute_measures(
    names: Sequence[str], outputs: Tensor, y: Tensor, horizon: Horizon | None = None
) -> dict[str, Tensor]:
    """Return a client's measures; those of classes and labels as shares, float32.

    Of SUMMED_MEASURES they are outcomes, int64 `[classes, 4]`; a plugin's are float64.
    Measures of a regression are sums and means in float64, from which scores follow exactly:
    `squared_error`, `label_mean`, and `label_spread`, the squared deviations from that mean.

    Args:
        names: Of MEASURES, SUMMED_MEASURES and PLUGIN_MEASURES, or `Task.measures`, or INTERVAL.
        outputs: The network's, `[samples, classes]`.
        y: Labels, in the form of their task.
        horizon: Of survival.

    Returns:
        Each measure by name; nan where one is undefined.
    """
    task = find_task(y)
    measures: dict[str, Tensor] = {}
    if INTERVAL in names:
        measures = _resample_score(outputs, y, task)
    if task is REGRESSION:
        return measures | _regression_sums(outputs, y)
    if horizon:
        return measures | measure_survival(outputs.squeeze(1), y, horizon)
    if task is MULTILABEL:
        # In double precision, where sure outputs stay apart. Logits: 0 is a probability of a half.
        probabilities, predicted = outputs.double().sigmoid(), outputs > 0
    else:
        probabilities, predicted = outputs.float().softmax(1), outputs.argmax(1)
    for name in names:
        if name == INTERVAL:
            continue
        if name in SUMMED_MEASURES:
            measures[name] = _count_outcomes(predicted, y, outputs.shape[1])
        elif name in PLUGIN_MEASURES:
            measures[name] = _ask_plugin(name, probabilities, predicted, y)
        elif not len(y):
            measures[name] = torch.full((), torch.nan, device=y.device)
        elif task is MULTILABEL and name in LABEL_MEASURES:
            measures[name] = LABEL_MEASURES[name](outputs, y).float()
        else:
            measures[name] = MEASURES[name](probabilities, predicted, y).float()
    return measures


def _count_outcomes(predicted: Tensor, y: Tensor, classes: int) -> Tensor:
    """Count each class's or label's hits, false alarms, rejections and misses, `[classes, 4]`."""
    if not len(y):
        return torch.zeros((classes, 4), dtype=torch.int64, device=y.device)
    library = import_torchmetrics()
    count = library.multilabel_stat_scores if y.dim() == 2 else library.multiclass_stat_scores
    return count(predicted.long(), y.long(), classes, average="none", validate_args=False)[:, :4]


def _ask_plugin(name: str, probabilities: Tensor, predicted: Tensor, y: Tensor) -> Tensor:
    """Return the number that a plugin's function answers, nan without samples.

    Raises:
        FedpflError: The answer is no number.
    """
    answer = PLUGIN_MEASURES[name](probabilities, predicted, y) if len(y) else torch.nan
    try:
        return torch.as_tensor(answer, dtype=torch.float64, device=y.device).reshape(())
    except (TypeError, ValueError, RuntimeError):
        raise FedpflError(
            f"metrics=[{name}]: the plugin's function must return a number,"
            f" got {type(answer).__name__}"
        ) from None


def _mean_label_auroc(outputs: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean AUROC over the labels that have both values; nan without any.

    Args:
        outputs: The network's, `[samples, labels]`.
        y: The labels.
        weights: Of the samples, `[rows, samples]`: of each row an AUROC.
    """
    rows = torch.ones(1, len(y), dtype=torch.float64, device=y.device)
    if weights is not None:
        rows = weights
    areas = []
    for label in range(y.shape[1]):
        values, places = outputs[:, label].unique(return_inverse=True)
        empty = rows.new_zeros(len(rows), len(values))
        positives = empty.index_add(1, places, rows * y[:, label])
        negatives = empty.index_add(1, places, rows * ~y[:, label])
        # The weight of pairs in which the positive is above the negative, ties being a half.
        below = negatives.cumsum(1) - negatives / 2
        areas.append((positives * below).sum(1) / (positives.sum(1) * negatives.sum(1)))
    means = torch.stack(areas).nanmean(0)
    return means if weights is not None else means.squeeze(0)


def _mean_label_f1(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean F1 at probability 0.5 over the labels that occur or are predicted."""
    predicted = outputs > 0
    hits = (predicted & y).sum(0).double()
    counted = (predicted.sum(0) + y.sum(0)).double()
    return (2 * hits / counted).nanmean()  # 0 / 0 is left out


LABEL_MEASURES = {"auroc": _mean_label_auroc, "f1": _mean_label_f1}
"""From outputs and labels `[samples, labels]` to a share."""


def _resample_score(outputs: Tensor, y: Tensor, task: Task) -> dict[str, Tensor]:
    """Return the ends of the score's 95 % interval by the bootstrap."""
    count = len(y)
    scores = torch.full((1,), torch.nan, dtype=torch.float64)
    if count:
        generator = torch.Generator().manual_seed(0)
        draws = torch.randint(count, (RESAMPLES, count), generator=generator)
        ones = torch.ones_like(draws, dtype=torch.float64)
        weights = torch.zeros_like(ones).scatter_add_(1, draws, ones)
        outputs, y = outputs.double().cpu(), y.cpu()
        if task is REGRESSION:
            scores = (weights @ (outputs.squeeze(1) - y).square() / count).sqrt()
        elif task is SURVIVAL:
            concordant, comparable = count_pairs(outputs.squeeze(1), y, weights)
            scores = 100 * concordant / comparable
        else:
            scores = 100 * _mean_label_auroc(outputs, y, weights)
    levels = torch.tensor([LEVEL / 2, 1 - LEVEL / 2], dtype=torch.float64)
    low, high = scores.nanquantile(levels)
    return {f"{task.score}{LOW}": low, f"{task.score}{HIGH}": high}


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
