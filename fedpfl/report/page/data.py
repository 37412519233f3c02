"""Frames for the charts of a page: clients, curves, costs and partitions of configurations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.errors import FedpflError
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run
from fedpfl.report.text import clip_text

AXIS_TITLES = {
    "round": "round",
    "down": "GB down, all clients",
    "both": "GB down and up, all clients",
    "hours": "hours of training",
    "simulated": "simulated hours",
    "since_shift": "rounds since the last shift",
}
"""Titles of the axes that a curve may be drawn along."""
NO_COSTS = ("round", "since_shift")
COST_TITLES = {key: title for key, title in AXIS_TITLES.items() if key not in NO_COSTS}
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
    """Return the clients that may take part, None where they cannot be read.

    Args:
        run: the run.
        note: called with a line about what is wrong.
    """
    try:
        clients = run.participating_clients
    except FedpflError as error:
        if len(run.evaluations):
            note(f"without clients: {error}")
        return None
    score = run.task.score
    if run.is_untrained or not {"test", score} <= {*clients}:
        return clients
    missing_count = int(((clients["test"] > 0) & clients[score].isna()).sum())
    if missing_count:
        note(
            f"{run.path}: {missing_count} clients with test samples have no {run.task.score_word}; "
            "they are not among the clients shown"
        )
    return clients


def read_cross_accuracy(run: Run, note: Callable[[str], None]) -> pd.DataFrame:
    """Return `Run.cross_accuracy`, empty where it cannot be read.

    Args:
        run: the run.
        note: called with a line about what is wrong.
    """
    try:
        return run.cross_accuracy
    except FedpflError as error:
        note(f"without everybody's samples: {error}")
        return pd.DataFrame()


def label_clients(run: Run, numbers: Iterable[float]) -> list[str]:
    """Return what a page calls clients: `client 7`, or the name of one that has a name."""
    return [clip_text(run.client_names.get(int(n), f"client {n:.0f}"), 60) for n in numbers]


def client_accuracies(
    group: Group, clients: Mapping[Run, pd.DataFrame | None], key: str
) -> pd.DataFrame:
    """Return the accuracies of clients that take part, of all seeds, ascending.

    Args:
        group: the configuration.
        clients: the result of `read_clients` of each run.
        key: the column of the accuracy.

    Returns:
        The columns client, name, train, seed, value and low, which is whether it is of the worst
        decile of its seed. Empty where a client of a seed has no accuracy.
    """
    parts = []
    score = group.task.score
    for run in group.reported_runs:
        frame = clients[run]
        if frame is not None and score in frame:
            part = frame[frame[score].notna()].reindex(columns=["client", "train", key])
            part = part.assign(name=label_clients(run, part["client"]))
            ranks = part[key].rank(method="first", ascending=group.task.is_higher_better)
            low = ranks <= worst_decile_size(len(part))
            parts.append(part.rename(columns={key: "value"}).assign(seed=run.seed, low=low))
    if not parts:
        return pd.DataFrame(columns=["client", "name", "train", "seed", "value", "low"])
    accuracies = pd.concat(parts)
    # A box over some clients alone would be another population's.
    if accuracies["value"].isna().any():
        return accuracies.iloc[:0]
    return accuracies.sort_values(["value", "seed", "client"])


def box_numbers(accuracies: pd.DataFrame) -> dict[str, float]:
    """Return the values of BOX_NUMBERS; the worst decile's mean is a mean over seeds."""
    values = accuracies["value"]
    worst = accuracies[accuracies["low"]].groupby("seed")["value"].mean().mean()
    numbers = [
        *values.quantile([0, 0.25, 0.5, 0.75, 1]),
        values.mean(),
        worst,
    ]
    return dict(zip(BOX_NUMBERS, map(float, numbers), strict=True))


def mean_by_round(group: Group, column: str) -> pd.DataFrame:
    """Return mean, std and count of seeds by round, of rounds that all seeds have."""
    # A seed whose model was not finite has no number: a mean of the others would flatter.
    parts = []
    for run in group.reported_runs:
        part = run.rounds.reindex(columns=["round", column])
        if run.is_untrained and METRICS[column].is_evaluated:
            part[column] = math.nan
        parts.append(part)
    values = pd.concat(parts).groupby("round")[column]
    statistics = pd.DataFrame(
        {
            "mean": values.mean(skipna=False),
            "std": values.std(skipna=False),
            "count": values.count(),
        }
    )
    return statistics[statistics["mean"].notna()]


