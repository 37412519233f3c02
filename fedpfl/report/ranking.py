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
from fedpfl.report.grouping import Group, groups
from fedpfl.report.run import Run
from fedpfl.report.table import Cell, Column, Table, format_number, mean_and_std
from fedpfl.report.tables import attendance_notes, describe_seeds, judged_rows
from fedpfl.report.text import join_few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVEL = 0.05
"""From which corrected p on two methods are told apart."""


class MethodRanks(NamedTuple):
    """Methods over blocks, the best average rank first.

    accuracy, places: `[blocks, methods]`, in percent, and ranks from 1, ties sharing their mean.
    statistic, p: Friedman's, corrected for ties, nan where all ranks are equal. pairs: a row per
    two methods: `a`, `b`, the number of blocks in which each is better (`a_better`, `b_better`),
    `p` of Wilcoxon's signed-rank test, nan where fewer than six blocks differ, and `p_holm`.
    """

    accuracy: pd.DataFrame
    places: pd.DataFrame
    statistic: float
    p: float
    pairs: pd.DataFrame


def rank_methods(accuracy: pd.DataFrame) -> MethodRanks:
    """Rank methods over blocks and test whether they differ (Demšar, JMLR 7, 2006). accuracy:
    `[blocks, methods]`.

    Raises FedpflError with fewer than three methods or two blocks.
    """
    blocks, methods = accuracy.shape
    if methods < 3 or blocks < 2:
        raise FedpflError(
            f"ranks need at least three methods that all have runs in the same two or more blocks (data set and "
            f"partition); these are {pluralize(methods, 'method')} in {pluralize(blocks, 'block')}"
        )
    from scipy import stats  # slow to load

    accuracy = accuracy.round(9)  # means over seeds of equal numbers may differ in the last bit
    places = accuracy.rank(axis=1, ascending=False)
    order = places.mean().sort_values(kind="stable").index
    accuracy, places = accuracy[order], places[order]
    statistic = p = math.nan
    if (places.nunique(axis=1) > 1).any():
        statistic, p = map(float, stats.friedmanchisquare(*(places[name] for name in places)))
    rows = []
    for a, b in itertools.combinations(order, 2):
        apart = nonzero_changes(accuracy[a] - accuracy[b])
        better = sum(change > 0 for change in apart)
        rows.append((a, b, better, len(apart) - better, paired_test(apart, "wilcoxon")))
    pairs = pd.DataFrame(rows, columns=["a", "b", "a_better", "b_better", "p"])
    return MethodRanks(
        accuracy, places, statistic, p, pairs.assign(p_holm=holm_correction([*pairs["p"]]))
    )


