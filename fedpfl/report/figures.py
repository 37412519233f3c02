"""Figures of what ran, as PNG and PDF. One style, below; lines differ in dash and marker, so grey print is readable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report.load import Group, Run, groups
from fedpfl.report.tables import read_reference, reference_for
from fedpfl.report.text import clip

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The style of every figure. Colours: Okabe and Ito's, told apart by people with any colour vision.
STYLE: Any = {
    "figure.dpi": 150,
    "savefig.bbox": "tight",
    "pdf.fonttype": 42,
    "font.size": 9,
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
    "text.parse_math": False,  # a name may hold dollars
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
THIN = 0.7
PANEL = (4.6, 3.0)
"""Width and height of one panel in inches."""

LABELS = {
    "accuracy": "mean test accuracy over clients (%)",
    "accuracy_pooled": "pooled test accuracy (%)",
    "accuracy_worst10": "worst decile of clients (%)",
    "ft_accuracy": "mean test accuracy after fine-tuning (%)",
    "ft_accuracy_pooled": "pooled test accuracy after fine-tuning (%)",
    "loss": "test loss",
}


def accuracy_figure(
    runs: Iterable[Run],
    path: Path,
    metric: str = "accuracy",
    label: Callable[[Group], str] = lambda group: group.method,
) -> list[Path]:
    """Accuracy of all clients over rounds, a panel per data set and partition; returns the files written.

    One line per configuration: the mean over seeds, a band of one sample standard deviation. Thin lines: the running
    mean of the cohort's pooled accuracy before local training, which is known in every round.
    path: without suffix. label: what a line is called.
    """
    if metric not in LABELS:
        raise FedpflError(f"unknown metric {metric!r}; choose one of: {', '.join(LABELS)}")
    settings: dict[tuple[str, str], list[Group]] = {}
    for group in groups(runs):
        settings.setdefault((group.dataset, group.partition), []).append(group)
    if not settings:
        raise FedpflError("no runs to draw; run an experiment first")
    methods = list(dict.fromkeys(label(group) for members in settings.values() for group in members))
    cohort = metric in ("accuracy", "accuracy_pooled")
    with style():
        figure, axes = cells(len(settings))
        window = 1
        for ax, ((dataset, partition), members) in zip(axes, settings.items(), strict=False):
            for group in members:
                window = max(window, _window(group))
                _draw(ax, group, metric, {**look(methods.index(label(group))), "label": told(label(group))})
            if max(len(run.evaluations) for group in members for run in group.used) > 2:
                # Limits from the evaluations alone: the first rounds of a cohort would squeeze the rest.
                ax.set_ylim(ax.get_ylim())
            for group in members if cohort else ():
                thin = _smooth(over_seeds(group, "cohort_before")["mean"], _window(group))
                color = look(methods.index(label(group)))["color"]
                ax.plot(thin.index, thin, color=color, linewidth=THIN, alpha=0.45, zorder=1)
            ax.set(title=told(f"{dataset}, {partition}"), xlabel="round", ylabel=LABELS[metric])
            ax.set_xlim(left=0)
        note = f"thin: cohort before training, mean of {window} rounds" if cohort else ""
        finish(figure, axes[: len(settings)], note)
        return save(figure, path)


def curves(runs: Iterable[Run], reference: Path, path: Path, window: int = 10) -> list[Path]:
    """The cohort's accuracy in every round before and after local training, beside published curves (dashed,
    markers unfilled); running means over `window` rounds. Returns the files written.

    reference: a CSV with the columns method, round, accuracy_before, accuracy_after. A published curve takes the colour
    of the first own configuration of its method; without any of its method it is left out. path: without suffix.
    """
    published = read_reference(reference)
    gathered = groups(runs)
    if not gathered:
        raise FedpflError("no runs to draw; run an experiment first")
    settings = {(group.dataset, group.partition) for group in gathered}
    if len(settings) > 1:
        raise FedpflError(
            f"curves compares runs of one data set and partition; these are {len(settings)}: narrow the roots"
        )
    last = max(run.rounds["round"].max() for group in gathered for run in group.used)
    with style():
        figure, axes = panels(1, 2)
        for ax, when in zip(axes, ("before", "after"), strict=True):
            drawn: set[str] = set()
            for place, group in enumerate(gathered):
                own_look = look(place)
                own = _smooth(over_seeds(group, f"cohort_{when}")["mean"], window)
                ax.plot(own.index, own, label=told(group.method), **own_look, markevery=_every(len(own)))
                name = reference_for(group, published["method"].unique())
                if name is None or name in drawn:
                    continue
                drawn.add(name)
                rows = published[(published["method"] == name) & (published["round"] <= last)].set_index("round")
                line = _smooth(rows[f"accuracy_{when}"], window)
                faint = own_look | {
                    "linestyle": (0, (2, 1.2)),
                    "linewidth": 1.0,
                    "markerfacecolor": "white",
                    "alpha": 0.8,
                }
                ax.plot(line.index, line, label=told(f"published: {name}"), **faint, markevery=_every(len(line), 0.06))
            ax.set(title=f"{when} local training", xlabel="round")
            ax.set_xlim(left=0)
        axes[0].set_ylabel(f"cohort's pooled accuracy (%)\nrunning mean of {window} rounds")
        figure.suptitle(told(", ".join(next(iter(settings)))))
        finish(figure, axes)
        return save(figure, path)


def over_seeds(group: Group, column: str) -> pd.DataFrame:
    """Mean, sample standard deviation and number of seeds by round, where the column was recorded."""
    parts = [run.rounds[["round", column]] for run in group.used if column in run.rounds]
    if not parts:
        return pd.DataFrame({"mean": [], "std": [], "count": []})
    # A seed whose model was not finite has no number: a mean of the others would flatter.
    own = pd.concat(parts).groupby("round")[column]
    over = pd.DataFrame({"mean": own.mean(skipna=False), "std": own.std(skipna=False), "count": own.count()})
    return over[over["mean"].notna()]


def _draw(ax: Axes, group: Group, metric: str, own: dict[str, Any]) -> None:
    over = over_seeds(group, metric)
    ax.plot(over.index, over["mean"], **own, markevery=_every(len(over)), zorder=3)
    band = over[over["count"] > 1]
    if len(band):
        low, high = band["mean"] - band["std"], band["mean"] + band["std"]
        ax.fill_between(band.index, low, high, color=own["color"], alpha=0.15, linewidth=0, zorder=2)


def told(text: str) -> str:
    """Return text as a figure can show it: short, and with no underscore in front, which would hide it from legends."""
    return clip(f" {text}" if text.startswith("_") else text, 60)


def look(place: int) -> dict[str, Any]:
    """Colour, dash and marker of the line number `place`."""
    return {
        "color": COLORS[place % len(COLORS)],
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def _window(group: Group) -> int:
    return max(1, group.used[0].planned // 20)


def _smooth(series: pd.Series, window: int) -> pd.Series:
    return series.rolling(window, min_periods=1).mean()


def _every(points: int, offset: float = 0.0) -> int | tuple[int, int]:
    """Show about ten markers, however many points."""
    step = max(1, points // 10)
    return (int(offset * points), step) if offset else step


def style() -> Any:
    """A context in which figures have the house's style."""
    from matplotlib import rc_context

    return rc_context(STYLE)


