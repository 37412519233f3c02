"""Figures of what methods come to for their clients."""

from __future__ import annotations

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
)
from fedpfl.report.figures import draw_panels, groups_by_setting, legible_text, line_style
from fedpfl.report.grouping import Group, groups, require_classes
from fedpfl.report.run import Run
from fedpfl.report.styles import number_styles

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


def sort_clients(values: pd.Series) -> np.ndarray:
    """Return sorted values at SHARES.

    That of client i of n stands at (i + 0.5) / n.
    """
    positions = 100 * (np.arange(len(values)) + 0.5) / len(values)
    return np.interp(SHARES, positions, np.sort(values.to_numpy(float)))


def _judged_label(group: Group) -> str:
    return label_and_column(group)[0]


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
