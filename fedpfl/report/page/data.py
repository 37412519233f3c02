"""What the charts of a page are drawn from: numbers thinned and rounded, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report.fairness import BASELINES, Fair, harm
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run

POINTS = 200  # of a curve, at most
DOTS = 200  # clients of a method that are drawn one by one
PARTITIONS = 12  # of a page
CELLS = 20_000  # of one partition's heat map
MASKS = 120_000  # cells of all mask heat maps of a page together

EVALUATED = {
    "accuracy": "mean over clients",
    "accuracy_pooled": "pooled over samples",
    "accuracy_worst10": "worst decile of clients",
    "ft_accuracy": "fine-tuned, mean over clients",
    "ft_accuracy_pooled": "fine-tuned, pooled",
    "val_accuracy": "validation, mean over clients",
    "unseen_accuracy": "unseen clients, mean",
    "unseen_accuracy_worst10": "unseen clients, worst decile",
    "unseen_ft_accuracy": "unseen clients, fine-tuned, mean",
    "loss": "test loss",
}
EVERY_ROUND = {
    "cohort_before": "cohort before local training",
    "cohort_after": "cohort after local training",
    "train_loss": "training loss",
}
METRICS = EVALUATED | EVERY_ROUND
_COST = (("down", "bits_down", 8e9), ("up", "bits_up", 8e9), ("hours", "seconds", 3600))


def page_data(
    gathered: Sequence[Group], judged: Sequence[float], note: Callable[[str], None], fair: Sequence[Fair]
) -> dict[str, Any]:
    """Return everything the charts need, without a number that is not finite.

    judged: each group's accuracy in the table, in percent. note: called with a line about each run whose
    `clients.csv` cannot be read, or lacks an accuracy. fair: each group beside its baselines.
    """
    settings = list(dict.fromkeys(group.setting for group in gathered))
    methods = _methods(gathered, judged)
    tables = {run.path: _clients(run, note) for group in gathered for run in group.runs}
    masks = [pd.concat([run.personal for run in group.used]) for group in gathered]
    bins = max(8, min(100, MASKS // max(1, sum(len(mask.columns) for mask in masks))))
    size = max(1, math.ceil(max(run.reached for group in gathered for run in group.used) / POINTS))
    records = []
    for group, accuracy, mask, own in zip(gathered, judged, masks, fair, strict=True):
        record: dict[str, Any] = {
            "setting": settings.index(group.setting),
            "method": methods.index(group.method),
            "status": group.status,
            "seeds": [run.seed for run in group.used],
            "accuracy": _round(accuracy),
            "curves": _curves(group, size),
            "cost": _cost(group),
            "clients": _spread(group, tables),
            "fairness": _beside(own),
            "mask": _mask(group, mask, bins),
        }
        records.append({key: value for key, value in record.items() if value is not None})
    drawn = {key for record in records for key in record["curves"]}
    parted, left_out = _partitions(gathered, settings, tables)
    return {
        "settings": settings,
        "methods": methods,
        "metrics": {key: label for key, label in METRICS.items() if key in drawn},
        "groups": records,
        "partitions": parted,
        "partitions_left_out": left_out,
    }


def worst(values: np.ndarray) -> np.ndarray:
    """Return which values, without nan, belong to the worst tenth, at least one; as `accuracy_worst10` counts."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(values, kind="stable")[: max(1, len(values) // 10)]] = True
    return chosen


def _methods(gathered: Sequence[Group], judged: Sequence[float]) -> list[str]:
    """The labels, the best of each setting first: colours repeat, and the best shall not share one."""
    places: dict[str, int] = {}
    counts: dict[str, int] = {}
    for _, group in sorted(zip(judged, gathered, strict=True), key=lambda one: -one[0] if one[0] >= 0 else 1.0):
        setting = group.setting
        counts[setting] = rank = counts.get(setting, -1) + 1
        places[group.method] = min(rank, places.get(group.method, rank))
    return sorted(places, key=places.__getitem__)


def _clients(run: Run, note: Callable[[str], None]) -> pd.DataFrame | None:
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


