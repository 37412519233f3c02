"""Cost until a method reaches an accuracy: `python -m fedpfl.report reach --at 60`."""

from __future__ import annotations

from collections.abc import Iterable

from fedpfl.report.grouping import groups
from fedpfl.report.run import SPENDINGS, Run
from fedpfl.report.table import Column, Table, seed_statistics
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, row_cells


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
