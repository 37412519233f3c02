"""Two configurations side by side: `python -m fedpfl.report compare A B`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import result_config
from fedpfl.record.columns import COMMON_SCOPE, METRICS, column_names
from fedpfl.report.fairness import (
    HarmStatistics,
    count_changes,
    label_and_column,
    measure_harm,
    samples_by_client,
)
from fedpfl.report.grouping import Group, canonical_text, groups
from fedpfl.report.load import runs
from fedpfl.report.run import Run
from fedpfl.report.table import Cell, Column, Table, format_number, mean_and_std
from fedpfl.report.tables import attendance_notes, best_round, no_validation_error
from fedpfl.report.text import join_few

MIN_PAIRS = {"wilcoxon": 6, "t": 3}
"""Pairs from which a test is made: with five, Wilcoxon's smallest two-sided p is 2/2^5 = 0.06."""
_TOLD = {
    "wilcoxon": "Wilcoxon's signed-rank test",
    "t": "the paired t-test, which takes the differences as normal,",
}

_CLIENTS = (
    "B instead of A: harmed: clients, in percent, that lose accuracy; their loss: its mean over them, in points; worst "
    "10%: mean change, in points, of the tenth that gains least."
)


def _called(name: str) -> str:
    """`mean over clients, %`."""
    metric = METRICS[name]
    return f"{metric.phrase}, {metric.unit}" if metric.unit == "%" else metric.phrase


def _apart(about: str) -> dict[str, str]:
    """What is compared of those who are judged apart, before and after fine-tuning."""
    return {
        name: _called(name) + (", fine-tuned" if METRICS[name].fine_tuned else "")
        for name in column_names(about)
    }


COST = "Training and cost"
FINAL = {
    "Before fine-tuning, at the {}": {
        name: _called(name) for name in column_names("test", fine_tuned=False)
    },
    "After fine-tuning": {name: _called(name) for name in column_names("test", fine_tuned=True)},
    "On held-out samples": _apart("validation"),
    "On everybody's samples": {name: _called(name) for name in column_names(COMMON_SCOPE)},
    "Of clients that never take part": _apart("unseen"),
    COST: {name: _called(name) for name in ("train_loss", *column_names("traffic"), "seconds")}
    | {"hours": "hours"},
}
"""What is compared at the end: by table, what a number is called."""


@dataclass(frozen=True)
class PairedMetric:
    """One number of every seed of A and of B. tested: whether a p value means anything."""

    name: str
    words: str
    a: dict[int, float]
    b: dict[int, float]
    tested: bool = True

    @property
    def pairs(self) -> list[float]:
        """B - A for every seed that both have."""
        return [self.b[seed] - self.a[seed] for seed in sorted(self.a.keys() & self.b.keys())]

    def record(self, test: str = "") -> dict[str, Any]:
        """Return means, differences and p value; nan where there is none."""
        told: dict[str, Any] = {"what": self.name}
        for side, values in (("a", self.a), ("b", self.b)):
            told[side], told[f"{side}_seed_std"] = mean_and_std([*values.values()])
            told[f"{side}_seeds"] = " ".join(map(str, sorted(values)))
        paired, spread = mean_and_std(self.pairs)
        error = spread / math.sqrt(max(1, len(self.pairs)))
        p = paired_test(self.pairs, test) if test and self.tested else math.nan
        told |= {"difference": told["b"] - told["a"], "pairs": len(self.pairs), "paired": paired}
        return told | {"paired_error": error, "p": p}


def paired_test(pairs: Sequence[float], test: str) -> float:
    """Return the two-sided p value of differences, such as those of B and A by seed, if only chance
    made them.

    test: of LEAST. Differences of 0 say nothing to Wilcoxon's test and are left out there. nan with
    fewer than LEAST, and for `t` where all are the same, which leaves no spread to judge by.
    """
    if test == "wilcoxon":
        pairs = nonzero_changes(pairs)
    if len(pairs) < MIN_PAIRS[test]:
        return math.nan
    from scipy import stats  # slow to load

    if test == "wilcoxon":
        return float(stats.wilcoxon(pairs).pvalue)
    # Equal differences have a spread of rounding only.
    if mean_and_std(pairs)[1] <= 1e-12 * max(map(abs, pairs)):
        return math.nan
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)