def holm_correction(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number by Holm's step-down procedure (1979); nan counts
    as 1 and stays.
    """
    corrected, most = [math.nan] * len(values), 0.0
    known = sorted((p, place) for place, p in enumerate(values) if not math.isnan(p))
    for before, (p, place) in enumerate(known):
        corrected[place] = most = max(most, min(1.0, (len(values) - before) * p))
    return corrected


def rank_tables(
    runs: Iterable[Run], metric: str = "accuracy", select: str = "last", every: int = 1
) -> tuple[list[Table], MethodRanks]:
    """Make the tables of ranks and of pairs of methods; the notes stand below the last.

    metric: of ACCURACIES. select, every: as in `accuracy_table`. Raises FedpflError where there is
    too little to rank.
    """
    accuracies: dict[str, dict[str, float]] = defaultdict(dict)
    speaking: dict[tuple[str, str], tuple[Group, list[int]]] = {}
    for group, (label, column) in _labels(groups(runs), metric).items():
        rows = judged_rows(group, select, every)
        value, _ = mean_and_std([float(row.get(column, math.nan)) for row in rows.values()])
        if not math.isnan(value):
            accuracies[group.setting][label] = value
            speaking[group.setting, label] = group, [run.seed for run in rows]
    kept, left_out = drop_gaps(accuracies)
    try:
        result = rank_methods(kept)
    except FedpflError as error:
        raise FedpflError(". ".join((str(error), *left_out)).rstrip(".")) from None
    used = {
        f"{label} on {block}": one
        for (block, label), one in speaking.items()
        if block in kept.index and label in kept.columns
    }
    apart = [
        f"{name} ({', '.join(group.deviations)})"
        for name, (group, _) in used.items()
        if group.deviations
    ]
    unfinished = [
        f"{name} ({group.status})" for name, (group, _) in used.items() if not group.is_complete
    ]
    notes = [
        *left_out,
        *([f"Not configured as most of their block: {join_few(apart)}."] if apart else []),
        *([f"Not simply finished: {join_few(unfinished)}."] if unfinished else []),
        *attendance_notes([group for group, _ in used.values()]),
        *_about_power(*kept.shape),
    ]
    which = (
        "the last evaluation"
        if select == "last"
        else f"the evaluation that --select {select} chooses"
    )
    over = describe_seeds({name: seeds for name, (_, seeds) in used.items()})
    caption = (
        f"{METRICS[metric].label.capitalize()} at {which}, and below it the rank in its block: data set and partition; "
        f"{over.replace(' and sample standard deviation', '')}. Ties share their mean rank. "
    )
    if not metric.startswith("ft_") and any(label.startswith("FedAvg+FT") for label in kept):
        caption += "FedAvg is judged after fine-tuning. "
    if math.isnan(result.statistic):
        caption += "All ranks are equal: there is nothing to test."
    else:
        caption += (
            f"Friedman's test, corrected for ties: chi-square {result.statistic:.2f} with {len(kept.columns) - 1} "
            f"degrees of freedom, p {format_number('p', result.p)}."
        )
    return [_blocks(result, caption), _pairs(result, tuple(notes))], result


def drop_gaps(found: Mapping[str, Mapping[str, float]]) -> tuple[pd.DataFrame, list[str]]:
    """Return `[blocks, methods]` without gaps, and notes on what was left out.

    found: by block and method. As long as there is a gap, the method or block with the largest
    share of gaps goes.
    """
    frame = pd.DataFrame.from_dict(found, orient="index").sort_index()
    gone: dict[int, list[str]] = {0: [], 1: []}
    while frame.isna().any(axis=None):
        # Shares of gaps by block, and by method; of equal ones the block goes, which costs no
        # method.
        axis, name = max(
            ((axis, name) for axis in (0, 1) for name in frame.axes[axis]),
            key=lambda one: (frame.xs(one[1], axis=one[0]).isna().mean(), -one[0]),
        )
        frame = frame.drop(name, axis=axis)
        gone[axis].append(name)
    told = [
        f"Left out, as runs are missing: {words} {join_few(gone[axis], '; ')}."
        for axis, words in ((1, "the methods"), (0, "the blocks"))
        if gone[axis]
    ]
    return frame, told


def draw_rank_diagram(result: MethodRanks, path: Path) -> list[Path]:
    """Draw the critical-difference diagram: average ranks, and bars over methods that are not told
    apart.

    As in Benavoli et al. (JMLR 17, 2016), by Wilcoxon's tests rather than by differences of ranks.
    path: with a suffix or, for PNG and PDF, without. Returns the files written.
    """
    means = result.places.mean()
    count, bars = len(means), find_cliques(result)
    half = (count + 1) // 2

    def draw(ax: Axes, _: None) -> None:
        low = -1.6 - 0.25 * len(bars)
        for place, (name, rank) in enumerate(means.items()):
            left = place < half
            row = low - 0.9 * (place if left else count - 1 - place)
            side = 0.8 if left else count + 0.2
            ax.plot([rank, rank, side], [0, row, row], color="0.35", linewidth=0.8)
            text = f"{figures.legible_text(str(name))} ({rank:.2f})"
            ax.text(
                side,
                row,
                f"{text} " if left else f" {text}",
                ha="right" if left else "left",
                va="center",
            )
        for place, (first, last) in enumerate(bars):
            ends = [means.iloc[first] - 0.04, means.iloc[last] + 0.04]
            ax.plot(
                ends, [-0.7 - 0.45 * place] * 2, color="black", linewidth=3, solid_capstyle="butt"
            )
        ax.plot([1, count], [0, 0], color="black", linewidth=1)
        for tick in range(1, count + 1, -(-count // 12)):  # as many as have room
            ax.plot([tick, tick], [0, 0.3], color="black", linewidth=1)
            ax.text(tick, 0.5, str(tick), ha="center", va="bottom")
        ax.set(xlim=(1 - 0.75 * count, count + 0.75 * count), ylim=(low - 0.9 * half, 1.6))
        ax.set_axis_off()

    title = f"average rank over {len(result.places)} data sets and partitions\nbars: not told apart (Wilcoxon, Holm, 5 %)"
    return figures.draw_panels(
        {title: None}, path, draw, size=(8.0, 1.4 + 0.28 * half + 0.1 * len(bars))
    )


def find_cliques(result: MethodRanks) -> list[tuple[int, int]]:
    """Return the places of the first and last of each longest run of methods, by rank, no two of
    which differ.
    """
    names = [*result.places]
    differ = {frozenset((row.a, row.b)) for row in result.pairs.itertuples() if row.p_holm < LEVEL}
    ends: list[tuple[int, int]] = []
    for first in range(len(names)):
        last = first
        while last + 1 < len(names) and not any(
            frozenset((names[last + 1], own)) in differ for own in names[first : last + 1]
        ):
            last += 1
        if last > first and not (ends and ends[-1][1] >= last):
            ends.append((first, last))
    return ends


def _labels(gathered: Sequence[Group], metric: str) -> dict[Group, tuple[str, str]]:
    """What a configuration is called in every block, and its column: the method's name if it has
    one alone in each.
    """
    counts = Counter((group.setting, group.runs[0].method_title) for group in gathered)
    several = {called for (_, called), count in counts.items() if count > 1}
    found = {}
    for group in gathered:
        label, column = label_and_column(group, metric)
        called = group.runs[0].method_title
        if called not in several:
            label = called if column == metric else BASELINES["fedavg"]
        found[group] = label, column
    return found


def _about_power(blocks: int, methods: int) -> list[str]:
    """What so few blocks and methods cannot show."""
    told, count = [], methods * (methods - 1) // 2
    if blocks <= 10 or methods <= 5:
        told.append(
            "Friedman's chi-square is a good approximation from about 11 blocks and 6 methods on (Demšar 2006); "
            f"these are {blocks} and {methods}."
        )
    least = count * 2 / 2**blocks
    if blocks < MIN_PAIRS["wilcoxon"]:
        told.append(
            f"{blocks} blocks are too few for Wilcoxon's test, whose p cannot fall below {2 / 2**blocks:.3g} then: no "
            "two methods are told apart."
        )
    elif least > LEVEL:
        told.append(
            f"With {blocks} blocks and {count} pairs of methods no p corrected by Holm can fall below "
            f"{min(1.0, least):.3g}: no two methods are told apart."
        )
    return told


def _blocks(result: MethodRanks, caption: str) -> Table:
    means = result.places.mean()
    rows = [[Cell("average rank"), *(Cell(rank, kind="decimal") for rank in means)]]
    records = [{"section": "average", "method": name, "rank": rank} for name, rank in means.items()]
    records.append({"section": "friedman", "statistic": result.statistic, "p": result.p})
    for block, values in result.accuracy.iterrows():
        own = result.places.loc[block]
        cells = [Cell(values[name], below=f"{own[name]:g}") for name in values.index]
        rows.append([Cell(str(block)), *cells])
        records += [
            {
                "section": "block",
                "block": block,
                "method": name,
                "accuracy": values[name],
                "rank": own[name],
            }
            for name in values.index
        ]
    heads = (
        Column("data set and partition"),
        *(Column(str(name), "percent") for name in means.index),
    )
    return Table("Ranks", heads, rows, pd.DataFrame(records), caption, below="rank")


def _pairs(result: MethodRanks, notes: tuple[str, ...]) -> Table:
    columns = {
        "a": Column("A"),
        "b": Column("B"),
        "a_better": Column("A better in", "whole"),
        "b_better": Column("B better in", "whole"),
        "p": Column("p", "p"),
        "p_holm": Column("Holm's p", "p"),
    }
    caption = (
        "Wilcoxon's signed-rank test over blocks, two-sided; Holm's p: corrected for the number of pairs. Where fewer "
        "than 6 blocks differ at all, there is no p."
    )
    frame = pd.concat(
        [result.pairs.assign(section="pair"), pd.DataFrame({"section": "note", "note": notes})]
    )
    records = result.pairs.to_dict("records")
    return Table.of(
        records, columns, frame=frame, title="Pairs of methods", caption=caption, notes=notes
    )
