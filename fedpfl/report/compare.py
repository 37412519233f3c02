"""Two configurations side by side: `python -m fedpfl.report compare A B`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.identity import result_config
from fedpfl.record.columns import COMMON_SCOPE, METRICS, column_names
from fedpfl.report.grouping import Group, differing_values, groups, require_classes
from fedpfl.report.load import runs
from fedpfl.report.records import Record
from fedpfl.report.run import Run
from fedpfl.report.table import (
    Cell,
    Column,
    Table,
    format_number,
    mean_and_std,
    seed_statistics,
)
from fedpfl.report.tables import (
    JudgedRows,
    attendance_notes,
    judged_rows,
    no_validation_error,
    selection_note,
)
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
_CAPTION = (
    "Values and bits: per client that took part and round; seconds: median over rounds. In "
    "brackets: sample standard deviation over seeds. ± error: standard error of the mean of B - A "
    "over the seeds that both have."
)
SETTING_COLUMNS = {
    "what": Column("key"),
    "a": Column("A"),
    "b": Column("B"),
    "note": Column(""),
}
NUMBER_COLUMNS = (
    *(Column(""), Column(""), Column("A", "short"), Column("B", "short")),
    *(Column("B - A", "change"), Column("paired", "change"), Column("± error", "short")),
    Column("p", "p"),
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
        rounded = [round(difference, 9) for difference in differences]
        differences = [change for change in rounded if change]
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
        select: as in `accuracy_table`.

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
    sides = {"a": a, "b": b}
    rows_by_side = {letter: judged_rows(group, select) for letter, group in sides.items()}
    for letter, group in sides.items():
        if select == "validation" and not rows_by_side[letter]:
            raise no_validation_error(group)

    # ---- Step 2: settings, numbers at the end, notes.
    notes = [*attendance_notes([a, b]), *selection_note(select), _describe_test(a, b, test)]
    if select == "validation":
        notes.append("Runs are rows_by_side at their best validation accuracy.")
    if a.setting != b.setting:
        notes.append(
            "A and B are different tasks (data, partition, attack, defence or shift): their "
            "difference is not a method's."
        )
    numbers = _compare_numbers(
        rows_by_side, "" if test == "none" else test, tuple(filter(None, notes))
    )
    return [_compare_settings(sides, rows_by_side), numbers]


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


def _compare_settings(sides: Mapping[str, Group], rows_by_side: Mapping[str, JudgedRows]) -> Table:
    """Make the table of seeds, folders and the settings that are not the same."""
    # ---- Step 1: the runs of both sides.
    records: list[Record] = []
    described = [_describe_side(sides[letter], rows_by_side[letter]) for letter in sides]
    for key, text in described[0].items():
        record = {"section": "run", "what": key, "note": "", "a": text, "b": described[1][key]}
        # Fingerprints of data are long, and matter where they differ.
        if key != "data" or record["a"] != record["b"]:
            records.append(record)

    # ---- Step 2: configuration and environment, keys that can change results first.
    run_a, run_b = (group.reported_runs[0] for group in sides.values())
    deciding = differing_values(result_config(run_a.config), result_config(run_b.config))
    settings = differing_values(run_a.config, run_b.config).items()
    for key, (a_text, b_text) in sorted(settings, key=lambda item: item[0] not in deciding):
        remark = "" if key in deciding else "cannot change results"
        record = {"section": "setting", "what": key, "note": remark, "a": a_text, "b": b_text}
        records.append(record)
    for key, (a_text, b_text) in differing_values(run_a.environment, run_b.environment).items():
        record = {"section": "environment", "what": key, "note": "", "a": a_text, "b": b_text}
        records.append(record)
    return Table.of(records, SETTING_COLUMNS, title="What differs", frame=pd.DataFrame(records))


def _describe_side(group: Group, rows: JudgedRows) -> dict[str, str]:
    """Return title, status, seeds, judged rounds, folder and data of a configuration."""
    seeds = [str(run.seed) for run in group.reported_runs]
    rounds = {int(row["round"]) for row in rows.values()}
    return {
        "configuration": group.title,
        "status": group.status,
        "seeds": ", ".join(seeds),
        "judged round": ", ".join(map(str, sorted(rounds))) or "none",
        "folder": str(_common_folder(group.runs)),
        "data": ", ".join(sorted({run.fingerprint for run in group.runs})),
    }


def _compare_numbers(
    rows_by_side: Mapping[str, JudgedRows], test: str, notes: tuple[str, ...]
) -> Table:
    """Make the table of all numbers at the end that a side has.

    Args:
        rows_by_side: the rows_by_side rows of `a` and `b`.
        test: as in `paired_test`, or empty.
        notes: lines below it.
    """
    # ---- Step 1: a record per metric.
    records = []
    rows = []
    for heading, names in FINAL.items():
        for name in names:
            values = {side: _values_by_seed(name, rows_by_side[side]) for side in rows_by_side}
            if not any(values.values()):
                continue
            record = _pair_numbers(name, values["a"], values["b"], test if heading != COST else "")
            records.append(record)

            # ---- Step 2: its row.
            metric = METRICS.get(name)
            title = name if metric is None else metric.phrase
            if metric and metric.fine_tuned and heading != "after fine-tuning":
                title += ", fine-tuned"
            kind, change_kind = "short", "change"
            if metric and metric.kind == "percent":
                kind, change_kind = "percent", "difference"
            # Equal seeds on both sides: the paired difference is that of the means.
            is_same = record["a_seeds"] == record["b_seeds"] or record["pairs"] < 2
            cells = [
                Cell(heading),
                Cell(title),
                Cell(record["a"], record["a_seed_std"], kind),
                Cell(record["b"], record["b_seed_std"], kind),
                Cell(record["difference"], kind=change_kind),
                Cell(math.nan if is_same else record["paired"], kind=change_kind),
                Cell(format_number(kind, record["paired_error"], 2)),
                Cell(record["p"]),
            ]
            rows.append(cells)
    records += [{"section": "note", "note": note} for note in notes]
    return Table("Numbers", NUMBER_COLUMNS, rows, pd.DataFrame(records), _CAPTION, notes, by=1)


def _values_by_seed(name: str, rows: JudgedRows) -> dict[int, float]:
    """Return a column's value of each seed, nothing if one lacks it."""
    values = {}
    for run, row in rows.items():
        judged_row = run.last_round if name == "train_loss" else row
        values[run.seed] = run.metric_value(name, judged_row)
    # As in tables, a mean that some seed lacks is no mean of the configuration.
    return {} if any(map(math.isnan, values.values())) else values