def nonzero_changes(pairs: Iterable[float]) -> list[float]:
    """Return the differences that are more than rounding, which would make 0 of none and equal ones
    unequal.
    """
    return [change for pair in pairs if (change := round(pair, 9))]


def find_sides(
    paths: Sequence[Path], where: Sequence[str] = (), trials: bool = False
) -> tuple[Group, Group]:
    """Return the two configurations to compare: one below each of two paths, or the two below a
    single one.

    where: filters, such as `method=fedobp`. trials: as in `read_directories`. Raises FedpflError
    where there are fewer, or more.
    """
    if len(paths) > 2:
        raise FedpflError(
            f"compare takes two paths, or one that holds two configurations; these are {len(paths)}"
        )
    each = 1 if len(paths) == 2 else 2
    found = []
    for path in paths:
        below = groups(runs(path, where=where, trials=trials))
        if not below:
            raise FedpflError(
                f"no readable run below {path}; name a run directory or the folder of a configuration"
            )
        if len(below) < each:
            raise FedpflError(
                f"{path} holds one configuration alone, {below[0].title}; name two paths, or another one"
            )
        if len(below) > each:
            shown = [f"{group.title} ({_place(group.runs)})" for group in below]
            wanted = (
                "name one of them" if each == 1 else "name two of them, or choose two by filters"
            )
            raise FedpflError(
                f"{path} holds {len(below)} configurations, {wanted}: {join_few(shown, '; ')}"
            )
        found += below
    return found[0], found[1]


