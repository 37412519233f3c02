"""Scores from test results."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.engine.calls import Counts
from fedpfl.engine.measures import SUMMED_MEASURES, score_measure
from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.intervals import HIGH, LOW, wilson_interval
from fedpfl.ground.tasks import CLASSIFICATION, NEXT_TOKEN, REGRESSION, SURVIVAL, Task

Columns = dict[str, float | None]
"""Values of a row by column; None where one is undefined."""


def pooled_accuracy(counts: Counts) -> float | None:
    """Return the percent correct over all clients' samples together; None without samples."""
    total = int(counts.total.sum())
    return 100 * int(counts.correct.sum()) / total if total else None


def pooled_loss(counts: Counts) -> float | None:
    """Return the mean loss over all clients' samples together; None without samples."""
    total = int(counts.total.sum())
    return float(counts.loss.double().sum() / total) if total else None


def summarize_scores(counts: Counts, task: Task = CLASSIFICATION) -> Columns:
    """Return the score over clients in several ways, the loss, and the measures.

    Clients without test samples do not count; without any, all values are null. Measures are
    means over the clients that define them.

    Returns:
        By column: the task's score, such as `accuracy` (mean over clients), `accuracy_pooled`
        (where all samples together have one), `accuracy_std` (population, over clients),
        `accuracy_worst10` (mean of the worst tenth of the clients, at least one), `loss` (pooled
        mean), and each measure by name, with `_pooled` where it has a pooled one. Scores in
        percent, but for those of a regression and measures of plugins.
    """
    measures = _score_columns(counts, task)
    scores = measures.pop(task.score)
    defined = scores[~scores.isnan()]
    return {
        task.score: mean_of_defined(scores),
        **_pooled_scores(counts, task),
        f"{task.score}_std": float(defined.std(correction=0)) if len(defined) else None,
        f"{task.score}_worst10": _mean_of_worst(scores, task.is_higher_better),
        "loss": pooled_loss(counts),
        **{name: mean_of_defined(values) for name, values in measures.items()},
        **_pooled_measures(counts, task),
    }


def _mean_of_worst(scores: Tensor, is_higher_better: bool) -> float | None:
    """Return the mean of the worst tenth of all values but nan; None without any."""
    defined = scores[~scores.isnan()]
    worst_first = defined.sort(descending=not is_higher_better).values
    return mean_of_defined(worst_first[: worst_decile_size(len(defined))])


def summarize_success(counts: Counts) -> Columns:
    """Return an attack's success over clients by column, in percent.

    Args:
        counts: Of triggered samples; correct counts the attack's hits.
    """
    rates = rates_per_client(counts)
    return {
        "asr": mean_of_defined(rates),
        "asr_pooled": pooled_accuracy(counts),
        "asr_worst10": _mean_of_worst(rates, is_higher_better=False),
    }


def rates_per_client(counts: Counts) -> Tensor:
    """Return each client's percent correct, `[clients]`; nan without samples."""
    return 100 * counts.correct.double() / counts.total


def mean_of_defined(values: Tensor) -> float | None:
    """Return the mean of all values but nan, None without any."""
    defined = values[~values.isnan()]
    return float(defined.mean()) if len(defined) else None


def scores_per_client(counts: Counts, task: Task = CLASSIFICATION) -> dict[str, list[float]]:
    """Return each client's score, its interval and measures by column.

    They are in percent, but for a regression's.

    They are nan without test samples, where the model is not finite, and where a measure is
    undefined.
    """
    is_valid = (counts.total > 0) & counts.loss.isfinite()
    columns = _score_columns(counts, task) | _score_intervals(counts, task)
    return {
        name: torch.where(is_valid, values, torch.nan).tolist() for name, values in columns.items()
    }


def _score_intervals(counts: Counts, task: Task) -> dict[str, Tensor]:
    """Return the ends of the 95 % interval of each client's score, where known."""
    names = _interval_names(task)
    if task is not CLASSIFICATION:
        return {name: counts.measures[name] for name in names if name in counts.measures}
    shares = wilson_interval(counts.correct.double(), counts.total.double())
    return {name: 100 * end for name, end in zip(names, shares, strict=True)}


