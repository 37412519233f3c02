"""Figures of what ran. One style, below; lines differ in dash and marker, so grey print is
readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from fedpfl.ground import drawing
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import atomic_output
from fedpfl.record.columns import METRICS
from fedpfl.report.compare import relabel_sides
from fedpfl.report.grouping import Group, group_by, groups
from fedpfl.report.page.data import AXIS_TITLES, mean_by_round, spent_at_rounds, spent_by_round
from fedpfl.report.run import Run
from fedpfl.report.tables import attendance_notes
from fedpfl.report.text import clip_text, wrap_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The style of every figure. Colours: Okabe and Ito's, told apart by people with any colour vision.
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "pdf.fonttype": 42,
    "font.size": 9,
    "text.parse_math": False,  # a name may hold dollars
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.8,
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1, 1, 1)),
    (0, (3, 1, 1, 1, 1, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
THIN_LINE_WIDTH = 0.7
PANEL = (4.6, 3.0)
"""Width and height of one panel in inches."""
SUFFIXES = (".png", ".pdf")

Members = TypeVar("Members")


def accuracy_figure(
    runs: Iterable[Run],
    path: Path,
    metric: str = "accuracy",
    label: Callable[[Group], str] = lambda group: group.method,
    along: str = "round",
) -> list[Path]:
    """Draw the accuracy of all clients over rounds, a panel per data set and partition; returns the
    files written.

    One line per configuration: the mean over seeds, a band of one sample standard deviation. Thin
    lines: the running mean of the cohort's pooled accuracy before local training, which is known in
    every round.
    path: without suffix. metric: of CURVES. label: what a line is called. along: of OVER. Raises
    FedpflError where no run has the metric.
    """
    gathered = groups(runs)
    if all(mean_by_round(group, metric).empty for group in gathered):
        if notes := attendance_notes(
            [group for group in gathered if any(run.is_untrained for run in group.reported_runs)]
        ):
            raise FedpflError(f"nothing to draw. {notes[0]}")
        raise FedpflError(
            f"no run here has {metric}: {METRICS[metric].label}; choose another --metric"
        )
    if along != "round" and all(spent_by_round(group)[along].isna().all() for group in gathered):
        raise FedpflError(f"no run here tells {AXIS_TITLES[along]}; choose another --over")
    methods = list(dict.fromkeys(map(label, gathered)))
    windows = {id(group): max(1, group.reported_runs[0].rounds_planned // 20) for group in gathered}
    cohort = metric in ("accuracy", "accuracy_pooled")

    def draw(ax: Axes, members: list[Group]) -> None:
        for group in members:
            draw_line(ax, group, metric, label(group), methods.index(label(group)), along)
        if max(len(run.evaluations) for group in members for run in group.reported_runs) > 2:
            # Limits from the evaluations alone: the first rounds of a cohort would squeeze the
            # rest.
            ax.set_ylim(ax.get_ylim())
        for group in members if cohort else ():
            thin = running_mean(mean_by_round(group, "cohort_before")["mean"], windows[id(group)])
            color = line_style(methods.index(label(group)))["color"]
            ax.plot(
                _at(group, thin, along),
                thin,
                color=color,
                linewidth=THIN_LINE_WIDTH,
                alpha=0.45,
                zorder=1,
            )
        ax.set(xlabel=AXIS_TITLES[along], ylabel=_title(metric), xlim=(0, None))

    note = f"thin: cohort before training, mean of {max(windows.values())} rounds" if cohort else ""
    return draw_panels(groups_by_setting(gathered), path, draw, note)


def comparison_figure(a: Group, b: Group, metric: str, path: Path) -> list[Path]:
    """Draw both curves of a metric. path: ends in .png or .pdf."""
    a, b = relabel_sides(a, b)
    tasks = groups_by_setting([a, b])

    def draw(ax: Axes, letters: str) -> None:
        for place, (letter, group) in enumerate(zip(letters, (a, b), strict=True)):
            name = group.method if len(tasks) == 1 else group.title
            draw_line(ax, group, metric, f"{letter}: {name}", place)
        ax.set(xlabel="round", ylabel=_title(metric), xlim=(0, None))

    return draw_panels({next(iter(tasks)) if len(tasks) == 1 else "": "AB"}, path, draw)


def groups_by_setting(gathered: Iterable[Group]) -> dict[str, list[Group]]:
    """Return groups by data set and partition."""
    return group_by(gathered, lambda group: group.setting)


def draw_line(
    ax: Axes, group: Group, metric: str, label: str, place: int, along: str = "round"
) -> None:
    """Draw a metric's mean over seeds with a band of one sample standard deviation. along: of OVER."""
    over, own = mean_by_round(group, metric), line_style(place)
    over.index = _at(group, over, along)
    absent = "; ".join(
        dict.fromkeys(
            run.low_attendance_note for run in group.reported_runs if run.low_attendance_note
        )
    )
    label = "\n".join(filter(None, (legible_text(label), clip_text(absent, 60))))
    ax.plot(
        over.index, over["mean"], label=label, **own, markevery=max(1, len(over) // 10), zorder=3
    )
    band = over[over["count"] > 1]
    if len(band):
        low, high = band["mean"] - band["std"], band["mean"] + band["std"]
        ax.fill_between(
            band.index, low, high, color=own["color"], alpha=0.15, linewidth=0, zorder=2
        )


def _at(group: Group, over: pd.DataFrame | pd.Series, along: str) -> pd.Index:
    """What was spent up to each round of an index, as the page counts it."""
    return pd.Index(spent_at_rounds(spent_by_round(group), along, over.index.to_numpy(float)))


def _title(metric: str) -> str:
    return "\n".join(wrap_lines(METRICS[metric].label, 40))


def legible_text(text: str) -> str:
    """Return text as a figure can show it: short, and without an underscore in front, which would
    hide it.
    """
    return clip_text(f" {text}" if text.startswith("_") else text, 60)


def line_style(place: int) -> dict[str, Any]:
    """Return colour, dash and marker of the line number `place`."""
    kinds = {"color": COLORS, "linestyle": DASHES, "marker": MARKERS}
    return {name: values[place % len(values)] for name, values in kinds.items()}


def running_mean(series: pd.Series, window: int) -> pd.Series:
    """Return the running mean over so many rounds."""
    return series.rolling(window, min_periods=1).mean()


def draw_panels(
    shown: Mapping[str, Members],
    path: Path,
    draw: Callable[[Axes, Members], None],
    note: str = "",
    size: tuple[float, float] | None = None,
) -> list[Path]:
    """Draw a panel per title, in rows of at most three, with one legend below; returns the files
    written.

    path: with a suffix or, for PNG and PDF, without. note: what thin lines are. size: of a panel in
    inches.
    """
    rc_context = drawing.load_matplotlib().rc_context
    from matplotlib.figure import Figure  # rather than pyplot: no window system, no global state

    across = min(3, len(shown))
    down = math.ceil(len(shown) / across)
    width, height = size or PANEL
    with rc_context(STYLE):
        figure = Figure(figsize=(width * across, height * down), layout="constrained")
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for ax, (heading, members) in zip(axes, shown.items(), strict=False):
            draw(ax, members)
            ax.set_title("\n".join(map(legible_text, heading.split("\n"))))
        for ax in axes[len(shown) :]:
            ax.set_visible(False)
        _legend(figure, axes[: len(shown)], note)
        return _save(figure, path)


def _legend(figure: Figure, axes: Iterable[Axes], note: str) -> None:
    from matplotlib.lines import Line2D

    lines: dict[str, Any] = {}
    for ax in axes:
        for line, label in zip(*ax.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
    if note:
        lines[note] = Line2D([], [], color="0.5", linewidth=THIN_LINE_WIDTH)
    if lines:
        width, height = figure.get_size_inches()
        # Inches that an entry takes at the legend's font size: its letters, its line and the gap.
        across = max(1, min(len(lines), int(width / (0.062 * max(map(len, lines)) + 0.65))))
        figure.set_size_inches(width, height + 0.18 * math.ceil(len(lines) / across))
        figure.legend(
            lines.values(), lines.keys(), loc="outside lower center", ncols=across, handlelength=3.2
        )


def _save(figure: Figure, path: Path) -> list[Path]:
    one = path.suffix in SUFFIXES
    written = [path] if one else [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    for target in written:
        # No date inside, so that equal runs give equal files.
        metadata = {"CreationDate": None} if target.suffix == ".pdf" else None
        with atomic_output(target) as file:
            figure.savefig(file, metadata=metadata)
    return written
