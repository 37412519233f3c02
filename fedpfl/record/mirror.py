"""Share code among the loggers of tracking services.

They are never needed: tables and figures read the run directory. All get the same values under the
same names. A killed process may lose rows that a service had not yet written or uploaded.
A resumed run therefore sends the missing rounds again from rounds.csv.
"""

from __future__ import annotations

import hashlib
import importlib.util
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.record import rounds
from fedpfl.record.callbacks import Callback, RunInfo
from fedpfl.record.columns import PERSONAL_PREFIX, task_of_columns

SHOWN_PREFIXES = ("", "ft_", "val_", "unseen_", "unseen_ft_")
SHOWN_SUFFIXES = ("_pooled", "_worst10")
"""Of the score's columns with a last number to show."""


class ServiceLogger(Callback, ABC):
    """Keep one record of a service per run directory; a resumed run continues it."""

    def __init__(self) -> None:
        self._next_round = 0  # the first round that the service lacks
        self._facts: Record = {}
        self._logged_columns: set[str] = set()
        self._rows: list[Values] = []
        self._traffic_gb = 0.0
        self._cohort: int | None = None

    def on_begin(self, run: RunInfo) -> None:
        """Start or continue the record; send the partition and the earlier rounds it lacks."""
        self._cohort = run.facts.get("cohort")
        self._facts = {**_displayable_values(run.facts), **_sweep_values(run)}
        self._next_round = self._start(run, {**self._facts, "status": "running"})
        for row in _earlier_rows(run):
            self._log_row(row)
        picture = run.path / "partition.png"
        if picture.exists():
            self._send_picture(picture)

    def on_round(self, round: Any) -> None:
        """Send one round's values and the traffic up to it."""
        self._log_row(round.row)

    def on_end(self, status: str, summary: Values) -> None:
        """Send the summary and the runs table's fields, and end the record, once.

        Columns of rounds.csv are left out of the summary.
        """
        values = self._facts | _displayable_values(summary)
        unlogged = {key: value for key, value in values.items() if key not in self._logged_columns}
        self._finish(status, {**unlogged, **self._summarize_rows(), "status": status})

    def _log_row(self, row: Values) -> None:
        self._rows.append(row)
        values = {key: value for key, value in row.items() if value is not None}
        if "bits_down" in values and "bits_up" in values:
            self._traffic_gb += (values["bits_down"] + values["bits_up"]) / 8e9
            values["traffic_gb"] = self._traffic_gb
        # The summary needs rows that the service has already.
        if row["round"] >= self._next_round:
            self._logged_columns.update(values)
            self._send_round(row, values)

    def _summarize_rows(self) -> dict[str, float]:
        return summarize_rows(self._rows, self._cohort)

    @abstractmethod
    def _send_picture(self, path: Path) -> None:
        """Send an image file."""

    @abstractmethod
    def _start(self, run: RunInfo, facts: Values) -> int:
        """Start or continue the record; return the first round that it lacks, 0 if all."""

    @abstractmethod
    def _send_round(self, row: Values, values: Values) -> None:
        """Send a round.

        Args:
            row: the row of rounds.csv, with None where nothing was measured.
            values: the row without None, and with the traffic.
        """

    @abstractmethod
    def _finish(self, status: str, summary: Values) -> None:
        """Send the summary and end the record, if one is open."""


def service_run_id(run: RunInfo) -> str:
    """Return one id per identity, seed and run directory.

    So a baseline of two experiments keeps a record in each.
    """
    text = "\n".join((run.identity, str(run.seed), str(run.path.resolve())))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def require_package(package: str) -> None:
    """Raise FedpflError where the package that a logger of the same name needs is missing."""
    spec = importlib.util.find_spec(package)
    # A folder of that name in the working directory is no package.
    if spec is None or spec.origin is None:
        raise FedpflError(
            f"logger={package} needs the package {package}: pip install {package}, "
            "or another logger"
        )


def _displayable_values(summary: Values) -> Record:
    """Return the values of summary.json that a table can show; run.log has the traceback."""
    return {
        key: value for key, value in summary.items() if value is not None and key != "traceback"
    }


def _sweep_values(run: RunInfo) -> Record:
    """Return values that sweeps go over, where the run has them, and the source's commit."""
    values = {"commit": run.facts.get("environment", {}).get("commit")}
    for group, key in (("method", "q"), ("partition", "alpha")):
        value = run.config.get(group, {}).get(key)
        values[key] = value if isinstance(value, int | float) else None
    if values["q"] is not None:
        # Of a q near 1 a logarithmic axis shows more.
        values["one_minus_q"] = round(1 - values["q"], 12)
    return {key: value for key, value in values.items() if value is not None}


def _earlier_rows(run: RunInfo) -> list[dict[str, float | None]]:
    """Return the rows of rounds.csv up to where the run resumes."""
    path = run.path / "rounds.csv"
    if not run.start_round or not path.exists():
        return []
    rows = rounds.read_rows(path.read_text(encoding="utf-8"))
    return [row for row in rows if row["round"] is not None and row["round"] <= run.start_round]


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
