"""Summarize a run for a table of runs, kept up to date while its rows come in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fedpfl.record.columns import PERSONAL_PREFIX, task_of_columns


class Overview:
    """Latest and best values, and totals, of the rows so far.

    Args:
        cohort: clients per round; None where unknown, then nothing is given per client.
    """

    def __init__(self, cohort: int | None = None):
        self._cohort = cohort
        self._values: dict[str, float] = {}
        self._seconds: list[float] = []
        self._bits = {"down": 0.0, "up": 0.0}
        self._rounds_with_traffic = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the next row of rounds.csv; None where nothing was measured."""
        numbers = {key: value for key, value in row.items() if value is not None}
        if "seconds" in numbers:
            self._seconds.append(numbers["seconds"])
        if "bits_down" in numbers and "bits_up" in numbers:
            self._rounds_with_traffic += 1
            for direction in self._bits:
                self._bits[direction] += numbers[f"bits_{direction}"]
        task = task_of_columns(row)
        for name in _last_columns(task.score):
            if name in numbers:
                self._values[f"last_{name}"] = numbers[name]
        best = f"best_{task.score}"
        if task.is_better(numbers.get(task.score), self._values.get(best)):
            self._values[best] = numbers[task.score]
            self._values["best_round"] = numbers["round"]
        layer_entries = [value for key, value in numbers.items() if key.startswith(PERSONAL_PREFIX)]
        if layer_entries:
            self._values["personal_entries"] = sum(layer_entries)

    @property
    def traffic_gb(self) -> float | None:
        """Return the traffic in both directions so far, in 10^9 bytes; None where unknown."""
        return sum(self._bits.values()) / 8e9 if self._rounds_with_traffic else None

    def fields(self) -> dict[str, float]:
        """Return the numbers by names without dots, which all panels of W&B can use.

        last_*, best_*: percent, but for those of a regression. bits_*_per_client: mean over
        rounds. seconds_per_round: median. personal_entries: of all tensors, after the last round
        that counts them.
        """
        fields = dict(self._values)
        if self._seconds:
            fields["seconds_per_round"] = statistics.median(self._seconds)
        if self._rounds_with_traffic and self._cohort:
            for direction, bits in self._bits.items():
                # By the cohort as planned: rounds.csv has sums over those that came.
                bits_per_round = bits / self._rounds_with_traffic
                fields[f"bits_{direction}_per_client"] = bits_per_round / self._cohort
        return fields


def _last_columns(score: str) -> list[str]:
    """Return the columns with a last number to show."""
    prefixes = ("", "ft_", "val_", "unseen_", "unseen_ft_")
    return [*(f"{prefix}{score}" for prefix in prefixes), f"{score}_pooled", f"{score}_worst10"]
