"""Set the cohort's accuracy in every round beside a published curve, as a table and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report.figures import (
    draw_panels,
    groups_by_setting,
    legible_text,
    line_style,
    running_mean,
)
from fedpfl.report.grouping import Group, groups
from fedpfl.report.page.data import mean_by_round
from fedpfl.report.run import Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import ROW_COLUMNS, row_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 10
MOMENTS = ("before", "after")
"""Of local training."""
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


def curve_table(
    runs: Iterable[Run], reference: Path, spans: Sequence[tuple[int, int]] = ((1, 20), (21, 100))
) -> Table:
    """Return each run's distance from a published per-round curve, in points.

    Args:
        runs: Any; those without a published curve have no row.
        reference: A CSV with the columns method, round, accuracy_before, accuracy_after (percent).
        spans: First and last round of each row.
    """
    published_curves = read_reference(reference)
    records = []
    for group in groups(runs):
        name = find_reference(group, published_curves["method"].unique())
        if name is None:
            continue
        published_curve = published_curves[published_curves["method"] == name]
        for run in group.reported_runs:
            both_curves = run.rounds.merge(published_curve, on="round")
            run_fields = row_cells(group) | {"seed": run.seed, "reference": name}
            for distances in _distances_by_span(both_curves, spans):
                records.append(run_fields | distances)
    return Table.of(records, CURVE_COLUMNS, caption=CURVE_CAPTION, by=2)


def _distances_by_span(
    both_curves: pd.DataFrame, spans: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the distances of two curves in each span that has rounds of both."""
    for first, last in spans:
        rows = both_curves[both_curves["round"].between(first, last)]
        if rows.empty:
            continue
        distances = {
            "first": int(rows["round"].min()),
            "last": int(rows["round"].max()),
        }
        for moment in MOMENTS:
            differences = rows[f"cohort_{moment}"] - rows[f"accuracy_{moment}"]
            distances[f"{moment}_absolute"] = differences.abs().mean()
            distances[f"{moment}_signed"] = differences.mean()
        yield distances


def draw_curves(runs: Iterable[Run], reference: Path, path: Path) -> list[Path]:
    """Draw the cohort's accuracy in every round beside published curves, dashed with open markers.

    All are running means over WINDOW rounds. A published curve takes the colour of the first own
    configuration of its method; without any of its method it is left out.

    Args:
        runs: Of one data set and partition.
        reference: A CSV with the columns method, round, accuracy_before, accuracy_after.
        path: Without suffix.

    Returns:
        The files written.
    """
    # ---- Step 1: runs of one setting, and how long they are.
    published_curves = read_reference(reference)
    run_groups = groups(runs)
    settings = list(groups_by_setting(run_groups))
    if len(settings) > 1:
        raise FedpflError(
            f"curves compares runs of one data set and partition; these are {len(settings)}: "
            "narrow the roots"
        )
    style_numbers = number_styles(run_groups)
    last_round = max(run.rounds_done for group in run_groups for run in group.reported_runs)

    def draw_panel(ax: Axes, moment: str) -> None:
        # ---- Step 2: own curves, and the published one of each method once.
        drawn_names: set[str] = set()
        for group in run_groups:
            style = line_style(style_numbers[group.method])
            # A cohort's accuracy jumps by points from round to round.
            curve = running_mean(mean_by_round(group, f"cohort_{moment}")["mean"], WINDOW)
            ax.plot(
                curve.index,
                curve,
                label=legible_text(group.method),
                **style,
                markevery=max(1, len(curve) // 10),
            )
            name = find_reference(group, published_curves["method"].unique())
            if name is None or name in drawn_names:
                continue
            drawn_names.add(name)
            # A published curve may be longer, and would squeeze our curves.
            is_shown = (published_curves["method"] == name) & (
                published_curves["round"] <= last_round
            )
            rows = published_curves[is_shown].set_index("round")
            _draw_published_curve(ax, rows[f"accuracy_{moment}"], name, style)
        ax.set(
            xlabel="round",
            ylabel=f"cohort's pooled accuracy (%)\nrunning mean of {WINDOW} rounds",
            xlim=(0, None),
        )

    # ---- Step 3: a panel before local training, and one after it.
    titles = {f"{settings[0]}, {moment} local training": moment for moment in MOMENTS}
    return draw_panels(titles, path, draw_panel)


def _draw_published_curve(
    ax: Axes, accuracies: pd.Series, name: str, look_of_group: dict[str, Any]
) -> None:
    """Draw a published curve in the colour of a group."""
    curve = running_mean(accuracies, WINDOW)
    style: Any = look_of_group | {
        "linestyle": (0, (2, 1.2)),
        "linewidth": 1.0,
        "markerfacecolor": "white",
    }
    # Markers begin later than the group's, so that none hides another.
    marker_positions = (int(0.06 * len(curve)), max(1, len(curve) // 10))
    ax.plot(
        curve.index,
        curve,
        label=legible_text(f"published: {name}"),
        alpha=0.8,
        markevery=marker_positions,
        **style,
    )


def read_reference(path: Path) -> pd.DataFrame:
    """Read published per-round curves.

    Raises:
        FedpflError: if the file is no such thing.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise FedpflError(
            f"{path}: cannot be read as CSV ({type(error).__name__}); "
            f"give {', '.join(REFERENCE_COLUMNS)}"
        ) from None
    for name in REFERENCE_COLUMNS:
        if name not in frame:
            raise FedpflError(
                f"{path}: lacks the column {name}; needed: {', '.join(REFERENCE_COLUMNS)}"
            )
    for name in REFERENCE_COLUMNS[1:]:
        if frame[name].dtype.kind not in "if":
            raise FedpflError(f"{path}: the column {name} holds what is no number")
    return frame


def find_reference(group: Group, names: Iterable[str]) -> str | None:
    """Return the published curve of a group's method, None without one.

    It is named like the method, or begins with its name and an underscore.
    """
    method = group.runs[0].method_name
    for name in names:
        # A file may have several curves of a method; the first one counts.
        if name == method or str(name).startswith(f"{method}_"):
            return name
    return None