def compare_groups(
    a: Group, b: Group, test: str = "t", metric: str = "accuracy", select: str = "last"
) -> list[Table]:
    """Compare two configurations, by the runs that speak for each (see `Group.used`); the notes
    stand below the last.

    test: of the paired differences over seeds, of LEAST, or none. metric: of the curve, a column of
    rounds.csv. select: `last`, or `validation` for the final accuracies at each run's best
    validation accuracy. Raises FedpflError where it has none.
    """
    if {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise FedpflError(
            f"{_place(a.runs)} and {_place(b.runs)} hold the same runs; name two different ones"
        )
    test = "" if test == "none" else test
    a, b = relabel_sides(a, b)
    for group in (a, b) if select == "validation" else ():
        if any(_judged(run, select).empty for run in group.reported_runs):
            raise no_validation_error(group)
    clients, strange = _clients(a, b)
    which = "best validation accuracy" if select == "validation" else "last evaluation"
    final = {heading.format(which): _final(a, b, heading, select) for heading in FINAL}
    curve, over_rounds = _curve(a, b, metric), f"Over rounds: {METRICS[metric].label}"
    tables = [
        _runs(a, b),
        _different("setting", a.reported_runs, b.reported_runs, lambda run: run.config),
        _different("environment", a.reported_runs, b.reported_runs, lambda run: run.environment),
        *(
            _measured(a, b, heading, Column(""), measures, test, "final")
            for heading, measures in final.items()
        ),
        _measured(a, b, over_rounds, Column("round", "whole"), curve, "", "curve"),
        clients,
    ]
    *tables, last = [table for table in tables if table.rows]
    notes = (
        *_about_runs(a, b, select),
        *strange,
        *_about_seeds(a, b, test, [*chain(*final.values())]),
    )
    frame = pd.concat([last.frame, pd.DataFrame({"section": "note", "note": notes})])
    return [*tables, replace(last, notes=notes, frame=frame)]


def relabel_sides(a: Group, b: Group) -> tuple[Group, Group]:
    """Return both with labels that tell them apart; the same configuration run twice keeps its
    label.
    """
    both = groups([*a.runs, *b.runs])
    if len(both) < 2:
        return a, b
    of = {run: group for group in both for run in group.runs}
    return of[a.runs[0]], of[b.runs[0]]


def _runs(a: Group, b: Group) -> Table:
    rows, records = [], []
    for side, group in (("a", a), ("b", b)):
        seeds, place = [str(run.seed) for run in group.reported_runs], str(_place(group.runs))
        told = ", ".join(seeds) + ("" if group.status == "finished" else f"; {group.status}")
        rows.append(
            [*map(Cell, (side.upper(), group.method, group.dataset, group.partition, told, place))]
        )
        own = {side: place, f"{side}_seeds": " ".join(seeds)}
        records.append({"section": "run", "what": group.title, "note": group.status} | own)
    heads = [Column(name) for name in ("", "method", "data set", "partition", "seeds")]
    return Table("Runs", (*heads, Column("path", "long")), rows, pd.DataFrame(records))


def _different(
    section: str, a: Sequence[Run], b: Sequence[Run], values: Callable[[Run], Any]
) -> Table:
    """Show the keys whose values are not the same; where one side's runs differ among themselves,
    all its values.
    """
    sides = [[dict(flatten_keys(values(run))) for run in members] for members in (a, b)]
    essences = [dict(flatten_keys(result_config(members[0].config))) for members in (a, b)]
    found = []
    for key in dict.fromkeys(key for told in (*sides[0], *sides[1]) for key in told):
        own = [[told.get(key, "(not set)") for told in members] for members in sides]
        left, right = ({canonical_text(value): value for value in members} for members in own)
        if left.keys() == right.keys() or (section == "setting" and key == "seed"):
            continue
        idle = (
            section == "setting" and len({canonical_text(told.get(key)) for told in essences}) == 1
        )
        shown = [" / ".join(map(str, side.values())) for side in (left, right)]
        found.append((key, *shown, "cannot change results" if idle else ""))
    found.sort(key=lambda one: one[3])
    heads = (Column("key"), Column("A"), Column("B"), Column(""))
    frame = pd.DataFrame(
        [(section, *one) for one in found], columns=["section", "what", "a", "b", "note"]
    )
    name = "Configuration" if section == "setting" else "Environment"
    return Table(
        f"{name}: what differs", heads, [[Cell(text) for text in one] for one in found], frame
    )


def _final(a: Group, b: Group, heading: str, select: str) -> list[PairedMetric]:
    def by_seed(name: str, group: Group) -> dict[int, float]:
        rows = {
            run: run.last_round if name == "train_loss" else _judged(run, select)
            for run in group.reported_runs
        }
        values = {run.seed: run.metric_value(name, row) for run, row in rows.items()}
        # As in tables, a mean that some seed lacks is no mean of the configuration.
        return {} if any(map(math.isnan, values.values())) else values

    measures = [
        PairedMetric(name, words, by_seed(name, a), by_seed(name, b), heading != COST)
        for name, words in FINAL[heading].items()
    ]
    return [one for one in measures if one.a or one.b]


def _judged(run: Run, select: str) -> pd.Series:
    """The evaluation that speaks for a run, empty without any."""
    return best_round(run.evaluations) if select == "validation" else run.last_evaluation


def _curve(a: Group, b: Group, metric: str) -> list[PairedMetric]:
    """The metric at the first, quartile and last of the evaluations that every run has."""
    if any(metric not in run.rounds for run in (*a.reported_runs, *b.reported_runs)):
        return []
    left, right = (
        pd.DataFrame({run.seed: run.rounds.set_index("round")[metric] for run in own.reported_runs})
        for own in (a, b)
    )
    common = pd.concat([left, right], axis=1).dropna().sort_index().index
    places = {round(quarter * (len(common) - 1) / 4) for quarter in range(5)} if len(common) else ()
    chosen = [int(common[place]) for place in sorted(places)]
    return [
        PairedMetric(metric, str(place), left.loc[place].to_dict(), right.loc[place].to_dict())
        for place in chosen
    ]


def _measured(
    a: Group,
    b: Group,
    heading: str,
    first: Column,
    measures: Sequence[PairedMetric],
    test: str,
    section: str,
) -> Table:
    """A row per measure."""
    alike = {run.seed for run in a.reported_runs} == {
        run.seed for run in b.reported_runs
    }  # then the paired difference is that of means
    columns = [first, Column("A", "short"), Column("B", "short"), Column("B - A", "change")]
    columns += [Column("paired", "change"), Column("± error", "short"), Column("p", "p")]
    rows, records = [], []
    for one in measures:
        told = one.record(test)
        percent = one.name in METRICS and METRICS[one.name].kind == "percent"
        kind, change = ("percent", "difference") if percent else ("short", "change")
        paired = math.nan if alike or len(one.pairs) < 2 else told["paired"]
        cells = [Cell(one.words), *(Cell(told[x], told[f"{x}_seed_std"], kind) for x in "ab")]
        cells += [Cell(told["difference"], kind=change), Cell(paired, kind=change)]
        rows.append([*cells, Cell(format_number(kind, told["paired_error"], 2)), Cell(told["p"])])
        records.append(
            {"section": section} | told | ({"at": int(one.words)} if section == "curve" else {})
        )
    return Table(heading, tuple(columns), rows, pd.DataFrame(records))


def _clients(a: Group, b: Group) -> tuple[Table, list[str]]:
    """How many clients are better on each side, for pairs of runs with the same partition, and why
    others have none.
    """
    of_a, of_b = ({run.seed: run for run in group.reported_runs} for group in (a, b))
    pairs = [(str(seed), of_a[seed], of_b[seed]) for seed in sorted(of_a.keys() & of_b.keys())]
    if not pairs and len(of_a) == len(of_b) == 1:
        pairs = [
            (
                f"{a.reported_runs[0].seed} | {b.reported_runs[0].seed}",
                a.reported_runs[0],
                b.reported_runs[0],
            )
        ]
    words = {
        name: (told, name, name)
        for name, told in (("accuracy", "before"), ("ft_accuracy", "fine-tuned"))
    }
    columns = [label_and_column(group)[1] for group in (a, b)]
    if columns[0] != columns[1]:
        words["judged"] = "FedAvg alone fine-tuned", columns[0], columns[1]
    records: list[dict[str, Any]] = []
    others, strange, apart = list[str](), list[str](), False
    for seed, one, other in pairs:
        try:
            alike = samples_by_client(one.clients).equals(samples_by_client(other.clients))
        except FedpflError as error:
            strange.append(f"Clients of seed {seed} are not compared: {error}")
            continue
        if alike:
            found, notes = _changes(seed, one, other, words)
            records, strange = records + found, strange + notes
            apart = apart or any(
                len(run.participating_clients) < len(run.clients) for run in (one, other)
            )
        else:
            others.append(seed)
    if others:
        strange.append(
            f"Clients of seed {', '.join(others)} are not compared: their label counts differ, so the partitions do."
        )
    if apart:
        strange.append("Clients that never take part in A or in B are not compared.")
    frame = pd.DataFrame(records).assign(section="clients")
    rows = [
        [
            Cell(one["at"]),
            Cell(words[one["what"]][0]),
            *(Cell(one[key]) for key in ("a", "equal", "b", *HarmStatistics._fields)),
        ]
        for one in records
    ]
    for name, own in frame.groupby("what", sort=False) if records else ():
        if len(own) > 1:
            spread = {
                key: Cell(*mean_and_std([*own[key].dropna()])) for key in HarmStatistics._fields
            }
            sums = own[["a", "equal", "b"]].sum()
            rows.append(
                [Cell("all"), Cell(words[str(name)][0]), *map(Cell, sums), *spread.values()]
            )
    heads = [
        Column("seed"),
        Column(""),
        *(Column(name, "whole") for name in ("in A", "equal", "in B")),
    ]
    heads += [
        Column(name, "percent", "B instead of A")
        for name in ("harmed %", "their loss", "worst 10%")
    ]
    return Table(
        "Clients that are better, by their own accuracy", tuple(heads), rows, frame, _CLIENTS
    ), strange


def _changes(
    seed: str, one: Run, other: Run, words: Mapping[str, tuple[str, str, str]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What becomes of the clients of a run that take part in both, by key of `words`; and who lacks
    an accuracy.
    """
    left, right = one.clients, other.clients
    took_part = left.index.isin(one.participating_clients.index) & right.index.isin(
        other.participating_clients.index
    )
    records, notes = list[dict[str, Any]](), list[str]()
    for what, (_, of_left, of_right) in words.items():
        if of_left not in left or of_right not in right:
            continue
        gained = (right[of_right] - left[of_left])[took_part]
        record = {"at": seed, "what": what} | dict(
            zip(("a", "equal", "b"), count_changes(gained), strict=True)
        )
        records.append(record | measure_harm(gained.dropna())._asdict())
        if "test" in left and (
            silent := int(((left["test"] > 0)[took_part] & gained.isna()).sum())
        ):
            lacks = " or ".join(dict.fromkeys((of_left, of_right)))
            notes.append(
                f"Seed {seed}: {silent} clients with test samples lack {lacks} in A or in B; they do not count."
            )
    return records, notes


def _about_runs(a: Group, b: Group, select: str) -> list[str]:
    """What a reader must know of the runs."""
    told, reached = list[str](), list[list[int]]()
    if select == "validation":
        told.append(
            "Each run is judged at its first evaluation of the best validation accuracy, clients at the last."
        )
    for letter, group in (("A", a), ("B", b)):
        told += (
            [f"{letter} is not simply finished: {group.status}."]
            if group.status != "finished"
            else []
        )
        told += [f"{letter}: {note}" for note in attendance_notes([group])]
        rounds = {
            int(row["round"]) for run in group.reported_runs if len(row := _judged(run, select))
        }
        reached.append(sorted(rounds))
    if reached[0] != reached[1] or max(map(len, reached)) > 1:
        words = [", ".join(map(str, own)) or "none" for own in reached]
        told.append(f"The final numbers are of different rounds: A of {words[0]}, B of {words[1]}.")
    if (a.dataset, a.partition) != (b.dataset, b.partition):
        told.append(
            "A and B are different tasks (data set or partition): their difference is not a method's."
        )
    prints = [{run.fingerprint for run in group.runs} - {""} for group in (a, b)]
    if all(prints) and prints[0] != prints[1]:
        told.append("A and B did not read the same data: their fingerprints differ.")
    return told


def _about_seeds(a: Group, b: Group, test: str, final: Iterable[PairedMetric]) -> list[str]:
    of_a, of_b = ({run.seed for run in group.reported_runs} for group in (a, b))
    both = len(of_a & of_b)
    told = ["Values and bits: per client that took part and round; seconds: median over rounds."]
    if max(len(of_a), len(of_b)) > 1:
        told[0] += " In brackets: sample standard deviation over seeds."
    if both > 1:
        told[0] += " ± error: standard error of the mean of B - A over the seeds that both have."
    for letter, only in (("A", of_a - of_b), ("B", of_b - of_a)):
        told += [f"Only in {letter}: seeds {', '.join(map(str, sorted(only)))}."] if only else []
    if both == 0:
        told.append("No seed is in both, so nothing can be paired, and no test is made.")
    elif both == 1:
        told.append(
            "One seed is in both: one pair has no standard error, and says nothing of how another would end."
        )
    elif test and both < MIN_PAIRS[test]:
        why = f"from {MIN_PAIRS[test]} pairs on one is made"
        if test == "wilcoxon":
            why = f"with {both} its p cannot fall below {2 / 2**both:.3g}, from {MIN_PAIRS[test]} on it can fall below 0.05"
        told.append(f"{both} pairs of seeds are too few for {_TOLD[test].rstrip(',')}: {why}.")
    elif test:
        told.append(
            f"p: {_TOLD[test]} of the {both} pairs of seeds, two-sided, not corrected for the number of rows."
        )
        if test == "wilcoxon" and any(
            one.tested and len(nonzero_changes(one.pairs)) < MIN_PAIRS[test] for one in final
        ):
            told.append("Where fewer than 6 pairs differ at all, there is no p.")
    return told


def _place(members: Sequence[Run]) -> Path:
    """The run's directory, or the deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.path for run in members]))