def _pair_numbers(name: str, a: dict[int, float], b: dict[int, float], test: str) -> Record:
    """Return means, differences and p value; nan if unknown."""
    record: Record = {"section": "final", "what": name}
    for side, values in (("a", a), ("b", b)):
        record |= seed_statistics(side, [*values.values()])
        record[f"{side}_seeds"] = " ".join(map(str, sorted(values)))
    differences = [b[seed] - a[seed] for seed in sorted(a.keys() & b.keys())]
    paired, std = mean_and_std(differences)
    return record | {
        # Of the means, over all seeds of each side; `paired` is over common seeds alone.
        "difference": record["b"] - record["a"],
        "pairs": len(differences),
        "paired": paired,
        # The standard error of the mean of n differences is their deviation over sqrt(n).
        "paired_error": std / math.sqrt(max(1, len(differences))),
        "p": paired_test(differences, test) if test else math.nan,
    }


def _describe_test(a: Group, b: Group, test: str) -> str:
    """Say over how many seeds numbers are tested, or why they are not."""
    if test == "none":
        return ""
    title = _TEST_TITLES[test]
    pair_count = len({run.seed for run in a.reported_runs} & {run.seed for run in b.reported_runs})
    if pair_count < MIN_PAIRS[test]:
        return (
            f"No test: {title} needs {MIN_PAIRS[test]} seeds that both have, and "
            f"there are {pair_count}."
        )
    return (
        f"p: {title} of the {pair_count} pairs of seeds, two-sided, not corrected "
        "for the number of rows."
    )


def _common_folder(runs: Sequence[Run]) -> Path:
    """Return the run's directory, or the deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.path for run in runs]))
