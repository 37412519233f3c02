"""Methods ranked over data sets: `python -m fedpfl.report ranks ROOT ...`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.record.columns import METRICS
from fedpfl.report import figures
from fedpfl.report.compare import paired_test
from fedpfl.report.fairness import BASELINES, label_and_column
from fedpfl.report.grouping import Group, common_task, groups, task_metric
from fedpfl.report.power import LEVEL, describe_parting
from fedpfl.report.run import Run
from fedpfl.report.table import Cell, Column, Table, format_number, mean_and_std
from fedpfl.report.tables import attendance_notes, describe_seeds, judged_rows, titled_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        statistic, p = map(float, stats.friedmanchisquare(*ranks.to_numpy().T))

    # ---- Step 3: which two differ?
    rows = []
    for a, b in itertools.combinations(order, 2):
        losses = ranks[a] - ranks[b]
        p_pair = paired_test(accuracy[a] - accuracy[b], "wilcoxon")
        rows.append((a, b, (losses < 0).sum(), (losses > 0).sum(), p_pair))
    pairs = pd.DataFrame(rows, columns=["a", "b", "a_better", "b_better", "p"])
    pairs["p_holm"] = correct_by_holm(pairs["p"])
    return MethodRanks(accuracy=accuracy, ranks=ranks, statistic=statistic, p=p, pairs=pairs)


def correct_by_holm(p_values: pd.Series) -> pd.Series:
    """Correct p values for their number by Holm's step-down procedure (1979).

    A nan counts as 1 and stays nan.
    """
    # The k-th smallest of n is compared as one of n - k + 1, and none may fall below an earlier
    # one. nan is sorted last.
    ascending = p_values.sort_values()
    factors = range(len(ascending), 0, -1)
    return (
        (ascending * pd.Series(factors, ascending.index))
        .clip(upper=1)
        .cummax()
        .reindex(p_values.index)
    )


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
    shown_groups = [group for group in groups(runs) if not group.is_upper_line]
    task = common_task(shown_groups)
    metric = task_metric(metric, task)
    if metric not in METRICS:
        raise FedpflError(f"task={task.name} has no {metric}; choose another --accuracy")
    records = []
    for group, (label, column) in _block_labels(shown_groups, metric).items():
        rows = judged_rows(group, select, every)
        mean, _ = mean_and_std([float(row.get(column, math.nan)) for row in rows.values()])
        values = {run.seed: float(row.get(column, math.nan)) for run, row in rows.items()}
        records.append((group.setting, label, mean, values, group))
    scored = pd.DataFrame(records, columns=["block", "label", "mean", "seeds", "group"])
    scored = scored.dropna(subset="mean")

    # ---- Step 2: ranks, without what has gaps.
    means = scored.pivot(index="block", columns="label", values="mean")
    accuracy, gap_notes = drop_gaps(means[scored["label"].unique()])
    result = rank_methods(accuracy, is_lowest_best=METRICS[metric].best == "min")

    # ---- Step 3: the tables.
    ranked = scored[scored["block"].isin(accuracy.index) & scored["label"].isin(accuracy.columns)]
    pairs = []
    unfinished = []
    seeds_by_title = {}
    for row in ranked.itertuples():
        title = f"{row.label} on {row.block}"
        seeds_by_title[title] = row.seeds
        if row.group.deviations:
            deviations = ", ".join(row.group.deviations)
            pairs.append(("Not configured as most of their block", f"{title} ({deviations})"))
        if not row.group.is_complete:
            unfinished.append(("Not simply finished", f"{title} ({row.group.status})"))
    notes = (
        _describe_first_two(result, ranked),
        *gap_notes,
        *titled_notes(pairs + unfinished),
        *attendance_notes(ranked["group"]),
    )
    caption = _make_caption(result, metric, select, seeds_by_title)
    return [_blocks_table(result, caption, metric), _pairs_table(result, notes)], result


def _describe_first_two(result: MethodRanks, ranked: pd.DataFrame) -> str:
    """Describe the seeds that would part the first two methods, by means over blocks."""
    names = [*result.ranks][:2]
    rows = ranked.set_index("label").loc[names, "seeds"]
    # Seeds that both have in every block.
    by_seed = pd.DataFrame([*rows], rows.index).dropna(axis=1).groupby(level=0).mean()
    _, deviation = mean_and_std([*by_seed.loc[names[0]] - by_seed.loc[names[1]]])
    gap = result.accuracy[names].mean().diff().iloc[1]
    return describe_parting(names, gap, deviation)


def _name_groups(result: MethodRanks) -> list[str]:
    """Name each method's groups; methods of one group are not told apart."""
    numbers: list[list[str]] = [[] for _ in result.ranks]
    for number, (start, last) in enumerate(find_groups(result), start=1):
        for group_numbers in numbers[start : last + 1]:
            group_numbers.append(str(number))
    return [", ".join(group_numbers) for group_numbers in numbers]


