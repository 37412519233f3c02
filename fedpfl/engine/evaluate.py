"""Accuracies from tallies."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.engine.calls import Counts
from fedpfl.ground.decile import worst_decile_size


def pooled_accuracy(counts: Counts) -> float | None:
    """Percent correct over all test samples of all clients together; None without samples."""
    total = int(counts.total.sum())
    return 100 * int(counts.correct.sum()) / total if total else None


def summarize_accuracy(counts: Counts) -> dict[str, float | None]:
    """Percentages: `accuracy` (mean over clients), `accuracy_pooled`, `accuracy_std` (population,
    over clients), `accuracy_worst10` (mean of the worst tenth of the clients, at least one); `loss`
    is the pooled mean cross-entropy.

    Measures are means over the clients of which they are defined. Clients without test samples do
    not count; None where nobody has any.
    """
    tested = counts.total > 0
    if not bool(tested.any()):
        names = (
            "accuracy",
            "accuracy_pooled",
            "accuracy_std",
            "accuracy_worst10",
            "loss",
            *counts.measures,
        )
        return dict.fromkeys(names)
    each = 100 * counts.correct[tested].double() / counts.total[tested]
    worst = each.sort().values[: worst_decile_size(len(each))]
    return {
        "accuracy": float(each.mean()),
        "accuracy_pooled": pooled_accuracy(counts),
        "accuracy_std": float(each.std(correction=0)),
        "accuracy_worst10": float(worst.mean()),
        "loss": float(counts.loss.double().sum() / counts.total.sum()),
        **{
            name: mean_of_defined(100 * shares.double()) for name, shares in counts.measures.items()
        },
    }


def mean_of_defined(values: Tensor) -> float | None:
    """Return the mean of what is no nan, None without any."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None


def accuracy_per_client(counts: Counts) -> dict[str, list[float]]:
    """Return each client's `accuracy` and measures, in percent.

    They are nan without test samples, where the model is not finite, and where a measure is
    undefined.
    """
    known = (counts.total > 0) & counts.loss.isfinite()
    own = {"accuracy": 100 * counts.correct.double() / counts.total}
    own |= {name: 100 * shares.double() for name, shares in counts.measures.items()}
    return {name: torch.where(known, values, torch.nan).tolist() for name, values in own.items()}


def cross_client_accuracy(counts: Counts) -> tuple[Tensor, Tensor]:
    """Return how each model does on each one's test samples, `[clients, others]`, and on all of
    them, `[clients]`.

    counts: `[clients, others]`. In percent; nan for others without test samples, and where a model
    is not finite.
    """
    correct = torch.where(counts.loss.isfinite(), counts.correct.double(), torch.nan)
    return 100 * correct / counts.total, 100 * correct.sum(1) / counts.total.sum(1)


def non_finite_clients(counts: Counts) -> list[int]:
    """Return the positions of clients whose model gave logits that are not finite: their
    predictions mean nothing.
    """
    return (~counts.loss.isfinite()).nonzero().flatten().tolist()
