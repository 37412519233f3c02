"""Numbers for the charts of a page: clients, curves, costs and partitions of configurations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from zipfile import BadZipFile

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import SURVIVAL
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run

AXIS_TITLES = {
    "round": "round",
    "both": "GB down and up, all clients",
    "hours": "hours of training",
    "simulated": "simulated hours",
}
"""Titles of the axes that a curve may be drawn along."""
MAX_POINTS = 200
"""Points of a curve, and clients of a method, that a page draws at most."""


def read_clients(group: Group, note: Callable[[str], None]) -> pd.DataFrame:
    """Return a row per seed and client that takes part, with a `text` naming both.

    Args:
        group: the configuration.
        note: called with a line about each run with unreadable clients.
    """
    frames = [pd.DataFrame(columns=["client"])]
    for run in group.reported_runs:
        try:
            clients = run.participating_clients
        except FedpflError as error:
            if run.is_evaluated:
                note(f"without clients: {error}")
            continue
        names = [run.client_names.get(int(n), f"client {n:.0f}") for n in clients["client"]]
        texts = [f"{name}, seed {run.seed}" for name in names]
        frames.append(clients.assign(seed=run.seed, text=texts))
    return pd.concat(frames, ignore_index=True)


def mean_by_round(group: Group, column: str) -> pd.DataFrame:
    """Return mean, std and count of seeds by round, of rounds that all seeds have."""
    # A seed with a model that was not finite has no number: a mean of the rest would flatter.
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


def spent_by_round(group: Group) -> pd.DataFrame:
    """Return each round's position along all axes, mean over seeds.

    The columns are the keys of AXIS_TITLES, nan where it was not recorded.
    """
    parts = []
    for run in group.reported_runs:
        columns = ["bits_down", "bits_up", "seconds", "sim_seconds"]
        # After a round that did not record it, the sum is unknown.
        sums = run.rounds.reindex(columns=columns).cumsum(skipna=False)
        spent = {
            "round": run.rounds["round"],
            "both": sums["bits_down"] / 8e9 + sums["bits_up"] / 8e9,
            "hours": sums["seconds"] / 3600,
            "simulated": sums["sim_seconds"] / 3600,
        }
        parts.append(pd.DataFrame(spent))
    return pd.concat(parts).groupby("round").mean()


def spent_at_rounds(spent: pd.DataFrame, key: str, rounds: np.ndarray) -> np.ndarray:
    """Return the amount spent up to these rounds, interpolated between whole ones.

    Args:
        spent: the result of `spent_by_round`.
        key: of AXIS_TITLES.
        rounds: the rounds.
    """
    if key == "round":
        return rounds
    # Nothing was spent before round 1.
    return np.interp(rounds, [0, *spent.index], [0, *spent[key]])


def evenly_spaced(count: int, max_count: int = MAX_POINTS) -> np.ndarray:
    """Return at most `max_count` indices of `count`, with the first and the last."""
    return np.linspace(0, count - 1, min(count, max_count)).round().astype(int)


def read_survival(run: Run) -> pd.DataFrame:
    """Return Kaplan-Meier's curves by client; empty in other tasks, and where none can be read."""
    rows = np.empty((0, 3))
    if run.task is SURVIVAL:
        with contextlib.suppress(OSError, ValueError, KeyError, BadZipFile):
            rows = np.load(run.path / "partition.npz")["survival"]
    curves = pd.DataFrame(rows, columns=["client", "time", "share"]).set_index("client")
    return curves.rename(index=int).rename(index=run.client_names) if len(curves) else curves


def count_labels(run: Run) -> pd.DataFrame:
    """Return samples by client and class of a run's partition, with their names."""
    counts = run.clients.set_index("client").filter(regex=r"^label_\d+$").dropna()
    counts = counts.rename(columns=lambda name: int(name.removeprefix("label_")), index=int)
    names = dict(enumerate(run.class_names))
    return counts.sort_index(axis=1).rename(columns=names, index=run.client_names)
