"""Claims about methods, judged by seeds: `python -m fedpfl.report claim "A > B" ...`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.records import Record
from fedpfl.record.columns import METRICS
from fedpfl.report.commands import find_words
from fedpfl.report.compare import paired_test
from fedpfl.report.fairness import have_same_split
from fedpfl.report.filters import apply_filters
from fedpfl.report.grouping import Group, common_task, group_by, groups, task_metric
from fedpfl.report.power import (
    LEVEL,
    MOST_SEEDS,
    POWER,
    count_needed_pairs,
    find_detectable_effect,
    hierarchical_interval,
    student_interval,
)
from fedpfl.report.ranking import correct_by_holm
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table
from fedpfl.report.text import join_few

SEED_COUNTS = (3, 5, 10, 20)
FEWEST_SEEDS = 3
_ASSUMPTIONS = (
    "Differences are paired by seed, which fixes data, split and cohorts. Test: paired t, "
    "two-sided, of the mean difference against --by; it takes differences for independent and "
    "normal. p: corrected for the number of rows (Holm). Needed seeds: for "
    f"{POWER:.0%} power at the difference and deviation seen here."
)
_POWER_CAPTION = (
    "Deviation: of the paired differences between two configurations over seeds, the median over "
    f"pairs. Points: the smallest mean difference that a paired t-test at {LEVEL:.0%} (two-sided) "
    f"finds with {POWER:.0%} power."
)
_COLUMNS = {
    "setting": Column("setting"),
    "claim": Column("claim"),
    "a": Column("first", "percent"),
    "b": Column("second", "percent"),
    "difference": Column("difference", "difference"),
    "interval": Column("95 % by seed"),
    "client_interval": Column("95 % by seed and client", spare=1),
    "seeds": Column("seeds", "whole"),
    "p": Column("p", "p"),
    "verdict": Column("verdict", "long"),
}


class Claim(NamedTuple):
    """A sentence such as `fedobp > fedper`: its sides are filters of runs."""

    text: str
    better: tuple[str, ...]
    worse: tuple[str, ...]


def parse_claim(text: str) -> Claim:
    """Parse `A > B`, with sides such as `fedobp` or `fedobp method.q=0.98`.

    Raises:
        FedpflError: it is no such sentence.
    """
    sides = [side.split() for side in text.split(">")]
    if len(sides) != 2 or not all(sides):
        raise FedpflError(f"claim {text!r} is not two methods with > between, as 'fedobp > fedper'")
    filters = [
        tuple(word if "=" in word else f"method={word}" for word in words) for words in sides
    ]
    return Claim(" > ".join(" ".join(words) for words in sides), *filters)


def judge_claims(
    runs: Sequence[Run], claims: Sequence[Claim], by: float = 0.0, metric: str = "accuracy"
) -> Table:
    """Judge claims in each data set and partition that has runs of both sides.

    Args:
        runs: the runs.
        claims: the claims, corrected together.
        by: how many points better the first side is claimed to be.
        metric: of rounds.csv at the last evaluation; `accuracy` means the score of the task.

    Raises:
        FedpflError: a side has no runs, several configurations, or never the other beside it.
    """
    # ---- Step 1: differences by seed of each claim in each setting.
    shown_groups = groups(runs)
    metric = task_metric(metric, common_task(runs))
    records: list[Record] = []
    for claim in claims:
        pairs = _pair_groups(shown_groups, claim)
        records += [
            {"setting": a.setting, "claim": claim.text} | _measure(a, b, metric) for a, b in pairs
        ]

    # ---- Step 2: all of them tested together.
    commands: list[str] = []
    p_values = [paired_test([d - by for d in record["differences"]], "t") for record in records]
    for record, p in zip(records, correct_by_holm(pd.Series(p_values)), strict=True):
        record["p"] = p
        missing, record["verdict"] = decide_claim(record["differences"], by, p, len(records))
        if missing:
            commands += [_command_for(group, missing) for group in record["groups"]]
    frame = pd.DataFrame(records).drop(columns=["differences", "groups"])
    return Table.of(
        records,
        _COLUMNS,
        frame=frame,
        caption=_ASSUMPTIONS,
        commands=tuple(dict.fromkeys(commands)),
    )


def _pair_groups(shown_groups: Sequence[Group], claim: Claim) -> list[tuple[Group, Group]]:
    """Pair the configurations of both sides in each setting that has both."""
    sides = []
    for filters in (claim.better, claim.worse):
        configs = [group.runs[0].config for group in shown_groups]
        titles = [{"method": group.runs[0].method_title} for group in shown_groups]
        passed = zip(shown_groups, apply_filters(configs, filters, titles), strict=True)
        by_setting = group_by((group for group, is_there in passed if is_there), _setting)
        for setting, members in by_setting.items():
            if len(members) > 1:
                names = join_few([group.method for group in members], "; ")
                raise FedpflError(
                    f"{' '.join(filters)} is {pluralize(len(members), 'configuration')} on "
                    f"{setting}: {names}; add a key, as 'fedobp method.q=0.98 > fedper'"
                )
        sides.append({setting: members[0] for setting, members in by_setting.items()})
    better, worse = sides
    common = [setting for setting in better if setting in worse]
    if not common:
        raise FedpflError(f"{claim.text}: no data set and partition has runs of both sides")
    return [(better[setting], worse[setting]) for setting in common]


def _setting(group: Group) -> str:
    return group.setting


def _measure(a: Group, b: Group, metric: str) -> Record:
    """Measure both sides over their common seeds; differences are positive where `a` is better."""
    runs_b = {run.seed: run for run in b.reported_runs}
    pairs = [(run, runs_b[run.seed]) for run in a.reported_runs if run.seed in runs_b]
    values = np.array(
        [[run.metric_value(metric, run.last_evaluation) for run in pair] for pair in pairs]
    ).reshape(-1, 2)
    is_measured = ~np.isnan(values).any(1)
    pairs = [pair for pair, measured in zip(pairs, is_measured, strict=True) if measured]
    values = values[is_measured]
    sign = -1.0 if metric in METRICS and METRICS[metric].best == "min" else 1.0
    differences = (sign * (values[:, 0] - values[:, 1])).tolist()
    clients = [_client_differences(*pair, metric) for pair in pairs]
    has_clients = bool(clients) and all(len(own) for own in clients)
    means = values.mean(0) if len(values) else (math.nan, math.nan)
    return {
        "a": float(means[0]),
        "b": float(means[1]),
        "difference": float(np.mean(differences)) if differences else math.nan,
        "interval": _interval_text(*student_interval(differences)),
        "client_interval": _interval_text(*hierarchical_interval(clients)) if has_clients else "",
        "seeds": len(differences),
        "deviation": float(np.std(differences, ddof=1)) if len(differences) > 1 else math.nan,
        "differences": differences,
        "groups": (a, b),
    }


def _client_differences(a: Run, b: Run, metric: str) -> np.ndarray:
    """Return clients' differences in points, empty where the runs do not tell them."""
    if metric not in ("accuracy", "ft_accuracy") or not have_same_split(a, b):
        return np.empty(0)
    sides = [run.participating_clients.set_index("client") for run in (a, b)]
    if not all(metric in clients for clients in sides):
        return np.empty(0)
    return (sides[0][metric] - sides[1][metric]).dropna().to_numpy(float)


