"""What it takes until a method reaches an accuracy: `python -m fedpfl.report reach --at 60`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedpfl.report.figures import draw_line, draw_panels, groups_by_setting
from fedpfl.report.grouping import Group, groups
from fedpfl.report.run import SPENDINGS, Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import Column, Table, seed_statistics
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, row_cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reach_table(runs: Iterable[Run], percent: float) -> Table:
    """Make a table of rounds, gigabytes and simulated hours until an accuracy is reached.

    Args:
        runs: the runs.
        percent: of the mean over all clients; other tasks' scores have their unit.
    """
    records = []
    for group in groups(runs):
        record = row_cells(group)
        for name in SPENDINGS:
            values = [run.metric_value(f"{name}@{percent:g}", {}) for run in group.reported_runs]
            record |= seed_statistics(name, values)
        records.append(record)
    columns = ROW_COLUMNS | {
        name: COLUMNS.get(name, Column("rounds", "number")) for name in SPENDINGS
    }
    caption = f"Until {percent:g} % are first reached; mean over seeds, nothing where one does not."
    return Table.of(records, columns, title="Reached", caption=caption, by=2)


def reach_figure(runs: Iterable[Run], path: Path, percent: float) -> list[Path]:
    """Draw accuracy over rounds with a line at `percent`; return the files written."""
    shown_groups = groups(runs)
    style_numbers = number_styles(shown_groups)

    def draw_panel(ax: Axes, members: list[Group]) -> None:
        for group in members:
            name = group.method
            draw_line(ax, group, group.task.score, name, style_numbers[name])
        # Where it crosses a curve is what the table tells.
        ax.axhline(percent, color="0.5", linewidth=0.7)
        ax.set(xlabel="round", ylabel=members[0].task.score_word, xlim=(0, None))

    return draw_panels(groups_by_setting(shown_groups), path, draw_panel)
