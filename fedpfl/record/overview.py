"""What a table of runs wants of one run: a few plain numbers, kept up to date while its rows come
in.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fedpfl.record.columns import PERSONAL_PREFIX, VALIDATION_ACCURACY, column_name

LAST = (
    "accuracy",
    "accuracy_pooled",
    "accuracy_worst10",
    column_name("accuracy", fine_tuned=True),
    VALIDATION_ACCURACY,
    column_name("accuracy", "unseen"),
    column_name("accuracy", "unseen", fine_tuned=True),
)


class Overview:
    """Keep latest, best and totals of the rows so far.

    cohort: clients per round; None where unknown, and nothing is said per client.
    """

    def __init__(self, cohort: int | None = None):
        self._cohort = cohort
        self._marks: dict[str, float] = {}
        self._seconds: list[float] = []
        self._bits = {"down": 0.0, "up": 0.0}
        self._counted = 0  # rounds that say what was sent

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in the next row of rounds.csv; None where nothing was measured."""
        known = {key: value for key, value in row.items() if value is not None}
        if "seconds" in known:
            self._seconds.append(known["seconds"])
        if "bits_down" in known and "bits_up" in known:
            self._counted += 1
            for way in self._bits:
                self._bits[way] += known[f"bits_{way}"]
        self._marks |= {f"last_{name}": known[name] for name in LAST if name in known}
        if known.get("accuracy", -1) > self._marks.get("best_accuracy", -1):
            self._marks |= {"best_accuracy": known["accuracy"], "best_round": known["round"]}
        layers = [value for key, value in known.items() if key.startswith(PERSONAL_PREFIX)]
        if layers:
            self._marks["personal_entries"] = sum(layers)

    @property
    def traffic_gb(self) -> float | None:
        """Return all that was sent in both directions so far, in 10^9 bytes; None where no row says
        it.
        """
        return sum(self._bits.values()) / 8e9 if self._counted else None

    def fields(self) -> dict[str, float]:
        """Return the numbers by names without dots, which all panels of W&B can use.

        last_*, best_*: percent. bits_*_per_client: mean over rounds. seconds_per_round: median.
        personal_entries: of all tensors, after the last round that counts them.
        """
        fields = dict(self._marks)
        if self._seconds:
            fields["seconds_per_round"] = statistics.median(self._seconds)
        if self._counted and self._cohort:
            for way, bits in self._bits.items():
                fields[f"bits_{way}_per_client"] = bits / self._counted / self._cohort
        return fields