def _interval_text(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}"


def decide_claim(differences: Sequence[float], by: float, p: float, rows: int) -> tuple[int, str]:
    """Judge a claim by differences over seeds: the missing seeds and the verdict."""
    count = len(differences)
    if count < FEWEST_SEEDS:
        missing = FEWEST_SEEDS - count
        return missing, f"needs {pluralize(missing, 'more seed')} to be tested"
    gain = float(np.mean(differences)) - by
    if gain <= 0:
        return 0, "not supported"
    if math.isnan(p):
        # Differences that are equal to the last digit leave no spread to judge by.
        return 1, "needs seeds that differ: all differences are the same"
    if p < LEVEL:
        return 0, "supported"
    deviation = float(np.std(differences, ddof=1))
    needed = count_needed_pairs(gain / deviation, LEVEL / rows)
    if needed is None:
        return 0, f"not supported: more than {MOST_SEEDS} seeds would be needed"
    missing = max(1, needed - count)
    return missing, f"needs {pluralize(missing, 'more seed')}"


def _command_for(group: Group, missing: int) -> str:
    """Write the command that runs a configuration with so many more seeds."""
    last_seed = max(run.seed for run in group.runs)
    seeds = ",".join(str(last_seed + number) for number in range(1, missing + 1))
    words = " ".join(find_words(group.runs[0].config))
    return f"python -m fedpfl.train -m {words} seed={seeds}"


def power_table(runs: Sequence[Run], metric: str = "accuracy") -> Table:
    """Make the table of the differences that seeds can tell, by setting.

    Args:
        runs: the runs.
        metric: as in `judge_claims`.

    Raises:
        FedpflError: no setting has two configurations with three common seeds.
    """
    metric = task_metric(metric, common_task(runs))
    records = []
    for setting, members in group_by(groups(runs), _setting).items():
        pairs = itertools.combinations(members, 2)
        measured = [_measure(a, b, metric) for a, b in pairs]
        deviations = [own["deviation"] for own in measured if own["seeds"] >= FEWEST_SEEDS]
        if not deviations:
            continue
        record = {"setting": setting, "pairs": len(deviations), "deviation": np.median(deviations)}
        for count in SEED_COUNTS:
            record[f"seeds_{count}"] = record["deviation"] * find_detectable_effect(count)
        records.append(record)
    if not records:
        raise FedpflError(
            "power needs two configurations of one data set and partition with the same three "
            "seeds or more; run both with seed=1,2,3"
        )
    columns = {
        "setting": Column("setting"),
        "pairs": Column("pairs", "whole"),
        "deviation": Column("deviation", "percent"),
    }
    for count in SEED_COUNTS:
        columns[f"seeds_{count}"] = Column(f"{count} seeds", "percent", "points that show with")
    return Table.of(records, columns, caption=_POWER_CAPTION)
