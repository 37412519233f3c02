"""Two configurations side by side: `python -m fedpfl.report compare A B`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.identity import result_config
from fedpfl.ground.records import Record
from fedpfl.record.columns import COMMON_SCOPE, METRICS, column_names
from fedpfl.report.grouping import Group, differing_values, groups, require_classes
from fedpfl.report.load import runs
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
_SIDE_FACTS = ("configuration", "status", "seeds", "judged round", "folder", "data")
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


def compare_groups(a: Group, b: Group, select: str = "last") -> list[Table]:
    """Compare two configurations by their reported runs; the notes stand below the last table.

    Args:
        a: the first configuration.
        b: the second configuration.
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
    sides = _relabel_sides(a, b)
    rows_of_sides = [judged_rows(group, select) for group in sides]
    for group, rows in zip(sides, rows_of_sides, strict=True):
        if select == "validation" and not rows:
            raise no_validation_error(group)

    # ---- Step 2: settings, numbers at the end, notes.
    notes = [*attendance_notes(sides), *selection_note(select), _describe_test(rows_of_sides)]
    if select == "validation":
        notes.append("Runs are judged at their best validation accuracy.")
    if sides[0].setting != sides[1].setting:
        notes.append(
            "A and B are different tasks (data, partition, attack, defence or shift): their "
            "difference is not a method's."
        )
    return [_compare_settings(sides, rows_of_sides), _compare_numbers(rows_of_sides, tuple(notes))]


def _relabel_sides(a: Group, b: Group) -> tuple[Group, Group]:
    """Return both with labels that tell them apart.

    The same configuration run twice keeps its label.
    """
    # Labels name what tells configurations apart, so both are labelled together.
    by_run = {run: group for group in groups([*a.runs, *b.runs]) for run in group.runs}
    together = by_run[a.runs[0]], by_run[b.runs[0]]
    return (a, b) if together[0] is together[1] else together


def _compare_settings(sides: Sequence[Group], rows_of_sides: Sequence[JudgedRows]) -> Table:
    """Make the table of seeds, folders and the settings that are not the same."""
    # ---- Step 1: the runs of both sides.
    texts_a, texts_b = map(_describe_side, sides, rows_of_sides)
    facts: list[tuple[str, ...]] = [
        ("run", *fact) for fact in zip(_SIDE_FACTS, texts_a, texts_b, strict=True)
    ]
    # Fingerprints of data are long, and matter where they differ.
    if facts[-1][2] == facts[-1][3]:
        facts.pop()

    # ---- Step 2: configuration and environment, keys that can change results first.
    run_a, run_b = (group.reported_runs[0] for group in sides)
    deciding = differing_values(result_config(run_a.config), result_config(run_b.config))
    settings = differing_values(run_a.config, run_b.config)
    for key in sorted(settings, key=lambda key: key not in deciding):
        facts.append(("setting", key, *settings[key]))
    for key, texts in differing_values(run_a.environment, run_b.environment).items():
        facts.append(("environment", key, *texts))
    frame = pd.DataFrame(facts, columns=["section", "what", "a", "b"])
    is_idle = (frame["section"] == "setting") & ~frame["what"].isin([*deciding])
    frame.insert(2, "note", is_idle.map({True: "cannot change results", False: ""}))
    return Table.of(frame.to_dict("records"), SETTING_COLUMNS, title="What differs", frame=frame)


def _describe_side(group: Group, rows: JudgedRows) -> tuple[str, ...]:
    """Return the values of _SIDE_FACTS."""
    rounds = {int(row["round"]) for row in rows.values()}
    return (
        group.title,
        group.status,
        ", ".join(str(run.seed) for run in group.reported_runs),
        ", ".join(map(str, sorted(rounds))) or "none",
        str(_common_folder(group.runs)),
        ", ".join(sorted({run.fingerprint for run in group.runs})),
    )


def _compare_numbers(rows_of_sides: Sequence[JudgedRows], notes: tuple[str, ...]) -> Table:
    """Make the table of all numbers at the end that a side has.

    Args:
        rows_of_sides: the judged rows of A and of B.
        notes: lines below it.
    """
    records = []
    rows = []
    for heading, name in ((heading, name) for heading, names in FINAL.items() for name in names):
        a, b = (_values_by_seed(name, judged) for judged in rows_of_sides)
        if not a and not b:
            continue
        record = _pair_numbers(name, a, b, is_tested=heading != COST)
        records.append(record)
        metric = METRICS.get(name)
        title = metric.phrase if metric else name
        if metric and metric.fine_tuned and heading != "after fine-tuning":
            title += ", fine-tuned"
        is_percent = metric is not None and metric.kind == "percent"
        kind, change_kind = ("percent", "difference") if is_percent else ("short", "change")
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


def _pair_numbers(name: str, a: dict[int, float], b: dict[int, float], is_tested: bool) -> Record:
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
        "p": paired_test(differences, "t") if is_tested else math.nan,
    }


def _describe_test(rows_of_sides: Sequence[JudgedRows]) -> str:
    """Say over how many seeds numbers are tested, or why they are not."""
    seeds_a, seeds_b = ({run.seed for run in rows} for rows in rows_of_sides)
    pair_count = len(seeds_a & seeds_b)
    needed = MIN_PAIRS["t"]
    if pair_count < needed:
        return (
            f"No test: the paired t-test needs {needed} seeds that both have, and there are "
            f"{pair_count}."
        )
    return (
        f"p: the paired t-test of the {pair_count} pairs of seeds, two-sided, not corrected for "
        "the number of rows."
    )


def _common_folder(runs: Sequence[Run]) -> Path:
    """Return the run's directory, or the deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.path for run in runs]))