def _curves(group: Group, size: int) -> dict[str, Any]:
    """By metric: rounds, mean over seeds, sample standard deviation over seeds or 0, rounds per point.

    size: rounds that make one point of a metric known in every round. Bins, since the noise of a cohort must not
    depend on which rounds are picked; the same for all groups, so that their points lie above each other.
    """
    several = len(group.used) > 1
    rounds = pd.concat([run.rounds.reindex(columns=["round", *METRICS]) for run in group.used]).groupby("round")
    means, spreads = rounds.mean(skipna=False), rounds.std(skipna=False) if several else rounds.mean()
    found = {}
    for key in METRICS:
        over = pd.DataFrame({"round": means.index, "mean": means[key].array, "std": spreads[key].array})
        over = over[over["mean"].notna()]
        if over.empty:
            continue
        if key in EVALUATED:
            over = over.iloc[_spaced(len(over), POINTS)]
        elif size > 1:
            over = over.groupby((over["round"] - 1) // size).mean()
        show = _significant if key.endswith("loss") else _round
        spread = [show(value) for value in over["std"]] if several else 0
        at = [_significant(value, 6) for value in over["round"]]
        found[key] = [at, [show(value) for value in over["mean"]], spread, 1 if key in EVALUATED else size]
    return found


def _cost(group: Group) -> dict[str, Any]:
    """Rounds, and up to each: gigabytes down and up of the whole cohort and hours of training, mean over seeds."""
    parts = []
    for run in group.used:
        sums = {name: run.rounds[key].cumsum(skipna=False) / unit for name, key, unit in _COST if key in run.rounds}
        parts.append(pd.DataFrame({"round": run.rounds["round"]} | sums))
    over = pd.concat(parts).groupby("round", as_index=False).mean()
    over = over.iloc[_spaced(len(over), POINTS // 2)]
    return {name: [_significant(value, 6) for value in over[name]] for name in over}


def _spread(group: Group, tables: dict[Any, pd.DataFrame | None]) -> dict[str, Any] | None:
    """Accuracy over the clients that take part, of all seeds.

    `box`: by metric least, quartile, median, quartile, greatest, mean, mean of the worst decile (over seeds).
    `dots`: seed, client, training samples, accuracy, fine-tuned accuracy, and 1 if in the worst decile, plus 2 if so
    when fine-tuned; evenly spaced by accuracy where there are more than DOTS.
    """
    parts = []
    deciles: dict[str, list[float]] = {"accuracy": [], "ft_accuracy": []}
    for run in group.used:
        frame = tables[run.path]
        if frame is None or "accuracy" not in frame:
            continue
        part = run.participating.reindex(columns=["client", "train", *deciles])
        kept = part[part["accuracy"].notna()].assign(seed=run.seed, flag=0)
        for bit, key in enumerate(deciles, 1):
            if len(kept) and kept[key].notna().all():
                low = worst(kept[key].to_numpy())
                kept["flag"] += bit * low
                deciles[key].append(float(kept.loc[low, key].mean()))
        parts.append(kept[["seed", "client", "train", *deciles, "flag"]])
    every = pd.concat(parts) if parts else pd.DataFrame()
    if every.empty:
        return None
    box = {}
    for key, lows in deciles.items():
        if len(lows) == len(parts):
            marks = every[key].quantile([0, 0.25, 0.5, 0.75, 1])
            box[key] = [_round(value) for value in (*marks, every[key].mean(), sum(lows) / len(lows))]
    shown = every.sort_values(["accuracy", "seed", "client"]).iloc[_spaced(len(every), DOTS)]
    dots = [
        [int(seed), int(client), _significant(train), _round(before), _round(after), int(flag)]
        for seed, client, train, before, after, flag in shown.itertuples(index=False)
    ]
    return {"count": len(every), "box": box, "dots": dots}


def _beside(fair: Fair) -> dict[str, Any] | None:
    """By baseline: the label, how many clients there are, percent of them harmed, and some clients.

    `dots`: seed, client, the baseline's and its own accuracy; evenly spaced by the baseline's where there are more than
    DOTS.
    """
    found = {}
    for name, pairs in fair.pairs.items():
        every = pd.concat([both.assign(seed=run.seed) for run, both in pairs.items()])
        shown = every.reset_index().sort_values(["baseline", "own"]).iloc[_spaced(len(every), DOTS)]
        dots = [
            [int(seed), int(client), _round(x), _round(y)]
            for seed, client, x, y in shown[["seed", "client", "baseline", "own"]].itertuples(index=False)
        ]
        share = _round(harm(every["own"] - every["baseline"]).harmed)
        found[BASELINES[name]] = {"name": fair.method, "count": len(every), "harmed": share, "dots": dots}
    return found or None


def _mask(group: Group, entries: pd.DataFrame, bins: int) -> dict[str, Any] | None:
    """Personalised entries by tensor and bin of rounds, mean over the bin and over seeds; `ends`: each bin's last."""
    if entries.empty:
        return None
    over = entries.groupby(level="round").mean()
    size = math.ceil(len(over) / bins)
    places = np.arange(len(over)) // size
    binned = over.groupby(places).mean()
    totals = {run.summary.get("parameters") for run in group.used}
    total = totals.pop() if len(totals) == 1 else None
    return {
        "layers": list(entries),
        "size": size,
        "ends": [_significant(value, 6) for value in over.index.to_series().groupby(places).max()],
        "entries": [[_significant(value) for value in binned[name]] for name in entries],
        "parameters": total if isinstance(total, int) else None,
    }


def _partitions(
    gathered: Sequence[Group], settings: list[str], tables: dict[Any, pd.DataFrame | None]
) -> tuple[list[dict[str, Any]], int]:
    """Label counts `[clients][classes]` of every distinct partition, and how many of them are left out."""
    found: dict[tuple[int, bytes], dict[str, Any]] = {}
    for group in gathered:
        setting = settings.index(group.setting)
        for run in group.runs:
            frame = tables[run.path]
            labels = pd.DataFrame() if frame is None else _labels(frame)
            if frame is None or labels.empty or labels.isna().any(axis=None):
                continue
            counts = labels.to_numpy().astype(int)
            new = {"setting": setting, "seeds": set(), "runs": 0, "classes": [*map(int, labels)], "counts": counts}
            entry = found.setdefault((setting, counts.tobytes()), new | {"clients": frame["client"].astype(int)})
            entry["seeds"].add(run.seed)
            entry["runs"] += 1
    order = sorted(found.values(), key=lambda entry: (entry["setting"], min(entry["seeds"])))
    own = [entry["setting"] for entry in order]
    # Every setting shows one before any shows its second.
    ranked = sorted(range(len(order)), key=lambda at: (own[:at].count(own[at]), own[at]))
    return [_thinned(order[at]) for at in ranked[:PARTITIONS]], max(0, len(order) - PARTITIONS)


def _thinned(entry: dict[str, Any]) -> dict[str, Any]:
    counts = entry["counts"]
    sizes = counts.sum(1)
    kept = _spaced(len(counts), max(1, CELLS // counts.shape[1]))
    return entry | {
        "seeds": sorted(entry["seeds"]),
        "clients": entry["clients"].iloc[kept].tolist(),
        "counts": counts[kept].tolist(),
        "all": len(counts),
        "samples": int(sizes.sum()),
        "sizes": [int(sizes.min()), _significant(float(np.median(sizes))), int(sizes.max())],
        "held": _significant(float((counts > 0).sum(1).mean()), 3),
    }


def _labels(frame: pd.DataFrame) -> pd.DataFrame:
    """How many samples of each class every client holds: the columns `label_<k>`, ascending."""
    return frame.filter(regex=r"^label_\d+$").rename(columns=lambda name: int(name[6:])).sort_index(axis=1)


def _spaced(count: int, most: int) -> np.ndarray:
    """At most `most` places of `count`, evenly spaced, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def _round(value: float) -> float | None:
    return _significant(round(float(value), 2), 17) if math.isfinite(value) else None


def _significant(value: float, digits: int = 4) -> float | None:
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value == int(value) else value
