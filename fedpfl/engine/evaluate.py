"""Accuracies from test results."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.engine.calls import Counts
from fedpfl.ground.decile import worst_decile_size


def pooled_accuracy(counts: Counts) -> float | None:
    """Return the percent correct over all clients' samples together; None without samples."""
    total = int(counts.total.sum())
    return 100 * int(counts.correct.sum()) / total if total else None


def summarize_accuracy(counts: Counts) -> dict[str, float | None]:
    """Return the accuracy over clients in several ways, in percent, the loss, and the measures.

    Clients without test samples do not count; all values are None where nobody has any. Measures
    are means over the clients of which they are defined.

    Returns:
        `accuracy` (mean over clients), `accuracy_pooled`, `accuracy_std` (population, over
        clients), `accuracy_worst10` (mean of the worst tenth of the clients, at least one), `loss`
        (pooled mean cross-entropy), and each measure by name.
    """
    has_samples = counts.total > 0
    if not bool(has_samples.any()):
        names = ["accuracy", "accuracy_pooled", "accuracy_std", "accuracy_worst10", "loss"]
        return dict.fromkeys([*names, *counts.measures])
    accuracies = 100 * counts.correct[has_samples].double() / counts.total[has_samples]
    worst = accuracies.sort().values[: worst_decile_size(len(accuracies))]
    measures = {
        name: mean_of_defined(100 * shares.double()) for name, shares in counts.measures.items()
    }
    return {
        "accuracy": float(accuracies.mean()),
        "accuracy_pooled": pooled_accuracy(counts),
        "accuracy_std": float(accuracies.std(correction=0)),
        "accuracy_worst10": float(worst.mean()),
        "loss": float(counts.loss.double().sum() / counts.total.sum()),
        **measures,
    }


def mean_of_defined(values: Tensor) -> float | None:
    """Return the mean of what is no nan, None without any."""
    defined = values[~values.isnan()]
    return float(defined.mean()) if len(defined) else None


def accuracy_per_client(counts: Counts) -> dict[str, list[float]]:
    """Return each client's `accuracy` and measures, in percent.

    They are nan without test samples, where the model is not finite, and where a measure is
    undefined.
    """
    is_valid = (counts.total > 0) & counts.loss.isfinite()
    columns = {"accuracy": 100 * counts.correct.double() / counts.total}
    columns |= {name: 100 * shares.double() for name, shares in counts.measures.items()}
    return {
        name: torch.where(is_valid, values, torch.nan).tolist() for name, values in columns.items()
    }


def cross_client_accuracy(counts: Counts) -> tuple[Tensor, Tensor]:
    """Return the accuracy of each client's model on each client's test samples, and on all.

    Args:
        counts: Of clients by clients, `[clients, others]`.

    Returns:
        Percent `[clients, others]` and over all samples `[clients]`; nan for others without test
        samples, and where a model is not finite.
    """
    correct = torch.where(counts.loss.isfinite(), counts.correct.double(), torch.nan)
    return 100 * correct / counts.total, 100 * correct.sum(1) / counts.total.sum(1)


def non_finite_clients(counts: Counts) -> list[int]:
    """Return the positions of clients whose predictions mean nothing: their logits are not finite."""
    return (~counts.loss.isfinite()).nonzero().flatten().tolist()
