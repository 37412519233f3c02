"""What the loggers of tracking services share. Never needed: tables and figures read the run
directory.

All get the same values under the same names. A killed process takes along what a service had not
yet written or uploaded, so a resumed run does not trust it: the rounds that it lacks are read back
from rounds.csv and sent.
"""

from __future__ import annotations

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpfl.ground.errors import FedpflError
from fedpfl.record import rounds
from fedpfl.record.callbacks import Callback, RunInfo
from fedpfl.record.overview import Overview


class ServiceLogger(Callback, ABC):
    """Keep one record of a service per run directory; a resumed run continues it."""

    def __init__(self) -> None:
        self._next = 0  # the first round that the service lacks
        self._facts: dict[str, Any] = {}
        self._sent: set[str] = set()
        self._overview = Overview()

    def on_begin(self, run: RunInfo) -> None:
        """Start or continue the record, and send the partition and the rounds before this process
        that it lacks.
        """
        self._overview = Overview(run.facts.get("cohort"))
        self._facts = {**_plain(run.facts), **_marks(run)}
        self._next = self._start(run, {**self._facts, "status": "running"})
        for row in _past(run):
            self._row(row)
        if (picture := run.path / "partition.png").exists():
            self._picture("partition", picture)

    def on_round(self, round: Any) -> None:
        """Send one round's values and the traffic up to it."""
        self._row(round.row)

    def _row(self, row: Mapping[str, Any]) -> None:
        self._overview.add(row)
        if row["round"] < self._next:
            return
        values = {key: value for key, value in row.items() if value is not None}
        self._sent.update(values)
        if self._overview.traffic_gb is not None:
            values["traffic_gb"] = self._overview.traffic_gb
        self._send(row, values)

    def on_end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send the summary and the runs table's fields, but for columns of rounds.csv, and end the
        record, once.
        """
        known = self._facts | _plain(summary)
        rest = {key: value for key, value in known.items() if key not in self._sent}
        self._finish(status, {**rest, **self._overview.fields(), "status": status})

    @abstractmethod
    def _picture(self, name: str, path: Path) -> None:
        """Send an image file."""

    @abstractmethod
    def _start(self, run: RunInfo, facts: Mapping[str, Any]) -> int:
        """Start or continue the record; returns the first round that it lacks, 0 if all."""

    @abstractmethod
    def _send(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Send a round. row: with None where nothing was measured. values: without, and with the
        traffic.
        """

    @abstractmethod
    def _finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Send the summary and end the record, if one is open."""


def service_run_id(run: RunInfo) -> str:
    """Return one id per identity, seed and run directory: a baseline of two experiments keeps a
    record in each.
    """
    text = "\n".join((run.identity, str(run.seed), str(run.path.resolve())))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def require_package(package: str) -> None:
    """Raise FedpflError where the package that a logger of the same name needs is not installed."""
    spec = importlib.util.find_spec(package)
    if (
        spec is None or spec.origin is None
    ):  # a folder of that name in the working directory is no package
        raise FedpflError(
            f"logger={package} needs the package {package}: pip install {package}, or another logger"
        )


def _plain(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table can show of summary.json; a traceback is in run.log."""
    return {
        key: value for key, value in summary.items() if value is not None and key != "traceback"
    }


def _marks(run: RunInfo) -> dict[str, Any]:
    """Return values that sweeps go over, where the run has them, and the source's commit."""
    chosen = {
        "q": run.config.get("method", {}).get("q"),
        "alpha": run.config.get("partition", {}).get("alpha"),
    }
    marks: dict[str, Any] = {
        key: value for key, value in chosen.items() if isinstance(value, int | float)
    }
    if "q" in marks:
        marks["one_minus_q"] = round(
            1 - marks["q"], 12
        )  # of a q near 1 a logarithmic axis shows more
    commit = run.facts.get("environment", {}).get("commit")
    return marks | ({"commit": commit} if commit else {})


def _past(run: RunInfo) -> list[dict[str, float | None]]:
    """Return the rows of rounds.csv up to where the run resumes."""
    path = run.path / "rounds.csv"
    if not run.start_round or not path.exists():
        return []
    rows = rounds.read_rows(path.read_text(encoding="utf-8"))
    return [row for row in rows if row["round"] is not None and row["round"] <= run.start_round]
