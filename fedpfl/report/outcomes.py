"""Figures of what methods come to: all clients, the worst of them, the traffic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report.fairness import (
    BASELINES,
    BaselineComparison,
    compare_with_baselines,
    label_and_column,
    worst_decile,
)
from fedpfl.report.figures import draw_panels, groups_by_setting, legible_text, line_style
from fedpfl.report.grouping import Group, common_task, groups, require_classes
from fedpfl.report.run import GIGABYTES, Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import mean_and_std
from fedpfl.report.tables import judged_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARES = np.linspace(0, 100, 101)
"""Where sorted clients are drawn, in percent of the clients."""


def clients_figure(runs: Iterable[Run], path: Path) -> list[Path]:
    """Draw the clients' accuracies from the worst to the best, a line per method.

    Clients are sorted within each seed; lines are means over seeds.

    Args:
        runs: the runs.
        path: without suffix.

    Returns:
        The files written.

    Raises:
        FedpflError: no run tells its clients' accuracies.
    """
    values = {one.group: [*one.accuracies.values()] for one in _compare_clients(runs)}
    style_numbers = number_styles(values, _judged_label)
    titles = ("clients, the worst first (%)", "accuracy (%)")
    return _draw_sorted(values, path, titles, style_numbers)


def gains_figure(runs: Iterable[Run], path: Path) -> list[Path]:
    """Draw how much more accurate clients are than under FedAvg+FT, a line per method.

    Args:
        runs: the runs.
        path: without suffix.

    Returns:
        The files written.

    Raises:
        FedpflError: no run has FedAvg+FT beside it.
    """
    title = BASELINES["fedavg"]
    gains = {}
    comparisons = _compare_clients(runs)
    for comparison in comparisons:
        pairs = comparison.pairs.get("fedavg", {}).values()
        if pairs:
            gains[comparison.group] = [both["accuracy"] - both["baseline"] for both in pairs]
    if not gains:
        raise FedpflError(
            f"no run here has {title} of the same data, split and seed beside it; run "
            "method=fedavg with eval.finetune_epochs=5"
        )
    # By all configurations, so that methods look as they do beside FedAvg.
    style_numbers = number_styles([one.group for one in comparisons], _judged_label)
    titles = ("clients, the least gain first (%)", f"gain over {title} (points)")
    return _draw_sorted(gains, path, titles, style_numbers)


def fairness_figure(runs: Iterable[Run], path: Path) -> list[Path]:
    """Draw the mean over clients against that of the worst decile, a point per method.

    Args:
        runs: the runs.
        path: without suffix.

    Returns:
        The files written.
    """
    values = {}
    for comparison in _compare_clients(runs):
        accuracies = comparison.accuracies.values()
        means = [float(of_seed.mean()) for of_seed in accuracies]
        worst = [float(worst_decile(of_seed).mean()) for of_seed in accuracies]
        values[comparison.group] = means, worst
    titles = ("mean over clients (%)", "worst decile of clients (%)")
    return _draw_points(values, path, titles)


def traffic_figure(
    runs: Iterable[Run], path: Path, select: str = "last", every: int = 1
) -> list[Path]:
    """Draw the gigabytes of all clients, both ways, against the accuracy, a point per method.

    Args:
        runs: the runs.
        path: without suffix.
        select: as in `accuracy_table`.
        every: as in `accuracy_table`.

    Returns:
        The files written.
    """
    shown_groups = groups(runs)
    task = common_task(shown_groups)
    values = {}
    for group in shown_groups:
        _, column = label_and_column(group, task.score)
        rows = judged_rows(group, select, every)
        gigabytes = [run.metric_value(GIGABYTES, row) for run, row in rows.items()]
        values[group] = gigabytes, [float(row.get(column, math.nan)) for row in rows.values()]
    y_title = f"{task.score_word}{' (%)' if task.unit else ''}"
    titles = ("GB down and up, all clients", y_title)
    return _draw_points(values, path, titles, is_scaled=True)


def sort_clients(values: pd.Series) -> np.ndarray:
    """Return sorted values at SHARES.

    That of client i of n stands at (i + 0.5) / n.
    """
    positions = 100 * (np.arange(len(values)) + 0.5) / len(values)
    return np.interp(SHARES, positions, np.sort(values.to_numpy(float)))


def _judged_label(group: Group) -> str:
    return label_and_column(group, group.task.score)[0]


def _compare_clients(runs: Iterable[Run]) -> list[BaselineComparison]:
    """Return every configuration's clients, beside the baselines'. Raises FedpflError."""
    shown_groups = groups(runs)
    require_classes(shown_groups, "a figure of clients")
    comparisons, notes = compare_with_baselines(shown_groups)
    filled = [comparison for comparison in comparisons if comparison.accuracies]
    if not filled:
        reasons = "".join(f". {note}" for note in notes[-1:])
        raise FedpflError(f"no run here has accuracies of its clients{reasons}")
    return filled


def _draw_sorted(
    values: Mapping[Group, Sequence[pd.Series]],
    path: Path,
    titles: tuple[str, str],
    style_numbers: Mapping[str, int],
) -> list[Path]:
    """Draw the clients' values from the least to the greatest, the mean over seeds."""
    x_title, y_title = titles

    def draw_panel(ax: Axes, members: Sequence[Group]) -> None:
        if "gain" in y_title:
            # Above it a client gains, below it is harmed.
            ax.axhline(0, color="0.5", linewidth=0.7)
        for group in members:
            label = _judged_label(group)
            # Sorted within a seed: the same share of clients is the worst in each.
            curves = [sort_clients(of_seed) for of_seed in values[group]]
            style = line_style(style_numbers[label]) | {"label": legible_text(label)}
            # Markers of lines that lie on each other would hide all but the last.
            markers = (style_numbers[label] % 10, 20)
            ax.plot(SHARES, np.mean(curves, axis=0), markevery=markers, **style)
        ax.set(xlabel=x_title, ylabel=y_title, xlim=(0, 100))

    return draw_panels(groups_by_setting(values), path, draw_panel)


