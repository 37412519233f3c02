"""Find the clients that have trained."""

from __future__ import annotations

from itertools import compress

from fedpfl import engine

MODEL_COLUMNS = (
    "cohort_before",
    "cohort_after",
    "cohort_loss_before",
    "cohort_loss_after",
    "train_loss",
)
"""Columns that stay empty until a client has made a step."""


def find_trained_clients(state: engine.State) -> set[int]:
    """Return the indices of clients that have made a step."""
    rows = state.rows
    if not rows.stored_clients:
        return set()
    flags = rows.take("facts", rows.stored_clients)["trained"].tolist()
    return {*compress(rows.stored_clients, flags)}
