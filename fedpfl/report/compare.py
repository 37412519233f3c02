"""Two configurations side by side: `python -m fedpfl.report compare A B`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
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
_TEST_TITLES = {
    "wilcoxon": "Wilcoxon's signed-rank test",
    "t": "the paired t-test, which takes the differences as normal,",
}

_CLIENTS_CAPTION = (
    "B instead of A: harmed: clients, in percent, that lose accuracy; their loss: its mean over "
    "them, in points; worst 10%: mean change, in points, of the tenth that gains least."
)


def _metric_title(name: str) -> str:
    """Return a title such as `mean over clients, %`."""
    metric = METRICS[name]
    return f"{metric.phrase}, {metric.unit}" if metric.unit == "%" else metric.phrase


def _metric_titles(names: Iterable[str]) -> dict[str, str]:
    return {name: _metric_title(name) for name in names}


def _titles_with_tuning(scope: str) -> dict[str, str]:
    """Return the titles of a scope's metrics, before and after fine-tuning."""
    titles = _metric_titles(column_names(scope))
    for name in titles:
        if METRICS[name].fine_tuned:
            titles[name] += ", fine-tuned"
    return titles


COST = "Training and cost"
FINAL = {
    "Before fine-tuning, at the {}": _metric_titles(column_names("test", fine_tuned=False)),
    "After fine-tuning": _metric_titles(column_names("test", fine_tuned=True)),
    "On held-out samples": _titles_with_tuning("validation"),
    "On everybody's samples": _metric_titles(column_names(COMMON_SCOPE)),
    "Of clients that never take part": _titles_with_tuning("unseen"),
    COST: _metric_titles(("train_loss", *column_names("traffic"), "seconds")) | {"hours": "hours"},
}
"""What is compared at the end: by table, the title of each metric."""


@dataclass(frozen=True)
class PairedMetric:
    """One number of every seed of A and of B.

    Attributes:
        name: its column.
        title: the first cell of its row.
        a: values of A by seed.
        b: values of B by seed.
        is_tested: whether a p value means anything.
    """

    name: str
    title: str
    a: dict[int, float]
    b: dict[int, float]
    is_tested: bool = True

    @property
    def differences(self) -> list[float]:
        """Return B - A for every seed that both have."""
        return [self.b[seed] - self.a[seed] for seed in sorted(self.a.keys() & self.b.keys())]

    def record(self, test: str = "") -> dict[str, Any]:
        """Return means, differences and p value; nan where there is none."""
        record: dict[str, Any] = {"what": self.name}
        for side, values in (("a", self.a), ("b", self.b)):
            record[side], record[f"{side}_seed_std"] = mean_and_std([*values.values()])
            record[f"{side}_seeds"] = " ".join(map(str, sorted(values)))
        differences = self.differences
        mean_difference, std = mean_and_std(differences)
        # Of the means, over all seeds of each side; `paired` is over common seeds alone.
        record["difference"] = record["b"] - record["a"]
        record["pairs"] = len(differences)
        record["paired"] = mean_difference
        # The standard error of the mean of n differences is their deviation over sqrt(n).
        record["paired_error"] = std / math.sqrt(max(1, len(differences)))
        is_tested = test and self.is_tested
        record["p"] = paired_test(differences, test) if is_tested else math.nan
        return record


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
    # ---- Step 1: how many configurations a path may hold.
    if len(paths) > 2:
        raise FedpflError(
            f"compare takes two paths, or one that holds two configurations; these are {len(paths)}"
        )
    expected_count = 1 if len(paths) == 2 else 2
    sides = []

    # ---- Step 2: those below each path, with advice where there are others.
    for path in paths:
        configurations = groups(runs(path, where=where, trials=trials))
        if not configurations:
            raise FedpflError(
                f"no readable run below {path}; name a run directory or the folder of a "
                "configuration"
            )
        if len(configurations) < expected_count:
            raise FedpflError(
                f"{path} holds one configuration alone, {configurations[0].title}; name two "
                "paths, or another one"
            )
        if len(configurations) > expected_count:
            titles = [f"{group.title} ({_common_folder(group.runs)})" for group in configurations]
            advice = "name two of them, or choose two by filters"
            if expected_count == 1:
                advice = "name one of them"
            raise FedpflError(
                f"{path} holds {len(configurations)} configurations, {advice}: "
                f"{join_few(titles, '; ')}"
            )
        sides += configurations
    return sides[0], sides[1]


