"""What the charts of a page are drawn from: numbers thinned and rounded, ready for JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report.load import Group, Run

POINTS = 200
"""Most points of a curve."""
DOTS = 200
"""Most clients of a method that are drawn one by one."""
PARTITIONS = 12
"""Most partitions of a page."""
CELLS = 20_000
"""Most cells of one partition's heat map."""
MASKS = 120_000
"""Most cells of all mask heat maps of a page together."""

EVALUATED = {
    "accuracy": "mean over clients",
    "accuracy_pooled": "pooled over samples",
    "accuracy_worst10": "worst decile of clients",
    "ft_accuracy": "fine-tuned, mean over clients",
    "ft_accuracy_pooled": "fine-tuned, pooled",
    "loss": "test loss",
}
EVERY_ROUND = {
    "cohort_before": "cohort before local training",
    "cohort_after": "cohort after local training",
    "train_loss": "training loss",
}
_MASK = "personal/"


def page_data(gathered: Sequence[Group], judged: Sequence[float], note: Callable[[str], None]) -> dict[str, Any]:
    """Everything the charts need, without a number that is not finite.

    judged: each group's accuracy in the table, in percent. note: called with a line about each run whose
    `clients.csv` cannot be read.
    """
    settings = list(dict.fromkeys((group.dataset, group.partition) for group in gathered))
    methods = _methods(gathered, judged)
    tables = {run.path: clients(run, note) for group in gathered for run in group.runs}
    columns = sum(len(_layers(group)) for group in gathered)
    bins = max(8, min(100, MASKS // max(1, columns)))
    longest = max(float(run.rounds["round"].max()) for group in gathered for run in group.used)
    size = max(1, math.ceil(longest / POINTS))
    records = []
    for group, accuracy in zip(gathered, judged, strict=True):
        record: dict[str, Any] = {
            "setting": settings.index((group.dataset, group.partition)),
            "method": methods.index(group.method),
            "status": group.status,
            "seeds": [run.seed for run in group.used],
            "accuracy": _percent(accuracy),
            "curves": _curves(group, size),
            "cost": _cost(group),
            "clients": _spread(group, tables, note),
            "mask": _mask(group, bins),
        }
        records.append({key: value for key, value in record.items() if value not in (None, {})})
    parted, left_out = _partitions(gathered, settings, tables)
    return {
        "settings": [", ".join(setting) for setting in settings],
        "methods": methods,
        "metrics": {
            key: label
            for key, label in (EVALUATED | EVERY_ROUND).items()
            if any(key in record.get("curves", {}) for record in records)
        },
        "groups": records,
        "partitions": parted,
        "partitions_left_out": left_out,
    }


def _methods(gathered: Sequence[Group], judged: Sequence[float]) -> list[str]:
    """The labels, the best of each setting first: colours repeat, and the best shall not share one."""
    places: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    order = sorted(range(len(gathered)), key=lambda place: -judged[place] if math.isfinite(judged[place]) else 1.0)
    for place in order:
        group = gathered[place]
        setting = (group.dataset, group.partition)
        counts[setting] = rank = counts.get(setting, -1) + 1
        places[group.method] = min(rank, places.get(group.method, rank))
    return sorted(places, key=places.__getitem__)


def clients(run: Run, note: Callable[[str], None]) -> pd.DataFrame | None:
    """`clients.csv` as numbers; None where there is none, told by `note` if the run was evaluated."""
    try:
        return run.clients
    except FedpflError as error:
        if len(run.evaluations):
            note(f"without clients: {error}")
        return None


def worst(values: np.ndarray) -> np.ndarray:
    """Which values, without nan, belong to the worst tenth, at least one; as `accuracy_worst10` counts."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(values, kind="stable")[: max(1, len(values) // 10)]] = True
    return chosen


def _curves(group: Group, size: int) -> dict[str, Any]:
    """By metric: rounds, mean over seeds, sample standard deviation over seeds or 0, rounds per point.

    size: rounds that make one point of a metric known in every round. Bins, since the noise of a cohort must not
    depend on which rounds are picked; the same for all groups, so that their points lie above each other.
    """
    columns = [*EVALUATED, *EVERY_ROUND]
    every = pd.concat([run.rounds.reindex(columns=["round", *columns]) for run in group.used])
    means = every.groupby("round", as_index=False)[columns].mean(skipna=False)
    spreads = every.groupby("round", as_index=False)[columns].std(skipna=False) if len(group.used) > 1 else means
    found = {}
    for key in columns:
        measured = means[key].notna()
        if not measured.any():
            continue
        over = pd.DataFrame({"round": means["round"], "mean": means[key], "std": spreads[key]})[measured]
        if key in EVALUATED:
            over = over.iloc[_spaced(len(over), POINTS)]
        elif size > 1:
            over = over.groupby((over["round"] - 1) // size).mean()
        show = _significant if key.endswith("loss") else _percent
        spread = [show(value) for value in over["std"]] if len(group.used) > 1 else 0
        rounds = [_significant(number, 6) for number in over["round"]]
        found[key] = [rounds, [show(value) for value in over["mean"]], spread, 1 if key in EVALUATED else size]
    return found


def _binned(frame: pd.DataFrame, size: int) -> pd.DataFrame:
    return frame.groupby(np.arange(len(frame)) // size).mean()


def _cost(group: Group) -> dict[str, Any]:
    """Rounds, and up to each: gigabytes down and up of the whole cohort and hours of training, mean over seeds."""
    parts = []
    for run in group.used:
        rounds = run.rounds
        part = pd.DataFrame({"round": rounds["round"]})
        for name, column, unit in (
            ("down", "bits_down", 8e9),
            ("up", "bits_up", 8e9),
            ("hours", "seconds", 3600),
        ):
            if column in rounds:
                part[name] = rounds[column].cumsum(skipna=False) / unit
        parts.append(part)
    over = pd.concat(parts).groupby("round", as_index=False).mean()
    over = over.iloc[_spaced(len(over), POINTS // 2)]
    return {name: [_significant(value, 6) for value in over[name]] for name in over}


def _spread(group: Group, tables: dict[Any, pd.DataFrame | None], note: Callable[[str], None]) -> dict[str, Any] | None:
    """Accuracy over the clients of all seeds.

    `box`: by metric least, quartile, median, quartile, greatest, mean, mean of the worst decile (over seeds).
    `dots`: seed, client, training samples, accuracy, fine-tuned accuracy, and 1 if in the worst decile, plus 2 if so
    when fine-tuned; evenly spaced by accuracy where there are more than DOTS.
    """
    parts, deciles = [], {"accuracy": [], "ft_accuracy": []}  # type: ignore[var-annotated]
    for run in group.used:
        frame = tables[run.path]
        if frame is None or "accuracy" not in frame:
            continue
        kept = frame[frame["accuracy"].notna()].assign(seed=run.seed, flag=0)
        if "test" in frame and (silent := int(((frame["test"] > 0) & frame["accuracy"].isna()).sum())):
            note(
                f"{run.path}: {silent} clients with test samples have no accuracy; they are not among the clients shown"
            )
        for bit, key in ((1, "accuracy"), (2, "ft_accuracy")):
            if key in kept and len(kept) and np.isfinite(kept[key]).all():
                low = worst(kept[key].to_numpy())
                kept["flag"] += bit * low
                deciles[key].append(float(kept.loc[low, key].mean()))
        parts.append(kept.reindex(columns=["seed", "client", "train", "accuracy", "ft_accuracy", "flag"]))
    if not parts:
        return None
    every = pd.concat(parts)
    if every.empty:
        return None
    box = {}
    for key, lows in deciles.items():
        if len(lows) == len(parts):
            marks = [float(every[key].quantile(share)) for share in (0, 0.25, 0.5, 0.75, 1)]
            box[key] = [_percent(value) for value in (*marks, every[key].mean(), sum(lows) / len(lows))]
    shown = every.sort_values(["accuracy", "seed", "client"])
    shown = shown.iloc[_spaced(len(shown), DOTS)]
    dots = [
        [int(seed), int(client), _significant(train), _percent(before), _percent(after), int(flag)]
        for seed, client, train, before, after, flag in shown.itertuples(index=False)
    ]
    return {"count": len(every), "box": box, "dots": dots}


def _layers(group: Group) -> list[str]:
    """The mask's tensors, in the network's order."""
    names = dict.fromkeys(name for run in group.used for name in run.rounds if name.startswith(_MASK))
    return [name.removeprefix(_MASK) for name in names]


def _mask(group: Group, bins: int) -> dict[str, Any] | None:
    """Personalised entries by tensor and bin of rounds, mean over the bin and over seeds; `ends`: each bin's last."""
    layers = _layers(group)
    if not layers:
        return None
    columns = ["round", *(_MASK + name for name in layers)]
    parts = [run.rounds.reindex(columns=columns) for run in group.used]
    over = pd.concat(parts).groupby("round", as_index=False).mean()
    size = math.ceil(len(over) / bins)
    ends = over["round"].groupby(np.arange(len(over)) // size).max()
    over = _binned(over, size)
    totals = {run.summary.get("parameters") for run in group.used}
    total = totals.pop() if len(totals) == 1 else None
    return {
        "layers": layers,
        "size": size,
        "ends": [_significant(value, 6) for value in ends],
        "entries": [[_significant(value) for value in over[_MASK + name]] for name in layers],
        "parameters": total if isinstance(total, int) else None,
    }


def _partitions(
    gathered: Sequence[Group], settings: list[tuple[str, str]], tables: dict[Any, pd.DataFrame | None]
) -> tuple[list[dict[str, Any]], int]:
    """Label counts `[clients][classes]` of every distinct partition, and how many of them are left out."""
    found: dict[tuple[int, bytes], dict[str, Any]] = {}
    for group in gathered:
        setting = settings.index((group.dataset, group.partition))
        for run in group.runs:
            frame = tables[run.path]
            if (
                frame is None
                or not (labels := _label_columns(frame))
                or frame[list(labels.values())].isna().any(axis=None)
            ):
                continue
            counts = frame[list(labels.values())].to_numpy().astype(int)
            entry = found.setdefault(
                (setting, counts.tobytes()),
                {
                    "setting": setting,
                    "seeds": set(),
                    "runs": 0,
                    "clients": frame["client"].to_numpy().astype(int),
                    "classes": list(labels),
                    "counts": counts,
                },
            )
            entry["seeds"].add(run.seed)
            entry["runs"] += 1
    order = sorted(found.values(), key=lambda entry: (entry["setting"], min(entry["seeds"])))
    # Every setting shows one before any shows its second.
    places: dict[int, int] = {}
    ranked = []
    for entry in order:
        place = places[entry["setting"]] = places.get(entry["setting"], -1) + 1
        ranked.append((place, entry["setting"], entry))
    chosen = [entry for _, _, entry in sorted(ranked, key=lambda item: item[:2])][:PARTITIONS]
    return [_plain(entry) for entry in chosen], len(order) - len(chosen)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    counts, clients = entry["counts"], entry["clients"]
    sizes = counts.sum(1)
    kept = _spaced(len(counts), max(1, CELLS // counts.shape[1]))
    return entry | {
        "seeds": sorted(entry["seeds"]),
        "clients": clients[kept].tolist(),
        "counts": counts[kept].tolist(),
        "all": len(counts),
        "samples": int(sizes.sum()),
        "sizes": [int(sizes.min()), _significant(float(np.median(sizes))), int(sizes.max())],
        "held": _significant(float((counts > 0).sum(1).mean()), 3),
    }


def _spaced(count: int, most: int) -> np.ndarray:
    """At most `most` places of `count`, evenly spaced, the first and the last among them."""
    return np.linspace(0, count - 1, min(count, most)).round().astype(int)


def _label_columns(frame: pd.DataFrame) -> dict[int, str]:
    """The columns `label_<k>` by class, ascending."""
    found = {int(match[1]): name for name in frame if (match := re.fullmatch(r"label_(\d+)", str(name)))}
    return dict(sorted(found.items()))


def _percent(value: float) -> float | None:
    return _whole(round(float(value), 2)) if math.isfinite(value) else None


def _significant(value: float, digits: int = 4) -> float | None:
    return _whole(float(f"{value:.{digits}g}")) if math.isfinite(value) else None


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
