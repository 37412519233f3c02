"""What the charts of a page show, as frames: clients, curves, costs and partitions of each
configuration.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.errors import FedpflError
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run

AXIS_TITLES = {
    "round": "round",
    "down": "GB down, all clients",
    "both": "GB down and up, all clients",
    "hours": "hours of training",
    "simulated": "simulated hours",
}
POINTS = 200  # of a curve, at most
BOX_NUMBERS = (
    "least",
    "lower quartile",
    "median",
    "upper quartile",
    "greatest",
    "mean",
    "worst decile",
)
CURVES = sorted(
    (metric for metric in METRICS.values() if metric.best),
    key=lambda metric: not metric.is_evaluated,
)


def read_clients(run: Run, note: Callable[[str], None]) -> pd.DataFrame | None:
    """Return the clients that may take part, None where they cannot be read; `note` is called with
    what is wrong.
    """
    try:
        part = run.participating_clients
    except FedpflError as error:
        if len(run.evaluations):
            note(f"without clients: {error}")
        return None
    if run.is_untrained:
        return part
    if {"test", "accuracy"} <= {*part} and (
        silent := int(((part["test"] > 0) & part["accuracy"].isna()).sum())
    ):
        note(
            f"{run.path}: {silent} clients with test samples have no accuracy; they are not among the clients shown"
        )
    return part


def read_common(run: Run, note: Callable[[str], None]) -> pd.DataFrame:
    """Return `Run.common`, empty where it cannot be read; `note` is called with what is wrong."""
    try:
        return run.cross_accuracy
    except FedpflError as error:
        note(f"without everybody's samples: {error}")
        return pd.DataFrame()


def client_accuracies(
    group: Group, clients: Mapping[Run, pd.DataFrame | None], key: str
) -> pd.DataFrame:
    """Return the accuracy of the clients that take part, of all seeds, ascending: seed, client,
    train, value, low.

    low: whether it is of the worst decile of its seed. Empty where a client of a seed has none.
    """
    parts = [pd.DataFrame(columns=["client", "train", "seed", "value", "low"])]
    for run in group.reported_runs:
        frame = clients[run]
        if frame is not None and "accuracy" in frame:
            part = frame[frame["accuracy"].notna()].reindex(columns=["client", "train", key])
            low = part[key].rank(method="first") <= worst_decile_size(len(part))
            parts.append(part.rename(columns={key: "value"}).assign(seed=run.seed, low=low))
    whole = pd.concat(parts[1:] or parts)
    return (
        whole.iloc[:0]
        if whole["value"].isna().any()
        else whole.sort_values(["value", "seed", "client"])
    )


def box_numbers(spread: pd.DataFrame) -> dict[str, float]:
    """Return the numbers of BOX; the worst decile's mean is a mean over seeds."""
    worst = spread[spread["low"]].groupby("seed")["value"].mean().mean()
    marks = [*spread["value"].quantile([0, 0.25, 0.5, 0.75, 1]), spread["value"].mean(), worst]
    return dict(zip(BOX_NUMBERS, map(float, marks), strict=True))


def mean_by_round(group: Group, column: str) -> pd.DataFrame:
    """Return mean, sample standard deviation and number of seeds by round, of the rounds that all
    seeds have it of.
    """
    # A seed whose model was not finite has no number: a mean of the others would flatter.
    parts = [run.rounds.reindex(columns=["round", column]) for run in group.reported_runs]
    for run, part in zip(group.reported_runs, parts, strict=True):
        if run.is_untrained and METRICS[column].is_evaluated:
            part[column] = math.nan
    own = pd.concat(parts).groupby("round")[column]
    over = pd.DataFrame(
        {"mean": own.mean(skipna=False), "std": own.std(skipna=False), "count": own.count()}
    )
    return over[over["mean"].notna()]


def metric_curves(group: Group, size: int) -> dict[str, pd.DataFrame]:
    """Return by metric: mean and sample standard deviation over seeds (nan of one), by round.

    size: rounds that make one point of a metric known in all rounds. Bins, since the noise of a
    cohort must not depend on which rounds are picked; the same for all groups, so that their points
    lie above each other.
    """
    lines: dict[str, pd.DataFrame] = {}
    for metric in CURVES:
        over = mean_by_round(group, metric.name)[["mean", "std"]]
        if metric.is_evaluated:
            over = over.iloc[evenly_spaced(len(over), POINTS)]
        elif size > 1:
            over = (
                over.reset_index()
                .groupby((over.index.to_numpy() - 1) // size)
                .mean()
                .set_index("round")
            )
        lines |= {metric.name: over} if len(over) else {}
    return lines


def spent_by_round(group: Group) -> pd.DataFrame:
    """Return by round what was spent up to it, mean over seeds: the keys of OVER; nan where it was
    not recorded.
    """
    parts = []
    for run in group.reported_runs:
        sums = run.rounds.reindex(
            columns=["bits_down", "bits_up", "seconds", "sim_seconds"]
        ).cumsum(skipna=False)
        down, up = sums["bits_down"] / 8e9, sums["bits_up"] / 8e9
        spent = {
            "round": run.rounds["round"],
            "down": down,
            "both": down + up,
            "hours": sums["seconds"] / 3600,
        }
        parts.append(pd.DataFrame(spent | {"simulated": sums["sim_seconds"] / 3600}))
    return pd.concat(parts).groupby("round").mean()


def spent_at_rounds(totals: pd.DataFrame, key: str, rounds: np.ndarray) -> np.ndarray:
    """Return what was spent up to these rounds, between whole ones in proportion."""
    return rounds if key == "round" else np.interp(rounds, [0, *totals.index], [0, *totals[key]])


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` places of `count`, evenly spaced, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


@dataclass
class PartitionCounts:
    """A partition that one or more runs of a setting have. counts: samples by client and class."""

    setting: str
    counts: pd.DataFrame
    seeds: set[int]
    runs: int = 0


def distinct_partitions(gathered: Sequence[Group]) -> list[PartitionCounts]:
    """Return all distinct partitions; all settings show one before a second."""
    distinct = defaultdict[str, dict[bytes, PartitionCounts]](dict)
    for group, run in ((one, run) for one in gathered for run in one.runs):
        try:
            labels = run.clients.set_index("client").filter(regex=r"^label_\d+$")
        except FedpflError:
            continue
        labels = labels.rename(columns=lambda name: int(name[6:])).sort_index(axis=1)
        if not labels.empty and labels.notna().all(axis=None):
            counts = labels.rename(index=int, columns=str).astype(int)
            entry = PartitionCounts(group.setting, counts, set())
            entry = distinct[group.setting].setdefault(counts.to_numpy().tobytes(), entry)
            entry.seeds.add(run.seed)
            entry.runs += 1
    ordered = [
        sorted(members.values(), key=lambda one: min(one.seeds)) for members in distinct.values()
    ]
    return [one for row in itertools.zip_longest(*ordered) for one in row if one]