def compare_groups(
    a: Group, b: Group, test: str = "t", metric: str = "accuracy", select: str = "last"
) -> list[Table]:
    """Compare two configurations by their reported runs; the notes stand below the last table.

    Args:
        a: the first configuration.
        b: the second configuration.
        test: of the paired differences over seeds, of MIN_PAIRS, or none.
        metric: of the curve, a column of rounds.csv.
        select: `last`, or `validation` for the final accuracies at each run's best validation
            accuracy.

    Raises:
        FedpflError: both hold the same runs, or a run has no validation accuracy to select by.
    """
    require_classes([a, b], "report compare")
    _require_different_runs(a, b)
    test = "" if test == "none" else test
    a, b = relabel_sides(a, b)
    if select == "validation":
        for group in (a, b):
            if any(_judged_row(run, select).empty for run in group.reported_runs):
                raise no_validation_error(group)

    # ---- Step 1: configuration and environment.
    tables = [
        _runs_table(a, b),
        _differences_table("setting", a.reported_runs, b.reported_runs, lambda run: run.config),
        _differences_table(
            "environment", a.reported_runs, b.reported_runs, lambda run: run.environment
        ),
    ]

    # ---- Step 2: numbers at the end, over the rounds, and by client.
    is_same_seeds = _reported_seeds(a) == _reported_seeds(b)
    evaluation = "best validation accuracy" if select == "validation" else "last evaluation"
    final_metrics = []
    for heading in FINAL:
        metrics = _final_metrics(a, b, heading, select)
        final_metrics += metrics
        rows = _measure_rows(metrics, test, "final", is_same_seeds)
        tables.append(_measures_table(heading.format(evaluation), Column(""), rows))
    curve_rows = _measure_rows(_curve_metrics(a, b, metric), "", "curve", is_same_seeds)
    curve_heading = f"Over rounds: {METRICS[metric].label}"
    tables.append(_measures_table(curve_heading, Column("round", "whole"), curve_rows))
    clients_table, client_notes = _compare_clients(a, b)
    tables.append(clients_table)

    # ---- Step 3: notes below the last table that has rows.
    *tables, last_table = [table for table in tables if table.rows]
    notes = (
        *_run_notes(a, b, select),
        *client_notes,
        *_seed_notes(a, b, test, final_metrics),
    )
    note_frame = pd.DataFrame({"section": "note", "note": notes})
    frame = pd.concat([last_table.frame, note_frame])
    return [*tables, replace(last_table, notes=notes, frame=frame)]


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