def _draw_points(
    values: Mapping[Group, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    titles: tuple[str, str],
    is_scaled: bool = False,
) -> list[Path]:
    """Draw means over seeds along both axes, with bars where there are several seeds.

    Args:
        values: of each configuration, the values of its seeds along both axes.
        path: without suffix.
        titles: of the axes.
        is_scaled: whether the first axis fits gigabytes.
    """
    style_numbers = number_styles(values, _judged_label)

    def draw_panel(ax: Axes, members: Sequence[Group]) -> None:
        for group in members:
            means = []
            bars = []
            for of_axis in values[group]:
                mean, std = mean_and_std(of_axis)
                means.append(mean)
                bars.append(None if math.isnan(std) else std)
            label = _judged_label(group)
            # No line joins the points of different methods.
            style = line_style(style_numbers[label]) | {"linestyle": "none", "markersize": 6}
            style |= {"label": legible_text(label), "elinewidth": 0.8}
            # A method without a judged run or without recorded traffic has no point.
            if not any(map(math.isnan, means)):
                ax.errorbar(means[:1], means[1:], xerr=bars[0], yerr=bars[1], **style)
        if is_scaled:
            _scale_gigabytes(ax, itertools.chain(*(values[group][0] for group in members)))
        ax.set(xlabel=titles[0], ylabel=titles[1])

    return draw_panels(groups_by_setting(values), path, draw_panel)


def _scale_gigabytes(ax: Axes, gigabytes: Iterable[float]) -> None:
    """Let the axis be logarithmic where traffic differs by ten times; nothing stands at 0."""
    positive = [value for value in gigabytes if value > 0]
    low = min(positive, default=1.0)
    high = max(positive, default=1.0)
    # A point at 0 needs room for its left half.
    margin = 0.05 * high
    if high >= 10 * low:
        ax.set_xscale("symlog", linthresh=low)
        # Powers would be set by TeX's rules, which names with dollars have switched off.
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        margin = 0.2 * low
    ax.set_xlim(left=-margin)
