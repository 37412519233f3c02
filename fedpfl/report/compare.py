"""Two configurations side by side: `python -m fedpfl.report compare A B`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.identity import result_config
from fedpfl.record.columns import COMMON_SCOPE, METRICS, column_names, validation_column
from fedpfl.report.fairness import (
    HarmStatistics,
    count_changes,
    label_and_column,
    measure_harm,
    samples_by_client,
)
from fedpfl.report.grouping import Group, canonical_text, groups, require_classes
from fedpfl.report.load import runs
from fedpfl.report.run import Run
from fedpfl.report.table import Cell, Column, Table, format_number, mean_and_std
from fedpfl.report.tables import attendance_notes, best_round, no_validation_error
from fedpfl.report.text import join_few

MIN_PAIRS = {"wilcoxon": 6, "t": 3}
"""Fewest pairs for a test: with five, Wilcoxon's smallest two-sided p is 2/2^5 = 0.06."""
_TEST_TITLES = {"wilcoxon": "Wilcoxon's signed-rank test", "t": "the paired t-test"}
COST = "training and cost"
FINAL = {
    "before fine-tuning": column_names("test", fine_tuned=False),
    "after fine-tuning": column_names("test", fine_tuned=True),
    "held-out samples": column_names("validation"),
    "everybody's samples": column_names(COMMON_SCOPE),
    "clients that never take part": column_names("unseen"),
    COST: ("train_loss", *column_names("traffic"), "seconds", "hours"),
}
"""The columns that are compared, by the heading of their block."""
CLIENT_COLUMNS = {"accuracy": "before", "ft_accuracy": "fine-tuned"}
_CAPTION = (
    "Values and bits: per client that took part and round; seconds: median over rounds. In "
    "brackets: sample standard deviation over seeds. ± error: standard error of the mean of B - A "
    "over the seeds that both have."
)
_CLIENTS_CAPTION = (
    "B instead of A: harmed: clients, in percent, that lose accuracy; their loss: its mean over "
    "them, in points; worst 10%: mean change, in points, of the tenth that gains least."
)


def paired_test(differences: Sequence[float], test: str) -> float:
    """Return the two-sided p value of paired differences, if only chance made them.

    Args:
        differences: such as those of B and A by seed. Differences of 0 say nothing to Wilcoxon's
            test and are left out there.
        test: of MIN_PAIRS.

    Returns:
        nan with fewer than MIN_PAIRS, and for `t` where all are the same, which leaves no spread to
        judge by.
    """
    if test == "wilcoxon":
        # Wilcoxon's test ranks changes; zeros and rounding have no rank.
        differences = nonzero_changes(differences)
    if len(differences) < MIN_PAIRS[test]:
        return math.nan
    if test == "wilcoxon":
        from scipy import stats  # slow to load

        return float(stats.wilcoxon(differences).pvalue)
    from scipy import special  # which loads faster than what has a t-test

    # Equal differences have a spread of rounding only.
    mean, std = mean_and_std(differences)
    if std <= 1e-12 * max(map(abs, differences)):
        return math.nan
    t = mean / (std / math.sqrt(len(differences)))
    return 2 * float(special.stdtr(len(differences) - 1, -abs(t)))


def nonzero_changes(differences: Iterable[float]) -> list[float]:
    """Return the differences without rounding errors, but for those that are 0."""
    rounded = [round(difference, 9) for difference in differences]
    return [change for change in rounded if change]


def find_sides(
    paths: Sequence[Path], where: Sequence[str] = (), trials: bool = False
) -> tuple[Group, Group]:
    """Return the two configurations to compare: one below each of two paths, or two below one.

    Args:
        paths: one or two folders.
        where: filters, such as `method=fedobp`.
        trials: as in `read_directories`.

    Raises:
        FedpflError: there are fewer, or more.
    """
    expected_count = 1 if len(paths) == 2 else 2
    sides = []
    for path in paths:
        configurations = groups(runs(path, where=where, trials=trials))
        if len(configurations) != expected_count:
            titles = [f"{group.title} ({_common_folder(group.runs)})" for group in configurations]
            raise FedpflError(
                f"{path} holds {pluralize(len(titles), 'configuration')} in readable runs where "
                f"compare takes {expected_count}; name run directories, or choose by filters"
                f"{': ' if titles else ''}{join_few(titles, '; ')}"
            )
        sides += configurations
    if len(sides) != 2:
        raise FedpflError("compare takes two paths, or one that holds two configurations")
    return sides[0], sides[1]


