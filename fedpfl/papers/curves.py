"""Set the cohort's accuracy in every round beside a published curve, as a table and a figure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Record
from fedpfl.report.figures import draw_panels, legible_text, line_style
from fedpfl.report.grouping import Group, groups
from fedpfl.report.page.data import mean_by_round
from fedpfl.report.run import Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import ROW_COLUMNS, row_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 10
SPAN_ENDS = (0, 20, 100)
"""Rounds between which a row of the table is a mean."""
MOMENTS = ("before", "after")
"""Of local training."""
PUBLISHED_STYLE = {
    "alpha": 0.8,
    "linestyle": (0, (2, 1.2)),
    "linewidth": 1.0,
    "markerfacecolor": "white",
}
REFERENCE_COLUMNS = ["method", "round", "accuracy_before", "accuracy_after"]
CURVE_COLUMNS = ROW_COLUMNS | {
    "seed": Column("seed", "whole"),
    "reference": Column("reference"),
    "first": Column("from", "whole", "rounds"),
    "last": Column("to", "whole", "rounds"),
    "before_absolute": Column("absolute", "percent", "before"),
    "before_signed": Column("signed", "difference", "before"),
    "after_absolute": Column("absolute", "percent", "after"),
    "after_signed": Column("signed", "difference", "after"),
}
CURVE_CAPTION = (
    "Distance from the published per-round accuracy of the cohort's clients (pooled, before and "
    "after local training) in points: mean absolute and mean signed difference (own minus "
    "published)."
)


def curve_table(runs: Iterable[Run], reference: Path) -> Table:
    """Return each run's distance from a published per-round curve, in points.

    Args:
        runs: Any; those without a published curve have no row.
        reference: A CSV with REFERENCE_COLUMNS; accuracies are percent.
    """
    published_curves = read_reference(reference)
    records = []
    for group in groups(runs):
        name = find_reference(group, published_curves)
        for run in group.reported_runs if name else ():
            both_curves = run.rounds.merge(published_curves[name], on="round")
            spans = pd.cut(both_curves["round"], SPAN_ENDS)
            for _, rows in both_curves.groupby(spans, observed=True):
                record = row_cells(group) | {"seed": run.seed, "reference": name}
                record |= {"first": rows["round"].min(), "last": rows["round"].max()}
                for moment in MOMENTS:
                    differences = rows[f"cohort_{moment}"] - rows[f"accuracy_{moment}"]
                    record[f"{moment}_absolute"] = differences.abs().mean()
                    record[f"{moment}_signed"] = differences.mean()
                records.append(record)
    return Table.of(records, CURVE_COLUMNS, caption=CURVE_CAPTION, by=2)


def draw_curves(runs: Iterable[Run], reference: Path, path: Path) -> list[Path]:
    """Draw the cohort's accuracy in every round beside published curves, which are dashed.

    All are running means over WINDOW rounds. A published curve takes the colour of the first own
    configuration of its method; without any of its method it is left out.

    Args:
        runs: Of one data set and partition.
        reference: A CSV with REFERENCE_COLUMNS.
        path: Without suffix.

    Returns:
        The files written.
    """
    published_curves = read_reference(reference)
    run_groups = groups(runs)
    style_numbers = number_styles(run_groups)
    names = [find_reference(group, published_curves) for group in run_groups]

    def draw_panel(ax: Axes, moment: str) -> None:
        for number, (group, name) in enumerate(zip(run_groups, names, strict=True)):
            style = line_style(style_numbers[group.method])
            own_curve = mean_by_round(group, f"cohort_{moment}")["mean"]
            _draw_curve(ax, own_curve, group.method, style)
            if name and name not in names[:number]:
                accuracies = published_curves[name].set_index("round")[f"accuracy_{moment}"]
                # Up to the run's last round, as a longer curve would squeeze it.
                shown = accuracies.loc[: own_curve.index.max()]
                _draw_curve(ax, shown, f"published: {name}", style | PUBLISHED_STYLE)
        ylabel = f"cohort's pooled accuracy (%)\nrunning mean of {WINDOW} rounds"
        ax.set(xlabel="round", ylabel=ylabel, xlim=(0, None))

    titles = {f"{run_groups[0].setting}, {moment} local training": moment for moment in MOMENTS}
    return draw_panels(titles, path, draw_panel)


def _draw_curve(ax: Axes, curve: pd.Series, label: str, style: Record) -> None:
    # A cohort's accuracy jumps by points from round to round.
    means = curve.rolling(WINDOW, min_periods=1).mean()
    marker_step = max(1, len(means) // 10)
    ax.plot(means.index, means, label=legible_text(label), markevery=marker_step, **style)


def read_reference(path: Path) -> dict[str, pd.DataFrame]:
    """Read published per-round curves by name. Raises FedpflError."""
    try:
        types = {"method": str, **dict.fromkeys(REFERENCE_COLUMNS[1:], float)}
        frame = pd.read_csv(path, usecols=REFERENCE_COLUMNS, dtype=types)
    except (OSError, ValueError) as error:
        raise FedpflError(
            f"{path}: cannot be read ({error_text(error)}); "
            f"give a CSV with the columns {', '.join(REFERENCE_COLUMNS)}"
        ) from None
    return dict(iter(frame.groupby("method", sort=False)))


def find_reference(group: Group, names: Iterable[str]) -> str:
    """Find the first published curve that begins with a group's method, or ""."""
    method = group.runs[0].method_name
    return next((name for name in names if f"{name}_".startswith(f"{method}_")), "")
