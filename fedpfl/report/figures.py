"""Figures of runs, all in the style below.

Lines differ in dash and marker, so that a grey print is readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedpfl.ground import drawing
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import atomic_output
from fedpfl.ground.records import Record
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import Group, common_task, group_by, groups, task_metric
from fedpfl.report.page.data import AXIS_TITLES, mean_by_round, spent_at_rounds, spent_by_round
from fedpfl.report.run import Run
from fedpfl.report.styles import COLORS, number_styles
from fedpfl.report.tables import attendance_notes
from fedpfl.report.text import clip_text, wrap_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The style of every figure.
STYLE: Any = {
    "figure.dpi": 200,
    "savefig.bbox": "tight",
    "pdf.fonttype": 42,
    "font.size": 8,
    "text.parse_math": False,  # a name may hold dollars
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.8,
}
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PANEL_SIZE = (3.4, 2.3)
"""Width and height of one panel in inches: a column of a paper with two."""
SUFFIXES = (".png", ".pdf")

Members = TypeVar("Members")


def accuracy_figure(
    runs: Iterable[Run],
    path: Path,
    metric: str = "accuracy",
    label: Callable[[Group], str] = lambda group: group.method,
    along: str = "round",
) -> list[Path]:
    """Draw the accuracy of all clients over rounds, a panel per data set and partition.

    One line per configuration: the mean over seeds, a band of one sample standard deviation.

    Args:
        runs: the runs.
        path: with a suffix or, for PNG and PDF, without.
        metric: of CURVES; `accuracy` means the score of the runs' task.
        label: the name of a line.
        along: of AXIS_TITLES.

    Returns:
        The files written.

    Raises:
        FedpflError: no run has the metric.
    """
    shown_groups = groups(runs)
    metric = task_metric(metric, common_task(shown_groups))
    _require_curves(shown_groups, metric, along)
    style_numbers = number_styles(shown_groups, label)

    def draw_panel(ax: Axes, members: list[Group]) -> None:
        for group in members:
            name = label(group)
            draw_line(ax, group, metric, name, style_numbers[name], along)
        y_title = "\n".join(wrap_lines(METRICS[metric].label, 40))
        ax.set(xlabel=AXIS_TITLES[along], ylabel=y_title, xlim=(0, None))

    return draw_panels(groups_by_setting(shown_groups), path, draw_panel)


def groups_by_setting(shown_groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return groups by data set and partition."""
    return group_by(shown_groups, lambda group: group.setting)


def draw_line(
    ax: Axes,
    group: Group,
    metric: str,
    label: str,
    line_number: int,
    along: str = "round",
) -> None:
    """Draw a metric's mean over seeds with a band of one sample standard deviation.

    Args:
        ax: the panel.
        group: the configuration.
        metric: the column of rounds.csv.
        label: the name of the line.
        line_number: decides on colour, dash and marker.
        along: of AXIS_TITLES.
    """
    # ---- Step 1: the curve, its label, and a note where few clients took part.
    curve = mean_by_round(group, metric)
    style = line_style(line_number)
    x = spent_at_rounds(spent_by_round(group), along, curve.index.to_numpy(float))
    attendance = dict.fromkeys(run.low_attendance_note for run in group.reported_runs)
    note = clip_text("; ".join(filter(None, attendance)), 60)
    label = f"{legible_text(label)}\n{note}".strip("\n")

    # ---- Step 2: the line of means with some ten markers, and the band of several seeds.
    marker_step = max(1, len(curve) // 10)
    ax.plot(x, curve["mean"], label=label, **style, markevery=marker_step, zorder=3)
    low = curve["mean"] - curve["std"]
    high = curve["mean"] + curve["std"]
    ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0, zorder=2)


def legible_text(text: str) -> str:
    """Return a short text without a leading underscore, which would hide it in a figure."""
    return clip_text(f" {text}" if text.startswith("_") else text, 60)