def drop_gaps(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Drop methods or blocks with the largest share of gaps until none is left.

    Args:
        frame: accuracies `[blocks, methods]`, nan where runs are missing.

    Returns:
        The rest of it, and notes on dropped methods and blocks.
    """
    whole = frame
    # Friedman's test needs every method in every block.
    while frame.isna().any(axis=None):
        method_gaps = frame.isna().mean()
        block_gaps = frame.isna().mean(axis=1)
        # Of equal shares the block goes, which costs no method.
        if method_gaps.max() > block_gaps.max():
            frame = frame.drop(columns=method_gaps.idxmax())
        else:
            frame = frame.drop(index=block_gaps.idxmax())
    methods = whole.columns.difference(frame.columns, sort=False)
    blocks = whole.index.difference(frame.index, sort=False)
    pairs = [("Left out, as runs are missing: methods", name) for name in methods]
    pairs += [("Left out, as runs are missing: blocks", name) for name in blocks]
    return frame, titled_notes(pairs)


def draw_rank_diagram(result: MethodRanks, path: Path) -> list[Path]:
    """Draw average ranks, the best on top, and beside them bars over equal methods.

    A critical-difference diagram as in Benavoli et al. (JMLR 17, 2016): by Wilcoxon's tests rather
    than by differences of ranks.

    Args:
        result: the ranks.
        path: with a suffix or, for PNG and PDF, without.

    Returns:
        The files written.
    """
    mean_ranks = result.ranks.mean()
    count = len(mean_ranks)
    labels = [f"{figures.legible_text(str(name))} ({r:.1f})" for name, r in mean_ranks.items()]
    bars = [(start, last) for start, last in find_groups(result) if start < last]

    def draw_diagram(ax: Axes, _: None) -> None:
        ax.plot(mean_ranks, range(count), "o", color="black")
        for index, (start, last) in enumerate(bars):
            ax.plot([count + 0.4 + 0.3 * index] * 2, [start, last], color="0.35", linewidth=3)
        ax.set_yticks(range(count), labels)
        ax.set_xticks(range(1, count + 1))
        ax.set(xlabel="average rank", ylim=(count - 0.5, -0.5))

    title = f"average rank over {len(result.ranks)} data sets and partitions"
    if bars:
        title += "\nbars: not told apart (Wilcoxon, Holm, 5 %)"
    size = (figures.PANEL_SIZE[0], 0.9 + 0.2 * count)
    return figures.draw_panels({title: None}, path, draw_diagram, size=size)


def find_groups(result: MethodRanks) -> list[tuple[int, int]]:
    """Return the longest runs of methods by rank in which no two are told apart.

    Returns:
        The indices of the first and the last method of each; one run if no test could be made.
    """
    pairs = result.pairs
    names = [*result.ranks]
    told_apart = [(row.a, row.b) for row in pairs[pairs["p_holm"] < LEVEL].itertuples()]
    runs: list[tuple[int, int]] = []
    for start in range(len(names)):
        # Pairs have the better rank first: a run ends before the first that it would tell apart.
        worse = [names.index(b) for a, b in told_apart if names.index(a) >= start]
        last = min(worse, default=len(names)) - 1
        # A run that begins later and ends no later is part of the last one.
        if not runs or runs[-1][1] < last:
            runs.append((start, last))
    return runs


def _block_labels(ranked_groups: Sequence[Group], metric: str) -> dict[Group, tuple[str, str]]:
    """Return a configuration's label in every block, and the column it is judged by.

    The label is the method's name alone where each block has one configuration of it.
    """
    counts = Counter((group.setting, group.method_title) for group in ranked_groups)
    repeated_titles = {title for (_, title), count in counts.items() if count > 1}
    labels = {}
    for group in ranked_groups:
        label, column = label_and_column(group, metric)
        title = group.method_title
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
        f"block: data set and partition; {seed_text}. Ties share their mean rank. Methods of one group are not told "
        "apart, by the tests of pairs. "
    )
    methods = result.accuracy.columns
    if not metric.startswith("ft_") and methods.str.startswith("FedAvg+FT").any():
        caption += "FedAvg is judged after fine-tuning. "
    if math.isnan(result.statistic):
        return caption + "All ranks are equal: there is nothing to test."
    return caption + (
        f"Friedman's test, corrected for ties: chi-square {result.statistic:.2f} with "
        f"{len(methods) - 1} degrees of freedom, p {format_number('p', result.p)}."
    )


def _blocks_table(result: MethodRanks, caption: str, metric: str) -> Table:
    """Make the table of average ranks, accuracies and ranks by block."""
    # ---- Step 1: the numbers for CSV.
    mean_ranks = result.ranks.mean()
    value_key = "accuracy" if "accuracy" in metric else metric
    average = mean_ranks.rename("rank").rename_axis("method").reset_index()
    average["group"] = group_names = _name_groups(result)
    blocks = pd.DataFrame({value_key: result.accuracy.stack(), "rank": result.ranks.stack()})
    blocks = blocks.rename_axis(["block", "method"]).reset_index()
    friedman = pd.DataFrame({"statistic": [result.statistic], "p": [result.p]})
    sections = {"average": average, "friedman": friedman, "block": blocks}
    frame = pd.concat(sections, names=["section"]).reset_index(0)
    names = ["section", "method", "rank", "group", "statistic", "p", "block", value_key]

    # ---- Step 2: a row per block, each rank below its accuracy.
    first_row = [Cell("group", below="average rank")]
    for name, rank in zip(group_names, mean_ranks, strict=True):
        first_row.append(Cell(name, below=f"{rank:.1f}"))
    rows = [first_row]
    for block, values in result.accuracy.iterrows():
        row = [Cell(str(block))]
        for value, rank in zip(values, result.ranks.loc[block], strict=True):
            row.append(Cell(value, below=f"{rank:g}"))
        rows.append(row)
    columns = [Column(str(name), METRICS[metric].kind) for name in mean_ranks.index]
    columns.insert(0, Column("data set and partition"))
    return Table("Ranks", tuple(columns), rows, frame[names], caption=caption, below="rank")


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
