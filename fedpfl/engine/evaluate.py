"""Accuracies from tallies."""

from __future__ import annotations

import torch

from fedpfl.engine.backend import Tally


def pooled(tally: Tally) -> float:
    """Percent correct over all test samples of all clients together; nan without samples."""
    total = int(tally.total.sum())
    return 100 * int(tally.correct.sum()) / total if total else float("nan")


def accuracies(tally: Tally) -> dict[str, float]:
    """Percentages: `accuracy` (mean over clients), `accuracy_pooled`, `accuracy_std` (population, over clients),
    `accuracy_worst10` (mean of the worst tenth of the clients, at least one); `loss` is the pooled mean cross-entropy.

    Clients without test samples do not count.
    """
    tested = tally.total > 0
    if not bool(tested.any()):
        return dict.fromkeys(("accuracy", "accuracy_pooled", "accuracy_std", "accuracy_worst10", "loss"), float("nan"))
    each = 100 * tally.correct[tested].double() / tally.total[tested]
    worst = each.sort().values[: max(1, len(each) // 10)]
    return {
        "accuracy": float(each.mean()),
        "accuracy_pooled": pooled(tally),
        "accuracy_std": float(each.std(correction=0)),
        "accuracy_worst10": float(worst.mean()),
        "loss": float(tally.loss.double().sum() / tally.total.sum()),
    }


def per_client(tally: Tally) -> list[float]:
    """Return percent correct of each client; nan without test samples or where the model is not finite."""
    known = (tally.total > 0) & tally.loss.isfinite()
    return (100 * tally.correct.double() / torch.where(known, tally.total, torch.nan)).tolist()


def unsound(tally: Tally) -> list[int]:
    """Return the positions of clients whose model gave logits that are not finite: their predictions mean nothing."""
    return (~tally.loss.isfinite()).nonzero().flatten().tolist()
