"""One run directory as tables and figures see it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedpfl.ground import dotted
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.lock import run_status
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import Task, configured_task
from fedpfl.record import digests
from fedpfl.record.columns import ALMOST_NOBODY_SHARE, PERSONAL_PREFIX, column_names
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.reading import read_json_object, read_numbers, read_texts
from fedpfl.report.text import one_line

STATUSES = ("finished", "running", "interrupted", "failed", "diverged", "broken")
"""The statuses of runs. A configuration is reported by its seeds of the first one that occurs."""
STALE_SECONDS = 600.0
"""Where no lock tells, a directory unchanged for longer is taken to have no writer."""
SIMULATED = "sim_hours"
GIGABYTES = "gb"
ROUND_COUNT = "rounds"
HOURS = "hours"
TERAFLOPS = "tflops"
SPENDINGS = (SIMULATED, GIGABYTES, ROUND_COUNT, HOURS, TERAFLOPS)
"""What a run has spent up to a row, or with `@80` until a score of 80 % was first reached."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory.

    Attributes:
        path: the directory.
        config: the resolved configuration.
        summary: the content of `summary.json`.
        is_locked: whether a living process holds it, None where no lock can tell.
        modified_at: when one of its files last was written, in seconds since 1970.
        seed: its seed.
        method: the method's name for people, with its most important settings (`groups` adds more).
        method_name: the method's name in the configuration.
        dataset: the data set's name for people.
        dataset_name: the data set's name in the configuration.
        partition: the partition's name for people, and under which attack, defence and shift.
        q: the quantile of element-wise methods.
        cohort: planned clients per round.
        identity: hash of the run's configuration, the same for all seeds.
        fingerprint: hash of the data that it read; empty before it has recorded that.
    """

    path: Path
    config: Record
    summary: Record
    is_locked: bool | None
    modified_at: float
    seed: int
    method: str
    method_name: str
    dataset: str
    dataset_name: str
    partition: str
    q: float | None
    cohort: int
    identity: str
    fingerprint: str

    @property
    def task(self) -> Task:
        """Return the task of its labels."""
        return configured_task(self.config)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """Return one row per round, ascending; nan where a cell is empty.

        Raises:
            FedpflError: rounds.csv is damaged.
        """
        if self._is_absent("rounds.csv"):
            return pd.DataFrame(columns=("round", self.task.score), dtype=float)
        frame = read_numbers(self.path, "rounds.csv", self.summary)
        for name in ("round", self.task.score):
            if name not in frame:
                raise FedpflError(f"{self.path}: rounds.csv lacks the column {name}")
        frame["round"] = frame["round"].astype(int)
        # A round written twice (killed between row and checkpoint, then resumed) counts once, as
        # last written.
        return frame.drop_duplicates("round", keep="last").sort_values("round", ignore_index=True)

    @property
    def reproducible_columns(self) -> pd.DataFrame:
        """Return the rounds without the times, equal to the last digit when run again."""
        return self.rounds.drop(columns=[*column_names("time")], errors="ignore")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """Return one row per client.

        Raises:
            FedpflError: clients.csv cannot be read.
        """
        frame = read_numbers(self.path, "clients.csv", self.summary)
        if "client" not in frame:
            raise FedpflError(f"{self.path}: clients.csv lacks the column client")
        if kinds := read_texts(self.path, "clients.csv", "kind", self.summary):
            frame["kind"] = kinds
        counts = frame.filter(regex=r"^(client|train|validation|test|label_\d+)$").dropna(axis=1)
        return frame.astype(dict.fromkeys(counts, int))

    @cached_property
    def larger_class_share(self) -> float:
        """Return the mean over clients of the larger of two classes' share; else nan."""
        counts = pd.DataFrame()
        with contextlib.suppress(FedpflError):  # it is for a note, which must not cost a table
            counts = self.participating_clients.filter(regex=r"^label_\d+$")
        shares = counts.max(axis=1) / counts.sum(axis=1)
        return float(shares.mean()) if counts.shape[1] == 2 else math.nan

    @cached_property
    def client_names(self) -> dict[int, str]:
        """Return the clients' names by number; {} where clients are numbers alone.

        Raises:
            FedpflError: clients.csv cannot be read.
        """
        names = read_texts(self.path, "clients.csv", "name", self.summary)
        numbers = self.clients["client"].astype(int)
        return dict(zip(numbers, names, strict=True)) if names else {}

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes; empty where they are numbers alone."""
        names = self.summary.get("classes")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    @cached_property
    def cross_accuracy(self) -> pd.DataFrame:
        """Return the accuracy of each client's model on each client's test samples.

        In percent, by client numbers; empty where it was not measured.

        Raises:
            FedpflError: common.csv cannot be read.
        """
        if self._is_absent("common.csv"):
            return pd.DataFrame()
        frame = read_numbers(self.path, "common.csv", self.summary).set_index("client")
        return frame.rename(index=int, columns=lambda name: int(name.removeprefix("on_")))

    @property
    def participating_clients(self) -> pd.DataFrame:
        """Return the rows of `clients` that may take part and are honest. Raises as `clients`."""
        clients = self.clients
        for flag in ("unseen", "attacker"):
            if flag in clients:
                clients = clients[clients[flag] == 0]
        return clients

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """Return the rounds after which all clients were evaluated.

        They lack a score where a model was not finite.
        """
        if self.is_untrained:
            return self.rounds.iloc[:0]
        is_evaluated = self.rounds[self.task.score].notna()
        if "eval_seconds" in self.rounds:
            # An evaluation took time, but its score may be missing.
            is_evaluated |= self.rounds["eval_seconds"].notna()
        return self.rounds[is_evaluated]

    @cached_property
    def personalized_entries(self) -> pd.DataFrame:
        """Return personalised entries of all clients that took part, by round and tensor."""
        entries = self.rounds.set_index("round").filter(regex=f"^{PERSONAL_PREFIX}")
        return entries.rename(columns=lambda name: name.removeprefix(PERSONAL_PREFIX))

    @property
    def mask_pairs(self) -> dict[str, np.ndarray]:
        """Count the entries that two clients both hold, `[clients, clients]`, by tensor.

        On the diagonal are those that a client holds; {} without masks.

        Raises:
            FedpflError: masks.json is damaged.
        """
        tensors = read_json_object(self.path, "masks.json", self.summary).get("tensors", {})
        return {name: np.array(fields["both"], float) for name, fields in tensors.items()}

    @cached_property
    def status(self) -> str:
        """Return one of STATUSES, as it was when the directory was read."""
        recorded_status = str(self.summary.get("status") or "running")
        return run_status(recorded_status, self.is_locked, self.is_stale)

    @property
    def is_stale(self) -> bool:
        """True if it is too old to be still written."""
        # A round may take long; three of the last one are given.
        seconds = self.rounds.reindex(columns=["seconds", "eval_seconds"]).ffill().iloc[-1:]
        patience = max(STALE_SECONDS, 3 * seconds.sum(axis=None))
        return time.time() - self.modified_at > patience

    @property
    def status_text(self) -> str:
        """Return the status and the progress: `running 40/400`."""
        if self.status == "finished" and self.rounds_done >= self.rounds_planned:
            return self.status
        return f"{self.status} {self.rounds_done}/{self.rounds_planned}"

    @property
    def method_title(self) -> str:
        """Return the method's name for people, without its settings."""
        return METHOD_TITLES.get(self.method_name, one_line(self.own_title or self.method_name))

    @property
    def own_title(self) -> str:
        """Return the title that a plugin gives its method, or nothing."""
        return str(self.summary.get("title") or "")

    @property
    def search_name(self) -> str:
        """Return the search that it is a trial of, empty for any other run."""
        return str(self.summary.get("search") or "")

    @property
    def rounds_planned(self) -> int:
        """Return the number of rounds that its configuration asks for."""
        return int(self.config.get("rounds") or self.rounds_done)

    @cached_property
    def rounds_done(self) -> int:
        """Return the number of its last recorded round."""
        return 0 if self.rounds.empty else int(self.rounds["round"].iloc[-1])

    @cached_property
    def participants(self) -> pd.Series:
        """Return the participants of each round, as planned where not participants."""
        participants = self.rounds.reindex(columns=["participants"])["participants"]
        return participants.astype(float).fillna(float(self.cohort))

    @property
    def last_participants(self) -> float:
        """Return the participants of the last round, nan without any."""
        return float(self.participants.iloc[-1]) if self.rounds_done else math.nan

    @property
    def hours(self) -> float:
        """Return the hours of all its processes, nan if unknown.

        Of a run that has not finished they are those of its recorded rounds.
        """
        if self.status == "finished":
            return self.summary_number("hours")
        seconds = self.rounds.reindex(columns=["seconds", "eval_seconds"])
        return float(seconds.sum().sum()) / 3600

    @cached_property
    def is_untrained(self) -> bool:
        """True if no client has made a step, so that the method has no accuracy."""
        if self.summary_number("trained") == 0:
            return True
        return self.rounds_done > 0 and self.participants.sum() == 0

    @cached_property
    def low_attendance_note(self) -> str:
        """Count the clients that made a step, if these are at most a tenth."""
        if self.is_untrained:
            return "no client has made a step"
        trained = self.summary_number("trained")
        clients = self.summary_number("clients")
        if trained <= ALMOST_NOBODY_SHARE * clients:
            return f"{trained:.0f} of {clients:.0f} clients have made a step"
        # Early stopping makes cohorts smaller on purpose.
        planned = self.cohort * self.rounds_done
        participations = self.participants.sum()
        is_stopped = self.config_value("stopping.early")
        if not is_stopped and participations <= ALMOST_NOBODY_SHARE * planned:
            return f"{participations:.0f} of {planned:.0f} planned participations took place"
        return ""

    def metric_value(self, name: str, row: Values | pd.Series) -> float:
        """Return a metric as tables show it, nan where it is not recorded.

        Most are those of the row that the run is judged by. Traffic is a mean per client and round,
        seconds are a median over rounds, hours are of the whole run. SPENDINGS are up to that row,
        with @80 until 80 % were first reached. gap is how much better clients that take part are
        than those that never do.
        """
        if name == "gap":
            seen_score = self.metric_value(self.task.score, row)
            gap = seen_score - self.metric_value(f"unseen_{self.task.score}", row)
            return gap if self.task.is_higher_better else -gap
        if name == HOURS:
            return self.summary_number(name)
        if name == "seconds":
            return float(self.rounds.reindex(columns=[name])[name].median())
        quantity, _, percent = name.partition("@")
        if quantity in SPENDINGS:
            return self.spent_until(quantity, row, percent)
        if name in column_names("traffic"):
            return self.per_client(name)
        return float(row.get(name, math.nan))

    def spent_until(self, quantity: str, row: Values | pd.Series, percent: str = "") -> float:
        """Return the amount spent up to a row, nan if not recorded.

        Args:
            quantity: of SPENDINGS; gigabytes are 10^9 bytes, both ways, all clients together,
                tflops 10^12 operations, and hours those of rounds and evaluations.
            row: a row of `rounds`.
            percent: count up to the first evaluation that reaches this score instead.
        """
        needed = {
            SIMULATED: ["sim_seconds"],
            GIGABYTES: ["bits_down", "bits_up"],
            HOURS: ["seconds"],
            TERAFLOPS: ["flops"],
        }
        columns = needed.get(quantity, ["round"])
        if not {*columns} <= {*self.rounds.columns}:
            return math.nan
        last_round = row.get("round", math.nan)
        if percent:
            scores = self.evaluations[self.task.score]
            is_reached = scores >= float(percent)
            if not self.task.is_higher_better:
                is_reached = scores <= float(percent)
            last_round = self.evaluations["round"][is_reached].min()
        is_before = self.rounds["round"] <= last_round
        if not is_before.any():
            return math.nan
        if quantity == ROUND_COUNT:
            return float(self.rounds["round"][is_before].max())
        # A round that is not recorded makes the sum unknown.
        total = self.rounds[columns][is_before].sum(axis=1, skipna=False).sum(skipna=False)
        if quantity == HOURS:
            total += self.rounds.reindex(columns=["eval_seconds"])[is_before].sum(axis=None)
        return float(total) / {GIGABYTES: 8e9, TERAFLOPS: 1e12}.get(quantity, 3600)

    @property
    def is_evaluated(self) -> bool:
        """True if all clients were evaluated after a round."""
        return len(self.evaluations) > 0

    @property
    def last_round(self) -> pd.Series:
        """Return the last row of rounds.csv, empty without any."""
        return self.rounds.iloc[-1] if self.rounds_done else pd.Series(dtype=float)

    @property
    def last_evaluation(self) -> pd.Series:
        """Return the last row after which all clients were evaluated, empty without any."""
        return self.evaluations.iloc[-1] if self.is_evaluated else pd.Series(dtype=float)

    def per_client(self, column: str) -> float:
        """Return a column's mean over all participations, nan if not recorded."""
        if column not in self.rounds:
            return math.nan
        values = self.rounds[column]
        # Rounds that did not record the column have no part in the mean.
        count = float(self.participants[values.notna()].sum())
        return float(values.sum()) / count if count > 0 else math.nan

    def config_value(self, key: str) -> Any:
        """Return the configuration's value of a dotted key, None if absent."""
        return dotted.get_dotted(self.config, key)

    def summary_number(self, key: str) -> float:
        """Return a number of summary.json, nan if absent."""
        value = self.summary.get(key)
        # JSON has whole numbers of any length, which no float could hold.
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
        return math.nan

    @property
    def environment(self) -> Record:
        """Return the versions and the machine that summary.json names."""
        environment = self.summary.get("environment")
        return environment if isinstance(environment, dict) else {}

    def _is_absent(self, name: str) -> bool:
        """True if a file is absent; raises FedpflError if the summary has its digest."""
        if os.path.lexists(self.path / name):
            return False
        digests.check_content(self.path, self.summary, name, None)
        return True