def cells(count: int, across: int = 3) -> tuple[Figure, list[Axes]]:
    """Panels in rows of at most `across`; those beyond `count` are hidden."""
    across = min(across, count)
    figure, axes = panels(math.ceil(count / across), across)
    for ax in axes[count:]:
        ax.set_visible(False)
    return figure, axes


def panels(down: int, across: int, **kwargs: Any) -> tuple[Figure, list[Axes]]:
    """A grid of panels, row by row."""
    # Figure rather than pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PANEL[0] * across, PANEL[1] * down), layout="constrained")
    return figure, list(figure.subplots(down, across, squeeze=False, **kwargs).flat)


def finish(figure: Figure, axes: Sequence[Axes], note: str = "") -> None:
    """One legend below all panels; `note` explains the thin lines."""
    from matplotlib.lines import Line2D

    lines: dict[str, Any] = {}
    for ax in axes:
        for line, label in zip(*ax.get_legend_handles_labels(), strict=True):
            lines.setdefault(label, line)
    if note:
        lines[note] = Line2D([], [], color="0.5", linewidth=THIN)
    width, height = figure.get_size_inches()
    # Inches that an entry takes at the legend's font size: its letters, its line and the gap.
    across = max(1, min(len(lines), int(width / (0.062 * max(map(len, lines)) + 0.65))))
    figure.set_size_inches(width, height + 0.18 * math.ceil(len(lines) / across))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=across, handlelength=3.2)


def save(figure: Figure, path: Path) -> list[Path]:
    """Write PNG and PDF; returns both paths. path: without suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_name(path.name + suffix) for suffix in (".png", ".pdf")]
    for target in written:
        # No date inside, so that equal runs give equal files.
        figure.savefig(target, metadata={"CreationDate": None} if target.suffix == ".pdf" else None)
    return written
