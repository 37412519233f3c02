"""What the charts of a page show, as frames: clients, curves, costs and partitions of each configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedpfl.ground.decile import decile
from fedpfl.ground.errors import FedpflError
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run

POINTS = 200  # of a curve, at most
CURVES = sorted((metric for metric in METRICS.values() if metric.best), key=lambda metric: not metric.evaluated)


def read_clients(run: Run, note: Callable[[str], None]) -> pd.DataFrame | None:
    """Return a run's clients, None where they cannot be read; `note` is called with a line about what is wrong."""
    try:
        frame = run.clients
    except FedpflError as error:
        if len(run.evaluations):
            note(f"without clients: {error}")
        return None
    part = run.participating
    if {"test", "accuracy"} <= {*part} and (silent := int(((part["test"] > 0) & part["accuracy"].isna()).sum())):
        note(f"{run.path}: {silent} clients with test samples have no accuracy; they are not among the clients shown")
    return frame


def spread(group: Group, tables: dict[Any, pd.DataFrame | None], key: str) -> pd.DataFrame:
    """Return the accuracy of the clients that take part, of all seeds, ascending: seed, client, train, value, low.

    low: whether it is of the worst decile of its seed. Empty where a client of a seed has none.
    """
    parts = []
    for run in group.used:
        frame = tables[run.path]
        if frame is None or "accuracy" not in frame:
            continue
        part = run.participating.reindex(columns=["client", "train", "accuracy", "ft_accuracy"])
        part = part[part["accuracy"].notna()]
        low = part[key].rank(method="first") <= decile(len(part))
        parts.append(part[["client", "train"]].assign(seed=run.seed, value=part[key], low=low))
    whole = pd.concat(parts) if parts else pd.DataFrame(columns=["client", "train", "seed", "value", "low"])
    return whole.iloc[:0] if whole["value"].isna().any() else whole.sort_values(["value", "seed", "client"])


def box(spread: pd.DataFrame) -> list[float]:
    """Return least, quartiles, greatest, mean and the worst decile's mean, the last over seeds."""
    marks = spread["value"].quantile([0, 0.25, 0.5, 0.75, 1]).tolist()
    return [*marks, spread["value"].mean(), spread[spread["low"]].groupby("seed")["value"].mean().mean()]


def curves(group: Group, size: int) -> dict[str, pd.DataFrame]:
    """Return by metric: mean and sample standard deviation over seeds (nan of one), by round.

    size: rounds that make one point of a metric known in all rounds. Bins, since the noise of a cohort must not
    depend on which rounds are picked; the same for all groups, so that their points lie above each other.
    """
    every = pd.concat([run.rounds for run in group.used])
    shown = [metric for metric in CURVES if metric.name in every]
    rounds = every[["round", *(metric.name for metric in shown)]].groupby("round")
    means, spreads = rounds.mean(skipna=False), rounds.std(skipna=False)
    found: dict[str, pd.DataFrame] = {}
    for metric in shown:
        over = pd.DataFrame({"mean": means[metric.name], "std": spreads[metric.name]})
        over = over[over["mean"].notna()]
        if metric.evaluated:
            over = over.iloc[spaced(len(over), POINTS)]
        elif size > 1:
            over = over.reset_index().groupby((over.index.to_numpy() - 1) // size).mean().set_index("round")
        found |= {metric.name: over} if len(over) else {}
    return found


def totals(group: Group) -> pd.DataFrame:
    """Return by round what was spent up to it, mean over seeds: the keys of OVER; nan where it was not recorded."""
    parts = []
    for run in group.used:
        sums = run.rounds.reindex(columns=["bits_down", "bits_up", "seconds"]).cumsum(skipna=False)
        down, up = sums["bits_down"] / 8e9, sums["bits_up"] / 8e9
        spent = {"round": run.rounds["round"], "down": down, "both": down + up, "hours": sums["seconds"] / 3600}
        parts.append(pd.DataFrame(spent))
    return pd.concat(parts).groupby("round").mean()


def reached(totals: pd.DataFrame, key: str, rounds: np.ndarray) -> np.ndarray:
    """Return what was spent up to these rounds, between whole ones in proportion."""
    return rounds if key == "round" else np.interp(rounds, [0, *totals.index], [0, *totals[key]])


def smoothed(over: pd.DataFrame) -> pd.DataFrame:
    """Return a running mean over a twentieth of the points, which has no band."""
    return over.assign(mean=over["mean"].rolling(len(over) // 20 or 1, 1).mean(), std=math.nan)


def spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` places of `count`, evenly spaced, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def partitions(gathered: Sequence[Group], tables: Mapping[Path, pd.DataFrame | None]) -> list[dict[str, Any]]:
    """Return label counts `[clients, classes]` of all distinct partitions; all settings show one before a second."""
    found: dict[tuple[str, bytes], dict[str, Any]] = {}
    for group, run in ((one, run) for one in gathered for run in one.runs):
        frame = tables[run.path]
        labels = pd.DataFrame() if frame is None else frame.filter(regex=r"^label_\d+$")
        labels = labels.rename(columns=lambda name: int(name[6:])).sort_index(axis=1)
        if frame is None or labels.empty or labels.isna().any(axis=None):
            continue
        counts, clients = labels.to_numpy().astype(int), frame["client"].astype(int).to_numpy()
        new = {"setting": group.setting, "classes": [*map(str, labels)], "counts": counts, "clients": clients}
        new |= {"seeds": set(), "runs": 0}
        entry = found.setdefault((group.setting, counts.tobytes()), new)
        entry["seeds"].add(run.seed)
        entry["runs"] += 1
    order = sorted(found.values(), key=lambda entry: (entry["setting"], min(entry["seeds"])))
    own = [entry["setting"] for entry in order]
    return [order[at] for at in sorted(range(len(order)), key=lambda at: (own[:at].count(own[at]), own[at]))]
