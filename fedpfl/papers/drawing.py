"""Draw what figures of several papers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.papers.layout import Selection, closeness_to_paper
from fedpfl.record.columns import METRICS
from fedpfl.report.figures import draw_panels, groups_by_setting, legible_text, line_style
from fedpfl.report.grouping import Group, group_by
from fedpfl.report.run import Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import mean_and_std
from fedpfl.report.tables import judged_rows, no_validation_error
from fedpfl.report.text import join_few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ChooseGroups = Callable[[Sequence[Group]], list[Group]]
"""Returns the groups that a figure shows."""
Paint = Callable[[list[Group], Path, Selection], list[Path]]
"""Draws groups to a path without suffix; returns the files written."""
Points = list[tuple[float, tuple[float, float]]]
"""Positions on the x axis, each with the mean and the standard deviation over seeds."""
Decorate = Callable[["Axes", list[Group], list[float], Selection], None]
"""Adds to a panel of groups, given the values along its axis and the rule."""
SeedsByPosition = dict[float, list[float]]
"""A value per seed, by position on the x axis."""
LineColumns = Callable[[Group], dict[str, str]]
"""Names a group's lines, each with its column of rounds.csv; `{}` is the judged accuracy."""


class Figure(NamedTuple):
    """Declare a figure.

    Attributes:
        choose: Returns the groups that it shows.
        paint: Draws them.
        experiment: Which experiment makes its runs, if not its namesake.
    """

    choose: ChooseGroups
    paint: Paint
    experiment: str = ""

    def draw(self, name: str, groups: Sequence[Group], folder: Path, rule: Selection) -> list[Path]:
        """Draw `paper/figure` to `paper_figure.png` and `.pdf`.

        Raises:
            FedpflError: if no run fits.
        """
        chosen_groups = self.choose(groups)
        if not chosen_groups:
            experiment = self.experiment or name
            raise FedpflError(
                f"no runs for {name}; run `python -m fedpfl.train experiment={experiment}`"
            )
        return self.paint(chosen_groups, folder / name.replace("/", "_"), rule)


def groups_with_several_values(
    groups: Iterable[Group],
    fits: Callable[[Run], bool],
    key: Callable[[Run], Any],
) -> list[Group]:
    """Return the groups of those settings in which a key takes several values.

    Args:
        groups: Any.
        fits: Whether a run belongs to the figure.
        key: A run's value, None without one.
    """
    # A line through one value would be a point, and its panel would compare nothing.
    values_by_setting: dict[str, set[Any]] = {}
    fitting_groups = []
    for group in groups:
        run = group.runs[0]
        if fits(run) and key(run) is not None:
            fitting_groups.append(group)
            values_by_setting.setdefault(group.setting, set()).add(key(run))
    return [group for group in fitting_groups if len(values_by_setting[group.setting]) > 1]


def choose_nearest(
    groups: Sequence[Group],
    key: Callable[[Group], Any],
    setup_of: Callable[[Run], Values] = lambda run: {},
) -> list[Group]:
    """Return the group of each key that is nearest to the paper's, as in tables.

    Args:
        groups: Of the figure.
        key: Names a group's line, bar or point.
        setup_of: The published set-up of a run.
    """
    nearest_groups: dict[Any, Group] = {}
    for group in sorted(groups, key=lambda one: closeness_to_paper(one, setup_of(one.runs[0]))):
        # The nearest come last, and replace earlier ones.
        nearest_groups[key(group)] = group
    return [group for group in groups if group is nearest_groups[key(group)]]


def keep_nearest(groups: Sequence[Group], key: Callable[[Group], Any]) -> tuple[list[Group], str]:
    """Return the nearest group of each key, and a note on the rest."""
    kept_groups = choose_nearest(groups, key)
    notes = []
    if len(kept_groups) < len(groups):
        notes.append("several configurations fit: the longest of each")
    progress = dict.fromkeys(group.status for group in kept_groups if not group.is_complete)
    if progress:
        notes.append(f"not all planned rounds: {join_few(progress)}")
    return kept_groups, "; ".join(notes)


def values_by_seed(group: Group, rule: Selection, column: str = "{}") -> list[float]:
    """Return the judged accuracy of each seed, or another column, as in `LineColumns`."""
    rows = judged_rows(group, rule.select, rule.every).values()
    if rule.select == "validation" and not rows:
        raise no_validation_error(group)  # a figure has no notes that could say so
    return [float(row.get(column.format(rule.accuracy), math.nan)) for row in rows]