def metric_curves(group: Group, bin_size: int) -> dict[str, pd.DataFrame]:
    """Return by metric the mean and standard deviation over seeds (nan of one), by round.

    Args:
        group: the configuration.
        bin_size: rounds that make one point of a metric known in all rounds. Bins, since the noise
            of a cohort must not depend on which rounds are picked; the same for all groups, so that
            their points lie above each other.
    """
    curves: dict[str, pd.DataFrame] = {}
    # Of the many columns that there may be, runs have some.
    recorded = {column for run in group.reported_runs for column in run.rounds}
    for metric in CURVES:
        if metric.name not in recorded:
            continue
        curve = mean_by_round(group, metric.name)[["mean", "std"]]
        if metric.is_evaluated:
            curve = curve.iloc[evenly_spaced(len(curve), POINTS)]
        elif bin_size > 1:
            # Rounds count from 1.
            bins = (curve.index.to_numpy() - 1) // bin_size
            curve = curve.reset_index().groupby(bins).mean().set_index("round")
        if len(curve):
            curves[metric.name] = curve
    return curves


def spent_by_round(group: Group) -> pd.DataFrame:
    """Return each round's position along all axes, mean over seeds.

    The columns are the keys of AXIS_TITLES, nan where it was not recorded.
    """
    parts = []
    for run in group.reported_runs:
        columns = ["bits_down", "bits_up", "seconds", "sim_seconds"]
        # After a round that did not record it, nobody knows the sum.
        sums = run.rounds.reindex(columns=columns).cumsum(skipna=False)
        gigabytes_down = sums["bits_down"] / 8e9
        gigabytes_up = sums["bits_up"] / 8e9
        spent = {
            "round": run.rounds["round"],
            "down": gigabytes_down,
            "both": gigabytes_down + gigabytes_up,
            "hours": sums["seconds"] / 3600,
            "simulated": sums["sim_seconds"] / 3600,
            "since_shift": _count_since_shift(run),
        }
        parts.append(pd.DataFrame(spent))
    return pd.concat(parts).groupby("round").mean()


def _count_since_shift(run: Run) -> pd.Series:
    """Return by row the rounds since the last shift, nan before it.

    The round after which clients shift is 0: it is still judged by what they held.
    """
    rounds = run.rounds["round"]
    shift_rounds = rounds - run.rounds.get("since_shift", default=math.nan)
    rounds_since_last = rounds - shift_rounds.max()
    return rounds_since_last.where(rounds_since_last >= 0)


def spent_at_rounds(spent: pd.DataFrame, key: str, rounds: np.ndarray) -> np.ndarray:
    """Return what was spent up to these rounds, interpolated between whole ones.

    Args:
        spent: the result of `spent_by_round`.
        key: of AXIS_TITLES.
        rounds: the rounds.
    """
    if key == "round":
        return rounds
    # Nothing was spent before round 1.
    return np.interp(rounds, [0, *spent.index], [0, *spent[key]])


def evenly_spaced(count: int, max_count: int) -> np.ndarray:
    """Return at most `max_count` indices of `count`, with the first and the last."""
    return np.linspace(0, count - 1, min(count, max_count)).round().astype(int)


@dataclass
class PartitionCounts:
    """A partition that one or more runs of a setting have.

    Attributes:
        setting: data set and partition.
        counts: samples by client and class, which are called by their names if they have any.
        seeds: the seeds that have it.
        runs: how many runs have it.
    """

    setting: str
    counts: pd.DataFrame
    seeds: set[int]
    runs: int = 0


def distinct_partitions(shown_groups: Sequence[Group]) -> list[PartitionCounts]:
    """Return all distinct partitions; all settings show one before a second."""
    by_setting: dict[str, dict[bytes, PartitionCounts]] = defaultdict(dict)
    for group in shown_groups:
        for run in group.runs:
            counts = _label_counts(run)
            if counts is not None:
                new_partition = PartitionCounts(group.setting, counts, set())
                # Equal counts are drawn once, whichever runs have them.
                key = counts.to_numpy().tobytes()
                partition = by_setting[group.setting].setdefault(key, new_partition)
                partition.seeds.add(run.seed)
                partition.runs += 1
    ordered = [
        sorted(partitions.values(), key=lambda partition: min(partition.seeds))
        for partitions in by_setting.values()
    ]
    # The first of every setting, then the second of each, so that a cut hits no setting first.
    rows = []
    for number in range(max(map(len, ordered), default=0)):
        for partitions in ordered:
            rows += partitions[number : number + 1]
    return rows


def _label_counts(run: Run) -> pd.DataFrame | None:
    """Return samples by client and class, None where they were not recorded."""
    try:
        counts = run.clients.set_index("client").filter(regex=r"^label_\d+$")
    except FedpflError:
        return None
    counts = counts.rename(columns=lambda name: int(name.removeprefix("label_")))
    counts = counts.sort_index(axis=1)
    if counts.empty or counts.isna().any(axis=None):
        return None
    counts = counts.rename(index=int, columns=str).astype(int)
    class_names = {str(i): name for i, name in enumerate(run.class_names)}
    return counts.rename(index=run.client_names, columns=class_names)