def line_style(line_number: int) -> Record:
    """Return colour, dash and marker of a line."""
    return {
        "color": COLORS[line_number % len(COLORS)],
        "linestyle": DASHES[line_number % len(DASHES)],
        "marker": MARKERS[line_number % len(MARKERS)],
    }


def draw_panels(
    members_by_title: Mapping[str, Members],
    path: Path,
    draw: Callable[[Axes, Members], None],
    note: str = "",
    size: tuple[float, float] | None = None,
) -> list[Path]:
    """Draw a panel per title, in rows of at most three, with one legend below.

    Args:
        members_by_title: what each panel shows.
        path: with a suffix or, for PNG and PDF, without.
        draw: draws a panel.
        note: on thin lines, above the legend.
        size: of a panel in inches.

    Returns:
        The files written.

    Raises:
        FedpflError: no panel has a mark.
    """
    rc_context = drawing.load_matplotlib().rc_context
    from matplotlib.figure import Figure  # rather than pyplot: no window system, no global state

    # ---- Step 1: the panels
    panel_count = len(members_by_title)
    column_count = min(3, panel_count)
    row_count = math.ceil(panel_count / column_count)
    width, height = size or PANEL_SIZE
    with rc_context(STYLE):
        figure = Figure(figsize=(width * column_count, height * row_count), layout="constrained")
        axes = list(figure.subplots(row_count, column_count, squeeze=False).flat)
        has_marks = False
        for ax, (title, members) in zip(axes, members_by_title.items(), strict=False):
            draw(ax, members)
            # A line without values is data to matplotlib, but widens no limits.
            has_marks |= math.isfinite(ax.dataLim.height)
            ax.set_title("\n".join(map(legible_text, title.split("\n"))))
        if not has_marks:
            raise FedpflError(f"nothing to draw in {path.name}: no line has two points with values")
        for ax in axes[panel_count:]:
            ax.set_visible(False)
        _draw_legend(figure, axes[:panel_count], note)
        return _save_figure(figure, path)


def _require_curves(shown_groups: Sequence[Group], metric: str, along: str) -> None:
    """Raise FedpflError where there is nothing to draw."""
    if all(mean_by_round(group, metric).empty for group in shown_groups):
        for note in attendance_notes(shown_groups):
            raise FedpflError(f"nothing to draw. {note}")
        label = METRICS[metric].label
        raise FedpflError(f"no run here has {metric}: {label}; choose another --metric")
    if along != "round" and all(spent_by_round(one)[along].isna().all() for one in shown_groups):
        raise FedpflError(f"no run here tells {AXIS_TITLES[along]}; choose another --over")


def _draw_legend(figure: Figure, axes: Iterable[Axes], note: str) -> None:
    lines: Record = {}
    for ax in axes:
        for line, label in zip(*ax.get_legend_handles_labels(), strict=True):
            # A label has one style in all panels, so its first line will do.
            lines.setdefault(label, line)
    if not lines:
        return
    width, height = figure.get_size_inches()
    # Inches that an entry takes at the legend's font size: its letters, its line and the gap.
    entry_width = 0.055 * max(map(len, lines)) + 0.55
    column_count = max(1, min(len(lines), int(width / entry_width)))
    # The figure grows by its legend, so that thirteen methods leave the panels their size.
    row_count = math.ceil(len(lines) / column_count) + bool(note)
    figure.set_size_inches(width, height + 0.15 * row_count)
    figure.legend(
        lines.values(),
        lines.keys(),
        loc="outside lower center",
        ncols=column_count,
        handlelength=2.6,
        columnspacing=1.0,
        title=note or None,
        title_fontsize=STYLE["legend.fontsize"],
    )


def _save_figure(figure: Figure, path: Path) -> list[Path]:
    """Save a figure to a path with a suffix, or with each of SUFFIXES."""
    targets = [path]
    if path.suffix not in SUFFIXES:
        targets = [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    for target in targets:
        # No date inside, so that equal runs give equal files.
        metadata = {"CreationDate": None} if target.suffix == ".pdf" else None
        with atomic_output(target) as file:
            figure.savefig(file, metadata=metadata)
    return targets
