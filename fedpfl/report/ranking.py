"""Methods ranked over data sets: `python -m fedpfl.report ranks ROOT ...`."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.record.columns import METRICS
from fedpfl.report import figures
from fedpfl.report.compare import MIN_PAIRS, nonzero_changes, paired_test
from fedpfl.report.fairness import BASELINES, label_and_column
from fedpfl.report.grouping import Group, common_task, groups, task_metric
from fedpfl.report.run import Run
from fedpfl.report.table import Cell, Column, Table, format_number, mean_and_std
from fedpfl.report.tables import attendance_notes, describe_seeds, judged_rows, title_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVEL = 0.05
"""Two methods whose corrected p is not below this are not told apart."""


class MethodRanks(NamedTuple):
    """Methods over blocks, the best average rank first. A block is a data set and partition.

    Attributes:
        accuracy: `[blocks, methods]`, in percent.
        ranks: `[blocks, methods]`, from 1; ties share their mean rank.
        statistic: Friedman's chi-square, corrected for ties, nan where all ranks are equal.
        p: Friedman's.
        pairs: a row per two methods: `a`, `b`, the number of blocks in which each is better
            (`a_better`, `b_better`), `p` of Wilcoxon's signed-rank test, nan where fewer than six
            blocks differ, and `p_holm`.
    """

    accuracy: pd.DataFrame
    ranks: pd.DataFrame
    statistic: float
    p: float
    pairs: pd.DataFrame


def rank_methods(accuracy: pd.DataFrame, is_lowest_best: bool = False) -> MethodRanks:
    """Rank methods over blocks and test whether they differ (Demšar, JMLR 7, 2006).

    Args:
        accuracy: `[blocks, methods]`, or another score.
        is_lowest_best: which end of it is the better one.

    Raises:
        FedpflError: there are fewer than three methods or two blocks.
    """
    block_count, method_count = accuracy.shape
    if method_count < 3 or block_count < 2:
        raise FedpflError(
            "ranks need at least three methods that all have runs in the same two or more blocks "
            f"(data set and partition); these are {pluralize(method_count, 'method')} in "
            f"{pluralize(block_count, 'block')}"
        )
    from scipy import stats  # slow to load

    # ---- Step 1: ranks within each block.
    accuracy = accuracy.round(9)  # means over seeds of equal numbers may differ in the last bit
    ranks = accuracy.rank(axis=1, ascending=is_lowest_best)
    # Equal average ranks stay in the order of tables.
    order = ranks.mean().sort_values(kind="stable").index
    accuracy = accuracy[order]
    ranks = ranks[order]

    # ---- Step 2: do the methods differ at all?
    statistic = p = math.nan
    # scipy divides by the spread of ranks, which is 0 where all are equal.
    if (ranks.nunique(axis=1) > 1).any():
        result = stats.friedmanchisquare(*(ranks[name] for name in ranks))
        statistic, p = map(float, result)

    # ---- Step 3: which two differ?
    rows = []
    for a, b in itertools.combinations(order, 2):
        changes = nonzero_changes(accuracy[a] - accuracy[b])
        a_better = sum((change < 0) if is_lowest_best else (change > 0) for change in changes)
        b_better = len(changes) - a_better
        rows.append((a, b, a_better, b_better, paired_test(changes, "wilcoxon")))
    pairs = pd.DataFrame(rows, columns=["a", "b", "a_better", "b_better", "p"])
    pairs = pairs.assign(p_holm=holm_correction([*pairs["p"]]))
    return MethodRanks(accuracy=accuracy, ranks=ranks, statistic=statistic, p=p, pairs=pairs)


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by Holm's step-down procedure (1979).

    A nan counts as 1 and stays nan.
    """
    corrected = [math.nan] * len(p_values)
    ascending = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    greatest = 0.0
    # The k-th smallest of n is compared as one of n - k + 1, and none may fall below an earlier
    # one.
    for position, (p, index) in enumerate(ascending):
        greatest = max(greatest, min(1.0, (len(p_values) - position) * p))
        corrected[index] = greatest
    return corrected


