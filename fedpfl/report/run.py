"""One run directory as tables and figures see it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedpfl.ground import dotted
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.lock import run_status
from fedpfl.record import digests
from fedpfl.record.columns import ALMOST_NOBODY_SHARE, PERSONAL_PREFIX, column_names
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.reading import VALUE_ERRORS, describe_error, read_json_object, read_numbers
from fedpfl.report.text import clip_text, one_line

STATUSES = ("finished", "running", "interrupted", "failed", "diverged", "broken")
"""The first that a configuration's seeds have speaks for it."""
STALE_SECONDS = 600.0
"""Seconds: where no lock tells, a directory that has not changed for longer is nobody's."""
SIMULATED = "sim_hours"
_NEEDED = ("round", "accuracy")


class MaskOverlap(NamedTuple):
    """How the masks of several clients lie to each other in a tensor.

    entries: of the tensor. held: how many of them 0, 1, ... clients hold. both: how many clients i
    and j both hold, `[clients, clients]`; at i = j those of i.
    """

    entries: float
    holder_counts: np.ndarray
    pair_counts: np.ndarray

    def overlaps(self, chance: bool = False) -> np.ndarray:
        """Return intersection over union of every two clients, nan where both hold nothing.

        chance: what it would be about if masks of these sizes were independent.
        """
        first, second = np.triu_indices(len(self.pair_counts), 1)
        sizes = self.pair_counts.diagonal()
        both = (
            sizes[first] * sizes[second] / max(self.entries, 1)
            if chance
            else self.pair_counts[first, second]
        )
        union = sizes[first] + sizes[second] - both
        return np.divide(both, union, out=np.full(len(both), math.nan), where=union > 0)


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory.

    config: the resolved configuration. summary: `summary.json`. held: whether a living process
    holds it, None where no
    lock can tell. changed: when a file of it last was written, in seconds since 1970. method,
    dataset, partition: names for people, the method's with what it is first told apart by (see
    `groups` for the rest); method_name, dataset_name:
    those of the configuration. q: the quantile of element-wise methods. cohort: clients per round,
    as planned.
    identity: a hash of what the run computes, the same for all seeds. fingerprint: a hash of the
    data that it read, of older runs also of who holds which samples; empty if there is none.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
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

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round, ascending; nan where a cell is empty. Raises FedpflError where the
        file is damaged.
        """
        if not os.path.lexists(self.path / "rounds.csv"):
            digests.check_content(self.path, self.summary, "rounds.csv", None)
            return pd.DataFrame(columns=_NEEDED, dtype=float)
        frame = read_numbers(self.path, "rounds.csv", self.summary)
        for name in _NEEDED:
            if name not in frame:
                raise FedpflError(f"{self.path}: rounds.csv lacks the column {name}")
        # A round written twice (killed between row and checkpoint, then resumed) counts once, as
        # last written.
        number = frame["round"]
        if not (number.notna() & (number == number.round()) & (number > 0) & (number < 1e15)).all():
            raise FedpflError(f"{self.path}: rounds.csv holds a round that is no whole number")
        frame["round"] = number.astype(int)
        if number.is_monotonic_increasing and number.is_unique:
            return frame
        return frame.drop_duplicates("round", keep="last").sort_values("round", ignore_index=True)

    @property
    def reproducible_columns(self) -> pd.DataFrame:
        """Its rounds but for the times: what a run that is played again has alike, to the last
        digit.
        """
        return self.rounds.drop(columns=[*column_names("time")], errors="ignore")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client. Raises FedpflError where the file cannot be read."""
        frame = read_numbers(self.path, "clients.csv", self.summary)
        if "client" not in frame or frame["client"].isna().any():
            raise FedpflError(
                f"{self.path}: clients.csv lacks the column client, or a client its number"
            )
        if "unseen" in frame and not frame["unseen"].isin([0, 1]).all():
            raise FedpflError(
                f"{self.path}: clients.csv does not say of every client whether it is unseen, by 0 or 1"
            )
        return frame

    @cached_property
    def cross_accuracy(self) -> pd.DataFrame:
        """How each client's model does on each one's test samples, by their numbers, in percent;
        empty where not known.

        Raises FedpflError where the file cannot be read.
        """
        if not os.path.lexists(self.path / "common.csv"):
            digests.check_content(self.path, self.summary, "common.csv", None)
            return pd.DataFrame()
        frame = read_numbers(self.path, "common.csv", self.summary)
        if "client" not in frame or [*frame.columns[1:]] != [
            f"on_{number:.0f}" for number in frame["client"]
        ]:
            raise FedpflError(f"{self.path}: common.csv is not of the same clients across and down")
        return frame.set_index("client").rename(
            index=int, columns=lambda name: int(name.removeprefix("on_"))
        )

    @property
    def participating_clients(self) -> pd.DataFrame:
        """The rows of `clients` that are about those which may take part. Raises as `clients`."""
        return (
            self.clients[self.clients["unseen"] == 0] if "unseen" in self.clients else self.clients
        )

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """The rounds after which all clients were evaluated; without an accuracy where a model was
        not finite.
        """
        if self.is_untrained:
            return self.rounds.iloc[:0]
        judged = self.rounds["accuracy"].notna()
        if "eval_seconds" in self.rounds:
            judged |= self.rounds["eval_seconds"].notna()
        return self.rounds[judged]

    @cached_property
    def personalized_entries(self) -> pd.DataFrame:
        """Personalised entries of all clients that took part, by round and tensor."""
        entries = self.rounds.set_index("round").filter(regex=f"^{PERSONAL_PREFIX}")
        return entries.rename(columns=lambda name: name.removeprefix(PERSONAL_PREFIX))

    @cached_property
    def masks(self) -> dict[str, MaskOverlap]:
        """Clients' masks in the end, by tensor; {} where there are none. Raises FedpflError where
        they are damaged.
        """
        told = read_json_object(self.path, "masks.json", self.summary)
        if not told:
            return {}
        try:
            count = len(told["clients"])
            found = {
                name: MaskOverlap(
                    float(own["entries"]),
                    np.array(own["held"], float),
                    np.array(own["both"], float),
                )
                for name, own in told["tensors"].items()
            }
            for name, (entries, held, both) in found.items():
                if held.shape != (count + 1,) or both.shape != (count, count):
                    raise ValueError(f"{clip_text(name)} is not of {count} clients")
                sizes, times = (
                    np.minimum.outer(both.diagonal(), both.diagonal()),
                    np.arange(count + 1),
                )
                counted = held.sum() == entries and held @ times == both.trace()
                if not (counted and held.min() >= 0 <= both.min() and (both <= sizes).all()):
                    raise ValueError(f"the numbers of {clip_text(name)} fit no masks")
        except VALUE_ERRORS as error:
            raise FedpflError(
                f"{self.path}: masks.json holds no usable value: {describe_error(error)}"
            ) from None
        return found

    @cached_property
    def status(self) -> str:
        """Of STATUSES, as it was when the directory was read."""
        return run_status(
            str(self.summary.get("status") or "running"), self.is_locked, self.is_stale
        )

    @property
    def is_stale(self) -> bool:
        """Whether it has not changed for so long that nobody can be writing it."""
        # A round may take long; three of the last one are given.
        last = [
            own.iloc[-1:].get(key)
            for own, key in ((self.rounds, "seconds"), (self.evaluations, "eval_seconds"))
        ]
        seconds = math.fsum(
            value for own in last if own is not None for value in own if not math.isnan(value)
        )
        return time.time() - self.modified_at > max(STALE_SECONDS, 3 * seconds)

    @property
    def status_text(self) -> str:
        """The status, and how far it is: `running 40/400`."""
        whole = self.status == "finished" and self.rounds_done >= self.rounds_planned
        return self.status if whole else f"{self.status} {self.rounds_done}/{self.rounds_planned}"

    @property
    def method_title(self) -> str:
        """The method's name for people, without its values."""
        return METHOD_TITLES.get(self.method_name, one_line(self.method_name))

    @property
    def search_name(self) -> str:
        """The search that it is a trial of, empty for any other run."""
        return str(self.summary.get("search") or "")

    @property
    def rounds_planned(self) -> int:
        """Rounds asked for."""
        return int(self.config.get("rounds") or self.rounds_done)

    @cached_property
    def rounds_done(self) -> int:
        """Rounds recorded."""
        return 0 if self.rounds.empty else int(self.rounds["round"].iloc[-1])

    @cached_property
    def participants(self) -> pd.Series:
        """Clients that took part in each round; the planned number in runs that did not record it."""
        return (
            self.rounds.reindex(columns=["participants"])["participants"]
            .astype(float)
            .fillna(float(self.cohort))
        )

    @cached_property
    def is_untrained(self) -> bool:
        """Whether no client has made a step, so that there is no accuracy of the method's."""
        return self.summary_number("trained") == 0 or (
            self.rounds_done > 0 and self.participants.sum() == 0
        )

    @cached_property
    def low_attendance_note(self) -> str:
        """Say how few clients made a step where at most a tenth did; `` of other runs."""
        if self.is_untrained:
            return "no client has made a step"
        trained, clients = self.summary_number("trained"), self.summary_number("clients")
        if trained <= ALMOST_NOBODY_SHARE * clients:
            return f"{trained:.0f} of {clients:.0f} clients have made a step"
        # Early stopping makes cohorts smaller on purpose.
        planned = 0 if self.config_value("stopping.early") else self.cohort * self.rounds_done
        took_part = self.participants.sum()
        if took_part <= ALMOST_NOBODY_SHARE * planned:
            return f"{took_part:.0f} of {planned:.0f} planned participations took place"
        return ""

    def metric_value(self, name: str, row: Mapping[str, Any] | pd.Series) -> float:
        """Return a metric as tables show it, nan where it is not recorded: that of the row that the
        run is judged by.

        But traffic is a mean per client and round, seconds are a median over rounds, hours are of
        the whole run, sim_hours the simulated ones up to that row, and with @80 those until 80 %
        were first reached; gap is what clients that take part are better by than those that never
        do.
        """
        if name == "gap":
            return self.metric_value("accuracy", row) - self.metric_value("unseen_accuracy", row)
        if name == "hours":
            return self.summary_number(name)
        if name == "seconds":
            return self.seconds_per_round
        if name.startswith(SIMULATED):
            return self.simulated_hours(row, name.removeprefix(SIMULATED).removeprefix("@"))
        return (
            self.per_client(name)
            if name in column_names("traffic")
            else float(row.get(name, math.nan))
        )

    def simulated_hours(self, row: Mapping[str, Any] | pd.Series, percent: str = "") -> float:
        """Return the simulated hours up to a row, or up to the first evaluation of so high an
        accuracy; nan without.
        """
        if "sim_seconds" not in self.rounds:
            return math.nan
        if percent:
            reached = self.evaluations[self.evaluations["accuracy"] >= float(percent)]
            row = reached.iloc[0] if len(reached) else {}
        before = self.rounds["round"] <= row.get("round", math.nan)
        return (
            float(self.rounds["sim_seconds"][before].sum(skipna=False)) / 3600
            if before.any()
            else math.nan
        )

    @property
    def last_round(self) -> pd.Series:
        """The last row of rounds.csv, empty without any."""
        return self.rounds.iloc[-1] if self.rounds_done else pd.Series(dtype=float)

    @property
    def last_evaluation(self) -> pd.Series:
        """The last row after which all clients were evaluated, empty without any."""
        return self.evaluations.iloc[-1] if len(self.evaluations) else pd.Series(dtype=float)

    def per_client(self, column: str) -> float:
        """Return what one client of the cohort moves in a round, mean over all that took part; nan
        if not recorded.
        """
        if column not in self.rounds:
            return math.nan
        values = self.rounds[column]
        count = float(self.participants[values.notna()].sum())
        return float(values.sum()) / count if count > 0 else math.nan

    @property
    def seconds_per_round(self) -> float:
        """Median seconds of a round without evaluation; nan where not recorded."""
        return float(self.rounds["seconds"].median()) if "seconds" in self.rounds else math.nan

    def config_value(self, key: str) -> Any:
        """Return the configuration's value of a dotted key, None where there is none."""
        return dotted.get_dotted(self.config, key)

    def summary_number(self, key: str) -> float:
        """Return a number of summary.json, nan where there is none."""
        value = self.summary.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
        return math.nan

    @property
    def environment(self) -> dict[str, Any]:
        """What summary.json says of versions and machine."""
        found = self.summary.get("environment")
        return found if isinstance(found, dict) else {}