def _interval_names(task: Task) -> tuple[str, str]:
    return task.score + LOW, task.score + HIGH


def _score_columns(counts: Counts, task: Task) -> dict[str, Tensor]:
    """Return each client's score and measures, float64 `[clients]`; nan where undefined."""
    if task is REGRESSION:
        errors = counts.measures["squared_error"]
        variation = counts.measures["label_spread"]
        r2 = torch.where(variation > 0, 1 - errors / variation, torch.nan)
        return {"rmse": (errors / counts.total).sqrt(), "r2": r2}
    if task is SURVIVAL:
        concordance = 100 * counts.measures["concordant"] / counts.measures["comparable"]
        return {"concordance": concordance, "brier": counts.measures["brier"]}
    columns = {}
    if task is NEXT_TOKEN:
        perplexity = (counts.loss.double() / counts.total).exp()
        return {"perplexity": perplexity, "top1": rates_per_client(counts)}
    if task is CLASSIFICATION:
        columns["accuracy"] = rates_per_client(counts)
    measures = [pair for pair in counts.measures.items() if pair[0] not in _interval_names(task)]
    return columns | {name: score_measure(name, values, task) for name, values in measures}


def _pooled_measures(counts: Counts, task: Task) -> Columns:
    """Return the measures of all clients' samples together, of those that outcomes give."""
    columns: Columns = {}
    for name, outcomes in counts.measures.items():
        if name in SUMMED_MEASURES:
            columns[f"{name}_pooled"] = mean_of_defined(score_measure(name, outcomes.sum(0), task))
    return columns


def _pooled_scores(counts: Counts, task: Task) -> Columns:
    """Return the scores of all clients' samples together, where a task has any."""
    if task is CLASSIFICATION:
        return {"accuracy_pooled": pooled_accuracy(counts)}
    if task is NEXT_TOKEN:
        perplexity = (counts.loss.double().sum() / counts.total.sum()).exp().reshape(1)
        return {
            "perplexity_pooled": mean_of_defined(perplexity),
            "top1_pooled": pooled_accuracy(counts),
        }
    if task is SURVIVAL:
        # Pairs of one client alone: risks by different models have no scale in common.
        pairs = counts.measures["concordant"].sum() / counts.measures["comparable"].sum()
        brier = (counts.total * counts.measures["brier"]).nansum() / counts.total.sum()
        scores = {"concordance_pooled": 100 * pairs, "brier_pooled": brier}
        return {name: mean_of_defined(score) for name, score in scores.items()}
    if task is not REGRESSION:
        return {}
    total = counts.total.sum()
    if not total:
        return {"rmse_pooled": None, "r2_pooled": None}
    error = counts.measures["squared_error"].sum()
    means = counts.measures["label_mean"]
    mean = (counts.total * means).sum() / total
    # Within the clients, and between them.
    variation = counts.measures["label_spread"].sum()
    variation = variation + (counts.total * (means - mean).square()).sum()
    r2 = float(1 - error / variation) if variation > 0 else None
    return {"rmse_pooled": float((error / total).sqrt()), "r2_pooled": r2}


def cross_client_accuracy(counts: Counts) -> tuple[Tensor, Tensor]:
    """Return the accuracy of each client's model on each client's test samples, and on all.

    Args:
        counts: Of clients by clients, `[clients, others]`.

    Returns:
        Percent `[clients, others]` and over all samples `[clients]`; nan for others without test
        samples, and where a model is not finite.
    """
    correct = torch.where(
        counts.loss.isfinite(),
        counts.correct.double(),
        torch.nan,
    )
    return 100 * correct / counts.total, 100 * correct.sum(1) / counts.total.sum(1)


def non_finite_clients(counts: Counts) -> list[int]:
    """Return the positions of clients with logits that are not finite."""
    return (~counts.loss.isfinite()).nonzero().flatten().tolist()