def rank_tables(
    runs: Iterable[Run], metric: str = "accuracy", select: str = "last", every: int = 1
) -> tuple[list[Table], MethodRanks]:
    """Make the tables of ranks and of pairs of methods, with notes.

    Args:
        runs: the runs.
        metric: of ACCURACIES; `accuracy` means the score of the runs' task.
        select: as in `accuracy_table`.
        every: as in `accuracy_table`.

    Raises:
        FedpflError: there is too little to rank.
    """
    # ---- Step 1: the mean accuracy of each method in each block.
    accuracies: dict[str, dict[str, float]] = defaultdict(dict)
    ranked_groups: dict[tuple[str, str], tuple[Group, list[int]]] = {}
    shown_groups = groups(runs)
    task = common_task(group.runs[0] for group in shown_groups)
    metric = task_metric(metric, task)
    if metric not in METRICS:
        raise FedpflError(f"task={task.name} has no {metric}; choose another --accuracy")
    for group, (label, column) in _block_labels(shown_groups, metric).items():
        rows = judged_rows(group, select, every)
        mean, _ = mean_and_std([float(row.get(column, math.nan)) for row in rows.values()])
        if not math.isnan(mean):
            accuracies[group.setting][label] = mean
            ranked_groups[group.setting, label] = group, [run.seed for run in rows]

    # ---- Step 2: ranks, without what has gaps.
    accuracy, gap_notes = drop_gaps(accuracies)
    result = rank_methods(accuracy, is_lowest_best=METRICS[metric].best == "min")
    groups_by_title = {}
    seeds = {}
    for (block, label), (group, group_seeds) in ranked_groups.items():
        if block in accuracy.index and label in accuracy.columns:
            groups_by_title[f"{label} on {block}"] = group
            seeds[f"{label} on {block}"] = group_seeds

    # ---- Step 3: the tables.
    titled = groups_by_title.items()
    deviating = [f"{title} ({', '.join(g.deviations)})" for title, g in titled if g.deviations]
    unfinished = [f"{title} ({g.status})" for title, g in titled if not g.is_complete]
    notes = (
        *gap_notes,
        *title_note("Not configured as most of their block", deviating),
        *title_note("Not simply finished", unfinished),
        *attendance_notes(groups_by_title.values()),
        *_power_notes(*accuracy.shape),
    )
    caption = _make_caption(result, metric, select, seeds)
    return [_blocks_table(result, caption, metric), _pairs_table(result, notes)], result


def drop_gaps(accuracies: Mapping[str, Mapping[str, float]]) -> tuple[pd.DataFrame, list[str]]:
    """Drop methods or blocks with the largest share of gaps until none is left.

    Args:
        accuracies: by block and method.

    Returns:
        A table `[blocks, methods]`, and notes on dropped methods and blocks.
    """
    frame = pd.DataFrame.from_dict(accuracies, orient="index").sort_index()
    dropped: dict[int, list[str]] = {0: [], 1: []}

    def gap_share(candidate: tuple[int, str]) -> tuple[float, int]:
        axis, name = candidate
        # Of equal shares the block goes, which costs no method.
        return frame.xs(name, axis=axis).isna().mean(), -axis

    # Friedman's test needs every method in every block.
    while frame.isna().any(axis=None):
        candidates = [(axis, name) for axis in (0, 1) for name in frame.axes[axis]]
        axis, name = max(candidates, key=gap_share)
        frame = frame.drop(name, axis=axis)
        dropped[axis].append(name)
    notes = title_note("Left out, as runs are missing: methods", dropped[1])
    return frame, notes + title_note("Left out, as runs are missing: blocks", dropped[0])