def _require_different_runs(a: Group, b: Group) -> None:
    if {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise FedpflError(
            f"{_common_folder(a.runs)} and {_common_folder(b.runs)} hold the same runs; "
            "name two different ones"
        )


def _reported_seeds(group: Group) -> set[int]:
    return {run.seed for run in group.reported_runs}


def _runs_table(a: Group, b: Group) -> Table:
    rows = []
    records = []
    for side, group in (("a", a), ("b", b)):
        seeds = [str(run.seed) for run in group.reported_runs]
        seed_text = ", ".join(seeds)
        if group.status != "finished":
            seed_text += f"; {group.status}"
        folder = str(_common_folder(group.runs))
        texts = (side.upper(), group.method, group.dataset, group.partition, seed_text, folder)
        rows.append([Cell(text) for text in texts])
        record = {"section": "run", "what": group.title, "note": group.status}
        records.append(record | {side: folder, f"{side}_seeds": " ".join(seeds)})
    headings = ("", "method", "data set", "partition", "seeds")
    columns = (*map(Column, headings), Column("path", "long"))
    return Table("Runs", columns, rows, pd.DataFrame(records))


def _differences_table(
    section: str, a: Sequence[Run], b: Sequence[Run], run_values: Callable[[Run], Any]
) -> Table:
    """Show the keys whose values are not the same.

    Where one side's runs differ among themselves, all its values are shown.
    """
    # ---- Step 1: the values of each run by dotted key, and those that decide results.
    left = [dict(flatten_keys(run_values(run))) for run in a]
    right = [dict(flatten_keys(run_values(run))) for run in b]
    result_configs = [dict(flatten_keys(result_config(runs[0].config))) for runs in (a, b)]
    differences = []

    # ---- Step 2: the keys in which the sides differ.
    for key in dict.fromkeys(key for values in (*left, *right) for key in values):
        if section == "setting" and key == "seed":
            continue
        left_values = _distinct_values(left, key)
        right_values = _distinct_values(right, key)
        if left_values.keys() == right_values.keys():
            continue
        result_texts = {canonical_text(config.get(key)) for config in result_configs}
        is_irrelevant = section == "setting" and len(result_texts) == 1
        left_text = " / ".join(map(str, left_values.values()))
        right_text = " / ".join(map(str, right_values.values()))
        remark = "cannot change results" if is_irrelevant else ""
        differences.append((key, left_text, right_text, remark))

    # ---- Step 3: the table, keys that can change results first.
    differences.sort(key=lambda difference: difference[3])
    frame = pd.DataFrame(
        [(section, *difference) for difference in differences],
        columns=["section", "what", "a", "b", "note"],
    )
    title = "Configuration" if section == "setting" else "Environment"
    columns = tuple(map(Column, ("key", "A", "B", "")))
    rows = [[Cell(text) for text in difference] for difference in differences]
    return Table(f"{title}: what differs", columns, rows, frame)


def _distinct_values(runs_values: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the values of a key by their canonical text."""
    values = [run_values.get(key, "(not set)") for run_values in runs_values]
    return {canonical_text(value): value for value in values}


def _final_metrics(a: Group, b: Group, heading: str, select: str) -> list[PairedMetric]:
    """Return the metrics of a table of FINAL that one side has."""

    def values_by_seed(name: str, group: Group) -> dict[int, float]:
        values = {}
        for run in group.reported_runs:
            row = run.last_round if name == "train_loss" else _judged_row(run, select)
            values[run.seed] = run.metric_value(name, row)
        # As in tables, a mean that some seed lacks is no mean of the configuration.
        return {} if any(map(math.isnan, values.values())) else values

    metrics = []
    for name, title in FINAL[heading].items():
        metric = PairedMetric(
            name=name,
            title=title,
            a=values_by_seed(name, a),
            b=values_by_seed(name, b),
            is_tested=heading != COST,
        )
        if metric.a or metric.b:
            metrics.append(metric)
    return metrics


def _judged_row(run: Run, select: str) -> pd.Series:
    """Return the evaluation that a run is judged by, empty without any."""
    return (
        best_round(run.evaluations, validation_column(run.task))
        if select == "validation"
        else run.last_evaluation
    )


def _curve_metrics(a: Group, b: Group, metric: str) -> list[PairedMetric]:
    """Return the metric at the first, quartile and last common evaluations of all runs."""
    # ---- Step 1: the metric by round and seed, where all runs recorded it.
    if any(metric not in run.rounds for run in (*a.reported_runs, *b.reported_runs)):
        return []

    def values_by_round(group: Group) -> pd.DataFrame:
        return pd.DataFrame(
            {run.seed: run.rounds.set_index("round")[metric] for run in group.reported_runs}
        )

    left = values_by_round(a)
    right = values_by_round(b)

    # ---- Step 2: five of the rounds that all seeds of both sides evaluated.
    common_rounds = pd.concat([left, right], axis=1).dropna().sort_index().index
    if not len(common_rounds):
        return []
    # A set, as short runs have fewer than five rounds.
    indices = {round(quarter * (len(common_rounds) - 1) / 4) for quarter in range(5)}
    round_numbers = [int(common_rounds[index]) for index in sorted(indices)]
    return [
        PairedMetric(
            name=metric,
            title=str(number),
            a=left.loc[number].to_dict(),
            b=right.loc[number].to_dict(),
        )
        for number in round_numbers
    ]


def _measure_rows(
    metrics: Sequence[PairedMetric], test: str, section: str, is_same_seeds: bool
) -> list[tuple[list[Cell], dict[str, Any]]]:
    """Return the cells and the record of each metric.

    Args:
        metrics: the metrics.
        test: as in `PairedMetric.record`.
        section: `final` or `curve`.
        is_same_seeds: whether both sides have the same seeds; then the paired difference is that of
            means.
    """
    rows = []
    for metric in metrics:
        values = metric.record(test)
        is_percent = metric.name in METRICS and METRICS[metric.name].kind == "percent"
        kind = "percent" if is_percent else "short"
        change_kind = "difference" if is_percent else "change"
        mean_difference = values["paired"]
        # It would say once more what the difference of the means says.
        if is_same_seeds or len(metric.differences) < 2:
            mean_difference = math.nan
        cells = [
            Cell(metric.title),
            Cell(values["a"], values["a_seed_std"], kind),
            Cell(values["b"], values["b_seed_std"], kind),
            Cell(values["difference"], kind=change_kind),
            Cell(mean_difference, kind=change_kind),
            Cell(format_number(kind, values["paired_error"], 2)),
            Cell(values["p"]),
        ]
        record = {"section": section} | values
        if section == "curve":
            record["at"] = int(metric.title)
        rows.append((cells, record))
    return rows


def _measures_table(
    heading: str, title_column: Column, rows: Sequence[tuple[list[Cell], dict[str, Any]]]
) -> Table:
    """Make a table with a row per metric."""
    columns = (
        title_column,
        Column("A", "short"),
        Column("B", "short"),
        Column("B - A", "change"),
        Column("paired", "change"),
        Column("± error", "short"),
        Column("p", "p"),
    )
    frame = pd.DataFrame([record for _, record in rows])
    return Table(heading, columns, [cells for cells, _ in rows], frame)


class _ClientMetric(NamedTuple):
    """A column of clients.csv on each side, and its title."""

    title: str
    a: str
    b: str


def _compare_clients(a: Group, b: Group) -> tuple[Table, list[str]]:
    """Count the clients that are better on each side, for equal partitions.

    Returns:
        The table, and why other pairs are not in it.
    """
    metrics = {
        "accuracy": _ClientMetric("before", "accuracy", "accuracy"),
        "ft_accuracy": _ClientMetric("fine-tuned", "ft_accuracy", "ft_accuracy"),
    }
    column_a = label_and_column(a)[1]
    column_b = label_and_column(b)[1]
    if column_a != column_b:
        metrics["judged"] = _ClientMetric("FedAvg alone fine-tuned", column_a, column_b)

    # ---- Step 1: a record per pair of runs and metric.
    records: list[dict[str, Any]] = []
    notes = []
    seeds_with_other_partition = []
    has_newcomers = False
    for seed, run_a, run_b in _pair_runs(a, b):
        try:
            samples_a = samples_by_client(run_a.clients)
            is_same_partition = samples_a.equals(samples_by_client(run_b.clients))
        except FedpflError as error:
            notes.append(f"Clients of seed {seed} are not compared: {error}")
            continue
        if not is_same_partition:
            seeds_with_other_partition.append(seed)
            continue
        pair_records, pair_notes = _client_changes(seed, run_a, run_b, metrics)
        records += pair_records
        notes += pair_notes
        for run in (run_a, run_b):
            has_newcomers |= len(run.participating_clients) < len(run.clients)
    if seeds_with_other_partition:
        notes.append(
            f"Clients of seed {', '.join(seeds_with_other_partition)} are not compared: "
            "their label counts differ, so the partitions do."
        )
    if has_newcomers:
        notes.append("Clients that never take part, or attack, in A or in B are not compared.")

    # ---- Step 2: the table.
    titles = {name: metric.title for name, metric in metrics.items()}
    return _clients_table(records, titles), notes


def _pair_runs(a: Group, b: Group) -> list[tuple[str, Run, Run]]:
    """Return runs paired by seed, or the only run of each side."""
    runs_a = {run.seed: run for run in a.reported_runs}
    runs_b = {run.seed: run for run in b.reported_runs}
    common_seeds = sorted(runs_a.keys() & runs_b.keys())
    # A run on each side, of different seeds: still of use where the split is one.
    if not common_seeds and len(runs_a) == len(runs_b) == 1:
        run_a = a.reported_runs[0]
        run_b = b.reported_runs[0]
        return [(f"{run_a.seed} | {run_b.seed}", run_a, run_b)]
    return [(str(seed), runs_a[seed], runs_b[seed]) for seed in common_seeds]


def _clients_table(records: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> Table:
    """Make the table of `_compare_clients`, with a row over all seeds where there are several."""
    # ---- Step 1: a row per pair of runs.
    frame = pd.DataFrame(records).assign(section="clients")
    count_keys = ("a", "equal", "b")
    harm_keys = HarmStatistics._fields
    rows = []
    for record in records:
        values = [record[key] for key in (*count_keys, *harm_keys)]
        rows.append([Cell(record["at"]), Cell(titles[record["what"]]), *map(Cell, values)])

    # ---- Step 2: a row over all pairs, counts added up and shares averaged.
    if records:
        for name, members in frame.groupby("what", sort=False):
            if len(members) > 1:
                total_counts = members[[*count_keys]].sum()
                means = [Cell(*mean_and_std([*members[key].dropna()])) for key in harm_keys]
                title = Cell(titles[str(name)])
                rows.append([Cell("all"), title, *map(Cell, total_counts), *means])
    columns = (
        Column("seed"),
        Column(""),
        *(Column(heading, "whole") for heading in ("in A", "equal", "in B")),
        *(
            Column(heading, "percent", "B instead of A")
            for heading in ("harmed %", "their loss", "worst 10%")
        ),
    )
    return Table(
        title="Clients that are better, by their own accuracy",
        columns=columns,
        rows=rows,
        frame=frame,
        caption=_CLIENTS_CAPTION,
    )


def _client_changes(
    seed: str, run_a: Run, run_b: Run, metrics: Mapping[str, _ClientMetric]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the changes of clients that take part in both runs, and notes."""
    # ---- Step 1: the clients of both; they are the same, as the partitions are.
    clients_a = run_a.clients
    clients_b = run_b.clients
    # Both sides: an attacker in one run may be honest in the other.
    takes_part = clients_a.index.isin(run_a.participating_clients.index)
    takes_part &= clients_b.index.isin(run_b.participating_clients.index)
    records = []
    notes = []

    # ---- Step 2: a record per metric, and how many clients it leaves out.
    for name, metric in metrics.items():
        if metric.a not in clients_a or metric.b not in clients_b:
            continue
        changes = (clients_b[metric.b] - clients_a[metric.a])[takes_part]
        better_in_a, equal, better_in_b = count_changes(changes)
        record = {"at": seed, "what": name, "a": better_in_a, "equal": equal, "b": better_in_b}
        records.append(record | measure_harm(changes.dropna())._asdict())
        # Without the counts of test samples nobody can tell a client without any from a gap.
        if "test" not in clients_a:
            continue
        has_test_samples = (clients_a["test"] > 0)[takes_part]
        missing_count = int((has_test_samples & changes.isna()).sum())
        if missing_count:
            column_text = " or ".join(dict.fromkeys((metric.a, metric.b)))
            notes.append(
                f"Seed {seed}: {missing_count} clients with test samples lack {column_text} in A "
                "or in B; they do not count."
            )
    return records, notes


def _run_notes(a: Group, b: Group, select: str) -> list[str]:
    """Say what a reader must know of the runs."""
    notes = []
    if select == "validation":
        notes.append(
            "Each run is judged at its first evaluation of the best validation accuracy, "
            "clients at the last."
        )

    # ---- Step: status, attendance and rounds of each side.
    judged_rounds = []
    for letter, group in (("A", a), ("B", b)):
        if group.status != "finished":
            notes.append(f"{letter} is not simply finished: {group.status}.")
        notes += [f"{letter}: {note}" for note in attendance_notes([group])]
        rows = [_judged_row(run, select) for run in group.reported_runs]
        judged_rounds.append(sorted({int(row["round"]) for row in rows if len(row)}))
    if judged_rounds[0] != judged_rounds[1] or max(map(len, judged_rounds)) > 1:
        rounds_a, rounds_b = (", ".join(map(str, rounds)) or "none" for rounds in judged_rounds)
        notes.append(
            f"The final numbers are of different rounds: A of {rounds_a}, B of {rounds_b}."
        )

    # ---- Step: tasks and data.
    if (a.dataset, a.partition) != (b.dataset, b.partition):
        notes.append(
            "A and B are different tasks (data, partition, attack, defence or shift): their "
            "difference is not a method's."
        )
    fingerprints = [{run.fingerprint for run in group.runs} - {""} for group in (a, b)]
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        notes.append("A and B did not read the same data: their fingerprints differ.")
    return notes


def _seed_notes(a: Group, b: Group, test: str, final_metrics: Iterable[PairedMetric]) -> list[str]:
    """Say over which seeds numbers are, and whether they are tested."""
    seeds_a = _reported_seeds(a)
    seeds_b = _reported_seeds(b)
    pair_count = len(seeds_a & seeds_b)
    units = "Values and bits: per client that took part and round; seconds: median over rounds."
    if max(len(seeds_a), len(seeds_b)) > 1:
        units += " In brackets: sample standard deviation over seeds."
    if pair_count > 1:
        units += " ± error: standard error of the mean of B - A over the seeds that both have."
    notes = [units]
    for letter, only_there in (("A", seeds_a - seeds_b), ("B", seeds_b - seeds_a)):
        if only_there:
            notes.append(f"Only in {letter}: seeds {', '.join(map(str, sorted(only_there)))}.")
    if pair_count == 0:
        notes.append("No seed is in both, so nothing can be paired, and no test is made.")
    elif pair_count == 1:
        notes.append(
            "One seed is in both: one pair has no standard error, and says nothing of how another "
            "would end."
        )
    elif test:
        notes += _test_notes(test, pair_count, final_metrics)
    return notes


def _test_notes(test: str, pair_count: int, final_metrics: Iterable[PairedMetric]) -> list[str]:
    """Name the test, or say that there are too few pairs for it."""
    min_pairs = MIN_PAIRS[test]
    if pair_count < min_pairs:
        reason = f"from {min_pairs} pairs on one is made"
        if test == "wilcoxon":
            reason = (
                f"with {pair_count} its p cannot fall below {2 / 2**pair_count:.3g}, from "
                f"{min_pairs} on it can fall below 0.05"
            )
        title = _TEST_TITLES[test].rstrip(",")
        return [f"{pair_count} pairs of seeds are too few for {title}: {reason}."]
    notes = [
        f"p: {_TEST_TITLES[test]} of the {pair_count} pairs of seeds, two-sided, not corrected "
        "for the number of rows."
    ]
    if test == "wilcoxon":
        change_counts = [
            len(nonzero_changes(metric.differences)) for metric in final_metrics if metric.is_tested
        ]
        if any(count < min_pairs for count in change_counts):
            notes.append("Where fewer than 6 pairs differ at all, there is no p.")
    return notes


def _common_folder(runs: Sequence[Run]) -> Path:
    """Return the run's directory, or the deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.path for run in runs]))
