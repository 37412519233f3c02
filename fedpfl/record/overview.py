"""Summarize a run's rows for a table of runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedpfl.ground.records import Values
from fedpfl.record.columns import PERSONAL_PREFIX, task_of_columns

SHOWN_PREFIXES = ("", "ft_", "val_", "unseen_", "unseen_ft_")
SHOWN_SUFFIXES = ("_pooled", "_worst10")
"""Of the score's columns with a last number to show."""


def summarize_rows(rows: Sequence[Values], cohort: int | None) -> dict[str, float]:
    """Return numbers of a run by names without dots, for panels of W&B.

    last_*, best_*: percent, but for those of a regression. bits_*_per_client: mean over rounds.
    seconds_per_round: median. personal_entries: of all tensors, after the last round that counts
    them.

    Args:
        rows: of rounds.csv; None where nothing was measured.
        cohort: clients per round; None where unknown, then nothing is given per client.
    """
    if not rows:
        return {}
    task = task_of_columns(rows[-1])
    fields: dict[str, float] = {}
    names = [f"{prefix}{task.score}" for prefix in SHOWN_PREFIXES]
    names += [f"{task.score}{suffix}" for suffix in SHOWN_SUFFIXES]
    for name in names:
        if values := read_values(rows, name):
            fields[f"last_{name}"] = values[-1]
    best_row: Values = {}
    for row in rows:
        if task.is_better(row.get(task.score), best_row.get(task.score)):
            best_row = row
        layers = [value for name, value in row.items() if name.startswith(PERSONAL_PREFIX)]
        if layers:
            fields["personal_entries"] = sum(layers)
    if best_row:
        fields |= {f"best_{task.score}": best_row[task.score], "best_round": best_row["round"]}
    if seconds := read_values(rows, "seconds"):
        fields["seconds_per_round"] = statistics.median(seconds)
    for name in ("bits_down", "bits_up"):
        bits = read_values(rows, name)
        if bits and cohort:
            # By the cohort as planned: rounds.csv has sums over those that came.
            fields[f"{name}_per_client"] = statistics.fmean(bits) / cohort
    return fields


def read_values(rows: Sequence[Values], name: str) -> list[float]:
    """Return the numbers of a column, without rows that have none."""
    return [row[name] for row in rows if row.get(name) is not None]