def draw_rank_diagram(result: MethodRanks, path: Path) -> list[Path]:
    """Draw the critical-difference diagram: average ranks, and bars over equal methods.

    As in Benavoli et al. (JMLR 17, 2016), by Wilcoxon's tests rather than by differences of ranks.

    Args:
        result: the ranks.
        path: with a suffix or, for PNG and PDF, without.

    Returns:
        The files written.
    """
    mean_ranks = result.ranks.mean()
    count = len(mean_ranks)
    half = (count + 1) // 2
    bars = find_cliques(result)

    def draw_diagram(ax: Axes, _: None) -> None:
        # ---- Step 1: lines from ranks to methods' names, the better half to the left.
        labels_y = -1.6 - 0.25 * len(bars)
        for index, (name, rank) in enumerate(mean_ranks.items()):
            is_left = index < half
            x = 0.8 if is_left else count + 0.2
            y = labels_y - 0.9 * (index if is_left else count - 1 - index)
            ax.plot([rank, rank, x], [0, y, y], color="0.35", linewidth=0.8)
            label = f" {figures.legible_text(str(name))} ({rank:.2f}) "
            ax.text(x, y, label, ha="right" if is_left else "left", va="center")

        # ---- Step 2: bars over methods that are not told apart.
        for index, (start, end) in enumerate(bars):
            x_range = [mean_ranks.iloc[start] - 0.04, mean_ranks.iloc[end] + 0.04]
            ax.plot(x_range, [-0.7 - 0.45 * index] * 2, color="black", linewidth=3)

        # ---- Step 3: the scale of ranks, with as many numbers as have room.
        ax.plot([1, count], [0, 0], color="black", linewidth=1)
        for tick in range(1, count + 1, -(-count // 8)):
            ax.text(tick, 0.2, str(tick), ha="center", va="bottom")
        ax.set(xlim=(1 - 0.6 * count, 1.6 * count), ylim=(labels_y - 0.9 * half, 1.6))
        ax.set_axis_off()

    title = f"average rank over {len(result.ranks)} data sets and partitions"
    if bars:
        title += "\nbars: not told apart (Wilcoxon, Holm, 5 %)"
    size = (figures.PANEL_SIZE[0], 0.9 + 0.2 * half + 0.08 * len(bars))
    return figures.draw_panels({title: None}, path, draw_diagram, size=size)


def find_cliques(result: MethodRanks) -> list[tuple[int, int]]:
    """Return the longest runs of methods by rank in which no two differ.

    Returns:
        The indices of the first and the last method of each; nothing if no test could be made.
    """
    if result.pairs["p"].isna().all():
        return []
    names = [*result.ranks]
    different_pairs = {
        frozenset((row.a, row.b)) for row in result.pairs.itertuples() if row.p_holm < LEVEL
    }
    cliques: list[tuple[int, int]] = []
    for start in range(len(names)):
        end = start
        while end + 1 < len(names):
            pairs = {frozenset((names[end + 1], name)) for name in names[start : end + 1]}
            if pairs & different_pairs:
                break
            end += 1
        # A run that begins later and ends no later is part of the last one.
        is_inside_last = bool(cliques) and cliques[-1][1] >= end
        if end > start and not is_inside_last:
            cliques.append((start, end))
    return cliques


def _block_labels(ranked_groups: Sequence[Group], metric: str) -> dict[Group, tuple[str, str]]:
    """Return a configuration's label in every block, and the column it is judged by.

    The label is the method's name alone where each block has one configuration of it.
    """
    counts = Counter((group.setting, group.runs[0].method_title) for group in ranked_groups)
    repeated_titles = {title for (_, title), count in counts.items() if count > 1}
    labels = {}
    for group in ranked_groups:
        label, column = label_and_column(group, metric)
        title = group.runs[0].method_title
        if title not in repeated_titles:
            label = title if column == metric else BASELINES["fedavg"]
        labels[group] = label, column
    return labels


def _make_caption(
    result: MethodRanks, metric: str, select: str, seeds: Mapping[str, Sequence[int]]
) -> str:
    """Describe the ranks and Friedman's test."""
    evaluation = f"the evaluation that --select {select} chooses"
    if select == "last":
        evaluation = "the last evaluation"
    # Cells hold means alone.
    seed_text = describe_seeds(seeds).replace(" and sample standard deviation", "")
    caption = (
        f"{METRICS[metric].label.capitalize()} at {evaluation}, and below it the rank in its "
        f"block: data set and partition; {seed_text}. Ties share their mean rank. "
    )
    methods = [*result.accuracy]
    if not metric.startswith("ft_") and any(name.startswith("FedAvg+FT") for name in methods):
        caption += "FedAvg is judged after fine-tuning. "
    if math.isnan(result.statistic):
        return caption + "All ranks are equal: there is nothing to test."
    return caption + (
        f"Friedman's test, corrected for ties: chi-square {result.statistic:.2f} with "
        f"{len(methods) - 1} degrees of freedom, p {format_number('p', result.p)}."
    )


def _power_notes(block_count: int, method_count: int) -> list[str]:
    """Say that so few blocks and methods cannot show a difference."""
    notes = []
    if block_count <= 10 or method_count <= 5:
        notes.append(
            "Friedman's chi-square is a good approximation from about 11 blocks and 6 methods on "
            f"(Demšar 2006); these are {block_count} and {method_count}."
        )
    pair_count = method_count * (method_count - 1) // 2
    smallest_p = min(1.0, pair_count * 2 / 2**block_count)
    if smallest_p > LEVEL or block_count < MIN_PAIRS["wilcoxon"]:
        notes.append(
            f"With {block_count} blocks and {pair_count} pairs of methods no p corrected by Holm "
            f"can fall below {smallest_p:.3g}: no two methods are told apart."
        )
    return notes


def _blocks_table(result: MethodRanks, caption: str, metric: str) -> Table:
    """Make the table of average ranks, accuracies and ranks by block."""
    # ---- Step 1: the row of average ranks, and Friedman's test for CSV.
    mean_ranks = result.ranks.mean()
    value_key = "accuracy" if "accuracy" in metric else metric
    rows = [[Cell("average rank"), *(Cell(rank, kind="decimal") for rank in mean_ranks)]]
    records = [
        {"section": "average", "method": name, "rank": rank} for name, rank in mean_ranks.items()
    ]
    records.append({"section": "friedman", "statistic": result.statistic, "p": result.p})

    # ---- Step 2: a row per block, each rank below its accuracy.
    for block, accuracies in result.accuracy.iterrows():
        ranks = result.ranks.loc[block]
        row = [Cell(str(block))]
        for name in accuracies.index:
            row.append(Cell(accuracies[name], below=f"{ranks[name]:g}"))
            records.append(
                {
                    "section": "block",
                    "block": block,
                    "method": name,
                    value_key: accuracies[name],
                    "rank": ranks[name],
                }
            )
        rows.append(row)

    # ---- Step 3: the table.
    columns = (
        Column("data set and partition"),
        *(Column(str(name), METRICS[metric].kind) for name in mean_ranks.index),
    )
    frame = pd.DataFrame(records)
    return Table("Ranks", columns, rows, frame, caption=caption, below="rank")


def _pairs_table(result: MethodRanks, notes: tuple[str, ...]) -> Table:
    """Make the table of Wilcoxon's tests of two methods."""
    columns = {
        "a": Column("A"),
        "b": Column("B"),
        "a_better": Column("A better in", "whole"),
        "b_better": Column("B better in", "whole"),
        "p": Column("p", "p"),
        "p_holm": Column("Holm's p", "p"),
    }
    caption = (
        "Wilcoxon's signed-rank test over blocks, two-sided; Holm's p: corrected for the number of "
        "pairs. Where fewer than 6 blocks differ at all, there is no p."
    )
    note_frame = pd.DataFrame({"section": "note", "note": notes})
    frame = pd.concat([result.pairs.assign(section="pair"), note_frame])
    return Table.of(
        result.pairs.to_dict("records"),
        columns,
        title="Pairs of methods",
        frame=frame,
        caption=caption,
        notes=notes,
    )
