"""Figures of what methods come to: all clients, the worst of them, the traffic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from fedpfl.report.grouping import Group, groups, require_classes
from fedpfl.report.run import GIGABYTES, Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import confidence_half_width, mean_and_std
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
    comparisons = _compare_clients(runs)
    values = {one.group: [*one.accuracies.values()] for one in comparisons}
    return _draw_sorted(values, path, "clients, the worst first (%)", "accuracy (%)")


def gains_figure(runs: Iterable[Run], path: Path, baseline: str = "fedavg") -> list[Path]:
    """Draw how much more accurate clients are than under a baseline, a line per method.

    Args:
        runs: the runs.
        path: without suffix.
        baseline: of BASELINES.

    Returns:
        The files written.

    Raises:
        FedpflError: no run has the baseline beside it.
    """
    title = BASELINES[baseline]
    gains = {}
    for comparison in _compare_clients(runs):
        pairs = comparison.pairs.get(baseline, {}).values()
        if pairs:
            gains[comparison.group] = [both["accuracy"] - both["baseline"] for both in pairs]
    if not gains:
        raise FedpflError(
            f"no run here has {title} of the same data, split and seed beside it; run "
            f"method={baseline} with eval.finetune_epochs=5"
        )
    y_title = f"gain over {title} (points)"
    return _draw_sorted(gains, path, "clients, the least gain first (%)", y_title)


def _draw_sorted(
    values: dict[Group, list[pd.Series]], path: Path, x_title: str, y_title: str
) -> list[Path]:
    """Draw the clients' values from the least to the greatest, the mean over seeds."""
    style_numbers = number_styles(values, _judged_label)

    def draw_panel(ax: Axes, members: Sequence[Group]) -> None:
        if "gain" in y_title:
            # Above it a client gains, below it is harmed.
            ax.axhline(0, color="0.5", linewidth=0.7)
        for group in members:
            label = _judged_label(group)
            # Sorted within a seed: the same share of clients is the worst in each.
            curves = [sort_clients(of_seed) for of_seed in values[group]]
            # Markers of lines that lie on each other would hide all but the last.
            first_marker = style_numbers[label] % 10
            ax.plot(
                SHARES,
                np.mean(curves, axis=0),
                label=legible_text(label),
                markevery=(first_marker, 20),
                **line_style(style_numbers[label]),
            )
        ax.set(xlabel=x_title, ylabel=y_title, xlim=(0, 100))

    return draw_panels(groups_by_setting(values), path, draw_panel)


def fairness_figure(runs: Iterable[Run], path: Path, interval: bool = False) -> list[Path]:
    """Draw the mean over clients against that of the worst decile, a point per method.

    Args:
        runs: the runs.
        path: without suffix.
        interval: whether bars are 95 % confidence intervals rather than deviations over seeds.

    Returns:
        The files written.
    """
    comparisons = {one.group: one for one in _compare_clients(runs)}
    style_numbers = number_styles(comparisons, _judged_label)

    def draw_panel(ax: Axes, members: Sequence[Group]) -> None:
        for group in members:
            seeds = comparisons[group].accuracies.values()
            means = [float(values.mean()) for values in seeds]
            worst = [float(worst_decile(values).mean()) for values in seeds]
            label = _judged_label(group)
            _draw_point(ax, (means, worst), label, style_numbers[label], interval)
        ax.set(xlabel="mean over clients (%)", ylabel="worst decile of clients (%)")

    return draw_panels(groups_by_setting(comparisons), path, draw_panel)


def traffic_figure(
    runs: Iterable[Run], path: Path, select: str = "last", every: int = 1, interval: bool = False
) -> list[Path]:
    """Draw the gigabytes of all clients, both ways, against the accuracy, a point per method.

    Args:
        runs: the runs.
        path: without suffix.
        select: as in `accuracy_table`.
        every: as in `accuracy_table`.
        interval: whether bars are 95 % confidence intervals rather than deviations over seeds.

    Returns:
        The files written.
    """
    # A method has one colour in all panels.
    shown_groups = groups(runs)
    style_numbers = number_styles(shown_groups, _judged_label)

    def draw_panel(ax: Axes, members: Sequence[Group]) -> None:
        all_gigabytes = []
        for group in members:
            label, column = label_and_column(group, group.task.score)
            rows = judged_rows(group, select, every)
            gigabytes = [run.metric_value(GIGABYTES, row) for run, row in rows.items()]
            scores = [float(row.get(column, math.nan)) for row in rows.values()]
            _draw_point(ax, (gigabytes, scores), label, style_numbers[label], interval)
            all_gigabytes += gigabytes
        _scale_gigabytes(ax, all_gigabytes)
        task = members[0].task
        unit = " (%)" if task.unit else ""
        ax.set(xlabel="GB down and up, all clients", ylabel=f"{task.score_word}{unit}")

    return draw_panels(groups_by_setting(shown_groups), path, draw_panel)


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


def _draw_point(
    ax: Axes,
    values: tuple[Sequence[float], Sequence[float]],
    label: str,
    style_number: int,
    interval: bool,
) -> None:
    """Draw means over seeds along both axes, with bars where there are several seeds."""
    means = []
    bars = []
    for of_axis in values:
        mean, std = mean_and_std(of_axis)
        half_width = confidence_half_width(std, len(of_axis)) if interval else std
        means.append(mean)
        bars.append(0.0 if math.isnan(half_width) else half_width)
    # A method without a judged run or without recorded traffic has no point.
    if any(map(math.isnan, means)):
        return
    # No line joins the points of different methods.
    style = line_style(style_number) | {"linestyle": "none", "markersize": 6}
    ax.errorbar(
        [means[0]],
        [means[1]],
        xerr=bars[0] or None,
        yerr=bars[1] or None,
        label=legible_text(label),
        elinewidth=0.8,
        **style,
    )


def _scale_gigabytes(ax: Axes, gigabytes: Iterable[float]) -> None:
    """Let the axis be logarithmic where traffic differs by ten times; nothing stands at 0."""
    positive = [value for value in gigabytes if value > 0]
    if positive and max(positive) >= 10 * min(positive):
        ax.set_xscale("symlog", linthresh=min(positive))
        # Powers would be set by TeX's rules, which names with dollars have switched off.
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_xlim(left=-0.2 * min(positive))
        return
    # A point at 0 needs room for its left half.
    ax.set_xlim(left=-0.05 * max(positive, default=1.0))