def compare_groups(a: Group, b: Group, test: str = "t", select: str = "last") -> list[Table]:
    """Compare two configurations by their reported runs; the notes stand below the last table.

    Args:
        a: the first configuration.
        b: the second configuration.
        test: of the paired differences over seeds, of MIN_PAIRS, or none.
        select: `last`, or `validation` for the final accuracies at each run's best validation
            accuracy.

    Raises:
        FedpflError: both hold the same runs, or a run has no validation accuracy to select by.
    """
    # ---- Step 1: whether they can be compared.
    require_classes([a, b], "report compare")
    if {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise FedpflError(
            f"{_common_folder(a.runs)} and {_common_folder(b.runs)} hold the same runs; "
            "name two different ones"
        )
    a, b = relabel_sides(a, b)
    if select == "validation":
        for group in (a, b):
            if any(_judged_row(run, select).empty for run in group.reported_runs):
                raise no_validation_error(group)

    # ---- Step 2: settings, numbers at the end, clients, notes.
    numbers = _compare_numbers(a, b, "" if test == "none" else test, select)
    clients, client_notes = _compare_clients(a, b)
    notes = (*_run_notes(a, b, select), *client_notes, *_seed_notes(a, b, test))
    tables = [_compare_settings(a, b), numbers, clients]
    frame = pd.concat([clients.frame, pd.DataFrame({"section": "note", "note": notes})])
    last = Table(clients.title, clients.columns, clients.rows, frame, clients.caption, notes)
    return [*tables[:-1], last]


def relabel_sides(a: Group, b: Group) -> tuple[Group, Group]:
    """Return both with labels that tell them apart.

    The same configuration run twice keeps its label.
    """
    # Labels name what tells configurations apart, so both are labelled together.
    both = groups([*a.runs, *b.runs])
    if len(both) < 2:
        return a, b
    group_of_run = {run: group for group in both for run in group.runs}
    return group_of_run[a.runs[0]], group_of_run[b.runs[0]]


def _compare_settings(a: Group, b: Group) -> Table:
    """Make the table of seeds, folders and the settings that are not the same."""
    # ---- Step 1: the runs of both sides.
    records = []
    seeds = []
    for side, group in (("a", a), ("b", b)):
        seeds.append([str(run.seed) for run in group.reported_runs])
        folder = str(_common_folder(group.runs))
        record = {"section": "run", "what": group.title, "note": group.status, side: folder}
        records.append(record | {f"{side}_seeds": " ".join(seeds[-1])})
    rows = [
        ["configuration", a.title, b.title, ""],
        ["seeds", *map(", ".join, seeds), ""],
        ["folder", records[0]["a"], records[1]["b"], ""],
    ]

    # ---- Step 2: configuration and environment, keys that can change results first.
    left = a.reported_runs
    right = b.reported_runs
    result_configs = [dict(flatten_keys(result_config(side[0].config))) for side in (left, right)]
    for key, a_text, b_text in _differing_values(
        [r.config for r in left], [r.config for r in right]
    ):
        result_texts = {canonical_text(config.get(key)) for config in result_configs}
        remark = "cannot change results" if len(result_texts) == 1 else ""
        records.append(
            {"section": "setting", "what": key, "note": remark, "a": a_text, "b": b_text}
        )
    # A stable sort: sections stay together.
    records.sort(key=lambda record: record["section"] == "setting" and record["note"] != "")
    for key, a_text, b_text in _differing_values(
        [run.environment for run in left], [run.environment for run in right]
    ):
        records.append(
            {"section": "environment", "what": key, "note": "", "a": a_text, "b": b_text}
        )
    rows += [[one["what"], one["a"], one["b"], one["note"]] for one in records[2:]]
    cells = [[Cell(text) for text in row] for row in rows]
    columns = (Column("key"), Column("A"), Column("B"), Column(""))
    return Table("What differs", columns, cells, pd.DataFrame(records))


def _differing_values(left: Sequence[Any], right: Sequence[Any]) -> Iterable[tuple[str, str, str]]:
    """Yield each dotted key but the seed that differs, with the values of both sides."""
    sides = [[dict(flatten_keys(values)) for values in side] for side in (left, right)]
    for key in dict.fromkeys(key for side in sides for values in side for key in values):
        by_text = []
        for side in sides:
            values = [one.get(key, "(not set)") for one in side]
            by_text.append({canonical_text(value): value for value in values})
        if key != "seed" and by_text[0].keys() != by_text[1].keys():
            a_text, b_text = (" / ".join(map(str, one.values())) for one in by_text)
            yield key, a_text, b_text


def _compare_numbers(a: Group, b: Group, test: str, select: str) -> Table:
    """Make the table of all numbers at the end that a side has."""
    # ---- Step 1: a row and a record per metric.
    rows = []
    records = []
    for heading, names in FINAL.items():
        for name in names:
            a_values = _values_by_seed(name, a, select)
            b_values = _values_by_seed(name, b, select)
            if not a_values and not b_values:
                continue
            record = _pair_numbers(name, a_values, b_values, test if heading != COST else "")
            records.append(record)
            metric = METRICS.get(name)
            is_percent = metric is not None and metric.kind == "percent"
            kind = "percent" if is_percent else "short"
            change_kind = "difference" if is_percent else "change"
            title = name if metric is None else metric.phrase
            if metric and metric.fine_tuned and heading != "after fine-tuning":
                title += ", fine-tuned"
            # Equal seeds on both sides: the paired difference is that of the means.
            is_same = record["a_seeds"] == record["b_seeds"] or record["pairs"] < 2
            rows.append(
                [
                    Cell(heading),
                    Cell(title),
                    Cell(record["a"], record["a_seed_std"], kind),
                    Cell(record["b"], record["b_seed_std"], kind),
                    Cell(record["difference"], kind=change_kind),
                    Cell(math.nan if is_same else record["paired"], kind=change_kind),
                    Cell(format_number(kind, record["paired_error"], 2)),
                    Cell(record["p"]),
                ]
            )

    # ---- Step 2: the table.
    columns = (
        Column(""),
        Column(""),
        Column("A", "short"),
        Column("B", "short"),
        Column("B - A", "change"),
        Column("paired", "change"),
        Column("± error", "short"),
        Column("p", "p"),
    )
    return Table("Numbers", columns, rows, pd.DataFrame(records), _CAPTION, by=1)


def _values_by_seed(name: str, group: Group, select: str) -> dict[int, float]:
    """Return a column's value of each seed, nothing if one lacks it."""
    values = {}
    for run in group.reported_runs:
        row = run.last_round if name == "train_loss" else _judged_row(run, select)
        values[run.seed] = run.metric_value(name, row)
    # As in tables, a mean that some seed lacks is no mean of the configuration.
    return {} if any(map(math.isnan, values.values())) else values


def _pair_numbers(name: str, a: dict[int, float], b: dict[int, float], test: str) -> dict[str, Any]:
    """Return means, differences and p value; nan if unknown."""
    record: dict[str, Any] = {"section": "final", "what": name}
    for side, values in (("a", a), ("b", b)):
        record[side], record[f"{side}_seed_std"] = mean_and_std([*values.values()])
        record[f"{side}_seeds"] = " ".join(map(str, sorted(values)))
    differences = [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]
    mean_difference, std = mean_and_std(differences)
    # Of the means, over all seeds of each side; `paired` is over common seeds alone.
    record["difference"] = record["b"] - record["a"]
    record["pairs"] = len(differences)
    record["paired"] = mean_difference
    # The standard error of the mean of n differences is their deviation over sqrt(n).
    record["paired_error"] = std / math.sqrt(max(1, len(differences)))
    record["p"] = paired_test(differences, test) if test else math.nan
    return record


def _judged_row(run: Run, select: str) -> pd.Series:
    """Return the evaluation that a run is judged by, empty without any."""
    if select == "validation":
        return best_round(run.evaluations, validation_column(run.task))
    return run.last_evaluation


def _compare_clients(a: Group, b: Group) -> tuple[Table, list[str]]:
    """Count the clients that are better on each side, for equal partitions.

    Returns:
        The table, and the seeds that are not in it.
    """
    # ---- Step 1: the columns; FedAvg alone is also compared after fine-tuning.
    pairs = {name: (name, name) for name in CLIENT_COLUMNS}
    judged = label_and_column(a)[1], label_and_column(b)[1]
    titles = CLIENT_COLUMNS | {"judged": "FedAvg alone fine-tuned"}
    if judged[0] != judged[1]:
        pairs["judged"] = judged

    # ---- Step 2: a record per seed and column.
    records: list[dict[str, Any]] = []
    notes = []
    runs_b = {run.seed: run for run in b.reported_runs}
    common_runs = [(run, runs_b[run.seed]) for run in a.reported_runs if run.seed in runs_b]
    for run_a, run_b in common_runs:
        try:
            samples = [samples_by_client(run.clients) for run in (run_a, run_b)]
        except FedpflError as error:
            notes.append(f"Clients of seed {run_a.seed} are not compared: {error}")
            continue
        if not samples[0].equals(samples[1]):
            notes.append(f"Clients of seed {run_a.seed} are not compared: the partitions differ.")
            continue
        # An attacker in one run may be honest in the other.
        clients_a = run_a.participating_clients.set_index("client")
        clients_b = run_b.participating_clients.set_index("client")
        for name, (column_a, column_b) in pairs.items():
            if column_a in clients_a and column_b in clients_b:
                changes = (clients_b[column_b] - clients_a[column_a]).dropna()
                counts = zip(("a", "equal", "b"), count_changes(changes), strict=True)
                record = {"at": str(run_a.seed), "what": name} | dict(counts)
                records.append(record | measure_harm(changes)._asdict())

    # ---- Step 3: the table.
    keys = ("a", "equal", "b", *HarmStatistics._fields)
    rows = [
        [Cell(record["at"]), Cell(titles[record["what"]]), *(Cell(record[key]) for key in keys)]
        for record in records
    ]
    columns = (
        *(Column("seed"), Column("")),
        *(Column(heading, "whole") for heading in ("in A", "equal", "in B")),
        *(
            Column(heading, "percent", "B instead of A")
            for heading in ("harmed %", "their loss", "worst 10%")
        ),
    )
    frame = pd.DataFrame(records).assign(section="clients")
    return Table("Clients that are better", columns, rows, frame, _CLIENTS_CAPTION), notes


def _run_notes(a: Group, b: Group, select: str) -> list[str]:
    """List differences of the runs beside their settings."""
    # ---- Step 1: status, attendance and rounds of each side.
    notes = []
    judged_rounds = []
    for letter, group in (("A", a), ("B", b)):
        if group.status != "finished":
            notes.append(f"{letter} is not simply finished: {group.status}.")
        notes += [f"{letter}: {note}" for note in attendance_notes([group])]
        rows = [_judged_row(run, select) for run in group.reported_runs]
        judged_rounds.append(sorted({int(row["round"]) for row in rows if len(row)}))
    if select == "validation":
        notes.append("Runs are judged at their best validation accuracy, clients at the last.")
    if judged_rounds[0] != judged_rounds[1] or max(map(len, judged_rounds)) > 1:
        rounds_a, rounds_b = (", ".join(map(str, rounds)) or "none" for rounds in judged_rounds)
        notes.append(
            f"The final numbers are of different rounds: A of {rounds_a}, B of {rounds_b}."
        )

    # ---- Step 2: tasks and data.
    if a.setting != b.setting:
        notes.append(
            "A and B are different tasks (data, partition, attack, defence or shift): their "
            "difference is not a method's."
        )
    fingerprints = [{run.fingerprint for run in group.runs} - {""} for group in (a, b)]
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        notes.append("A and B did not read the same data: their fingerprints differ.")
    return notes


def _seed_notes(a: Group, b: Group, test: str) -> list[str]:
    """Say over which seeds numbers are, and whether they are tested."""
    seeds_a = {run.seed for run in a.reported_runs}
    seeds_b = {run.seed for run in b.reported_runs}
    notes = []
    for letter, only_there in (("A", seeds_a - seeds_b), ("B", seeds_b - seeds_a)):
        if only_there:
            notes.append(f"Only in {letter}: seeds {', '.join(map(str, sorted(only_there)))}.")
    pair_count = len(seeds_a & seeds_b)
    if test == "none":
        return notes
    if pair_count < MIN_PAIRS[test]:
        notes.append(
            f"No test: {_TEST_TITLES[test]} needs {MIN_PAIRS[test]} seeds that both have, and "
            f"there are {pair_count}."
        )
    else:
        notes.append(
            f"p: {_TEST_TITLES[test]} of the {pair_count} pairs of seeds, two-sided, not corrected "
            "for the number of rows."
        )
    return notes


def _common_folder(runs: Sequence[Run]) -> Path:
    """Return the run's directory, or the deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.path for run in runs]))
