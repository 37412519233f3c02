"""Accuracies from tallies."""

from __future__ import annotations

import torch

from fedpfl.engine.backend import Counts
from fedpfl.ground.decile import decile


def pooled(counts: Counts) -> float | None:
    """Percent correct over all test samples of all clients together; None without samples."""
    total = int(counts.total.sum())
    return 100 * int(counts.correct.sum()) / total if total else None


def accuracies(counts: Counts) -> dict[str, float | None]:
    """Percentages: `accuracy` (mean over clients), `accuracy_pooled`, `accuracy_std` (population, over clients),
    `accuracy_worst10` (mean of the worst tenth of the clients, at least one); `loss` is the pooled mean cross-entropy.

    Clients without test samples do not count; None where nobody has any.
    """
    tested = counts.total > 0
    if not bool(tested.any()):
        return dict.fromkeys(("accuracy", "accuracy_pooled", "accuracy_std", "accuracy_worst10", "loss"))
    each = 100 * counts.correct[tested].double() / counts.total[tested]
    worst = each.sort().values[: decile(len(each))]
    return {
        "accuracy": float(each.mean()),
        "accuracy_pooled": pooled(counts),
        "accuracy_std": float(each.std(correction=0)),
        "accuracy_worst10": float(worst.mean()),
        "loss": float(counts.loss.double().sum() / counts.total.sum()),
    }


def per_client(counts: Counts) -> list[float]:
    """Return percent correct of each client; nan without test samples or where the model is not finite."""
    known = (counts.total > 0) & counts.loss.isfinite()
    return (100 * counts.correct.double() / torch.where(known, counts.total, torch.nan)).tolist()


def unsound(counts: Counts) -> list[int]:
    """Return the positions of clients whose model gave logits that are not finite: their predictions mean nothing."""
    return (~counts.loss.isfinite()).nonzero().flatten().tolist()