def draw_points(ax: Axes, points: Points, label: str, index: int) -> None:
    """Draw a line through means, with error bars where there is a deviation.

    Args:
        ax: Where.
        points: From left to right.
        label: For the legend.
        index: The line's number, which gives its look.
    """
    x_values = [x for x, _ in points]
    means = [mean for _, (mean, _) in points]
    deviations = [deviation for _, (_, deviation) in points]
    # matplotlib warns of nan in error bars; a single seed has no deviation.
    error_bars = None
    if not all(map(math.isnan, deviations)):
        error_bars = [0.0 if math.isnan(deviation) else deviation for deviation in deviations]
    ax.errorbar(
        x_values, means, yerr=error_bars, label=legible_text(label), capsize=2, **line_style(index)
    )


def draw_columns(ax: Axes, frame: pd.DataFrame) -> None:
    """Draw each column as a line over the index."""
    for number, (name, values) in enumerate(frame.items()):
        marker_step = max(1, len(values) // 10)
        style = line_style(number)
        ax.plot(values.index, values, label=legible_text(str(name)), markevery=marker_step, **style)


class Axis(NamedTuple):
    """Declare the x axis of a figure.

    Attributes:
        quantity: A group's value.
        label: Its label.
        scale: `linear`, `even` (values at equal distances), or `free`, without a tick at each value.
    """

    quantity: Callable[[Group], float | None]
    label: str
    scale: str = "linear"


def paint_accuracy_over(
    axis: Axis,
    lines: LineColumns,
    panel: Callable[[Group], str] = lambda group: group.setting,
    identify: Callable[[Group], Any] | None = None,
    decorate: Decorate | None = None,
) -> Paint:
    """Return a function that draws accuracy over a quantity.

    Args:
        axis: The x axis.
        lines: A group's lines.
        panel: A panel's title.
        identify: Names what configurations of one point share, by default the quantity.
        decorate: Adds to each panel.
    """
    quantity, label, scale = axis
    identify = identify or quantity

    def paint(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
        # ---- Step 1: names over all panels, so that a line has one colour in each.
        line_names = list(dict.fromkeys(name for group in groups for name in lines(group)))
        groups, note = keep_nearest(
            groups, lambda group: (panel(group), identify(group), *lines(group))
        )

        # ---- Step 2: a panel with groups as points of lines.
        def draw_panel(ax: Axes, members: list[Group]) -> None:
            values = sorted({x for x in map(quantity, members) if x is not None})
            positions = {x: float(i) if scale == "even" else x for i, x in enumerate(values)}
            for index, name in enumerate(line_names):
                seeds_by_position = {
                    positions[x]: values_by_seed(group, rule, lines(group)[name])
                    for group in members
                    if (x := quantity(group)) is not None and name in lines(group)
                }
                _draw_means(ax, seeds_by_position, name, index)
            if decorate:
                decorate(ax, members, values, rule)

            # ---- Step 3: axes, with a tick where there is a point.
            columns = {column for group in members for column in lines(group).values()}
            y_label = METRICS[rule.accuracy].label if columns == {"{}"} else "test accuracy (%)"
            ax.set(xlabel=label, ylabel=y_label)
            if scale == "free":
                ax.locator_params(axis="x", nbins=5)  # labels like 0.9975 are wide
                return
            rotation: Any = {"rotation": 45, "ha": "right"} if scale == "even" else {}
            ax.set_xticks([*positions.values()], [f"{x:.10g}" for x in positions], **rotation)

        return draw_panels(group_by(groups, panel), path, draw_panel, note)

    return paint


def _draw_means(ax: Axes, seeds_by_position: SeedsByPosition, name: str, index: int) -> None:
    """Draw means over seeds, with error bars of a deviation."""
    points = [(x, mean_and_std(seeds)) for x, seeds in sorted(seeds_by_position.items())]
    # A run that has not been judged yet, or by another rule.
    points = [point for point in points if not math.isnan(point[1][0])]
    if points:
        draw_points(ax, points, name, index)


def paint_means(name: Callable[[Group], str]) -> Paint:
    """Return a function that draws the mean of each group, with its deviation over seeds.

    Args:
        name: A group's name in the legend.
    """

    def paint(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
        groups, note = keep_nearest(groups, lambda group: (group.setting, name(group)))
        # Names over all panels, so that one has its colour and place in each.
        style_numbers = number_styles(groups, name)
        names = list(dict.fromkeys(map(name, groups)))

        def draw_panel(ax: Axes, members: list[Group]) -> None:
            for group in members:
                label = name(group)
                seeds = {float(names.index(label)): values_by_seed(group, rule)}
                _draw_means(ax, seeds, label, style_numbers[label])
            ax.set(xticks=[], ylabel=METRICS[rule.accuracy].label)

        return draw_panels(groups_by_setting(groups), path, draw_panel, note)

    return paint
