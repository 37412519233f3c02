"""Make docs/status.md: how much of each published table and figure has been run.

    python scripts/status.py [--write]

A row for each table and figure that `report paper` knows, but for figures of another one's runs. Published numbers are those of
`fedpfl/papers/*/published.csv`, own ones those of docs/results/; remarks stand in
docs/results/status.csv, a line a table or figure.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fedpfl.papers.layout import Layout
from fedpfl.papers.published import Key, Published, lookup, published_numbers
from fedpfl.papers.registry import NAMES, TABLES
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.text import letters_and_digits
from reproduction import METHOD_NAMES, fill_page, markdown, read_best_of_four, read_results

PAGE = Path(__file__).parents[1] / "docs" / "status.md"
RESULTS = PAGE.parent / "results" / "status.csv"
STATES = ("never", "small", "part", "whole")


class Cell(NamedTuple):
    """Name a published number.

    Attributes:
        table: `paper/name`.
        method: As published.
        dataset: Its title.
        setting: As published.
    """

    table: str
    method: str
    dataset: str
    setting: str


def find_published(cell: Cell) -> float | None:
    """Return the number that a table has in a cell, or a paper's text of a figure."""
    layout = TABLES.get(cell.table)
    if isinstance(layout, Layout):
        number = lookup((layout.source, layout.metric, cell.method, cell.dataset, cell.setting))
        return number.value if number else None
    wanted = (letters_and_digits(cell.method), cell.dataset, cell.setting)
    values = [number.value for key, number in find_quoted(cell.table).items() if key[2:] == wanted]
    return values[0] if values else None


def count_published(name: str) -> int:
    """Return how many numbers a table has, or a paper's text of a figure."""
    layout = TABLES.get(name)
    if not isinstance(layout, Layout):
        return len(find_quoted(name))
    keys = set()
    for row in layout.rows:
        keys |= {layout.published_key(row, column) for column in layout.columns}
    return sum(lookup(key) is not None for key in keys)


def find_quoted(name: str) -> dict[Key, Published]:
    """Return the numbers that a paper's text has of a figure."""
    paper, _, figure = name.partition("/")
    layouts = [TABLES[table] for table in TABLES if table.startswith(f"{paper}/")]
    titles = {one.source.split(" Table ")[0] for one in layouts if isinstance(one, Layout)}
    sources = {f"{title} {figure.replace('figure', 'Figure ')}" for title in titles}
    return {key: number for key, number in published_numbers().items() if key[0] in sources}


# ---- Own numbers


def read_best() -> dict[Cell, dict[float, float]]:
    """Return FedOBP's cells of 400 rounds by momentum, by its rule: the best of four, pooled."""
    best_by_cell = {}
    for (dataset, setting, method), best in read_best_of_four().items():
        table = "fedobp/table4" if dataset in ("MNIST", "FMNIST") else "fedobp/table3"
        best_by_cell[Cell(table, METHOD_TITLES[method], dataset, setting)] = best
    return best_by_cell


def read_whole() -> Iterator[tuple[Cell, float]]:
    """Yield FedOBP's cells as they were made: its own at momentum 0, baselines' of both."""
    for cell, best in read_best().items():
        if cell.method == "FedOBP" and 0.0 in best:
            yield cell, best[0.0]
        elif cell.method != "FedOBP" and len(best) == 2:
            yield cell, (best[0.7] + 3 * best[0.0]) / 4


def read_small() -> Iterator[tuple[Cell, float]]:
    """Yield cells of fewer rounds, samples, seeds or momenta than published."""
    best_by_cell = read_best()
    for cell, best in best_by_cell.items():
        if cell.method != "FedOBP" and [*best] == [0.7]:
            yield cell, best[0.7]
    for row in read_results("table4_50_rounds").to_dict("records"):
        setting = row["partition"].removesuffix(" published")
        # Another setting of a method has another name, and no published number of its method.
        method = METHOD_NAMES.get(row["method"], row["method"]).split(" (q=")[0]
        cell = Cell("fedobp/table4", method, row["dataset"], setting)
        if cell not in best_by_cell:
            yield cell, row["accuracy_pooled"]
    for row in read_results("small_runs").to_dict("records"):
        cell = Cell(row["table"], row["method"], row["dataset"], row["setting"])
        if find_published(cell) is None:
            raise ValueError(f"docs/results/small_runs.csv: nothing published for {cell}")
        yield cell, row["value"]


def list_differences(cells: Iterator[tuple[Cell, float]], name: str) -> dict[Cell, float]:
    """Return own minus published numbers of a table, by cell; several runs' mean."""
    values: dict[Cell, list[float]] = {}
    for cell, value in cells:
        published = find_published(cell) if cell.table == name else None
        if published is not None:
            values.setdefault(cell, []).append(value - published)
    return {cell: sum(numbers) / len(numbers) for cell, numbers in values.items()}


def list_computed(name: str) -> dict[Cell, float]:
    """Return computed minus published numbers of a table, by cell."""
    layout = TABLES.get(name)
    differences = {}
    if isinstance(layout, Layout):
        for row, column in itertools.product(layout.rows, layout.columns):
            key = layout.published_key(row, column)
            number, computed = lookup(key), lookup(key, "computed.csv")
            if number and computed:
                cell = Cell(name, row.label, *column.heading)
                differences[cell] = computed.value - number.value
    return differences


# ---- The page


def format_differences(differences: Mapping[Cell, float]) -> str:
    """Return how many cells there are, and the range of differences."""
    if not differences:
        return ""
    low, high = min(differences.values()), max(differences.values())
    return f"{len(differences)}: {low:+.2f} to {high:+.2f}"


def make_row(name: str, remarks: Mapping[str, str]) -> tuple[str, ...]:
    """Return a table's or a figure's row."""
    count = count_published(name)
    whole = list_differences(read_whole(), name)
    small = list_differences(read_small(), name)
    whole |= list_computed(name)
    small = {cell: value for cell, value in small.items() if cell not in whole}
    state = "never"
    if small:
        state = "small"
    if whole:
        state = "whole" if len(whole) == count else "part"
    state = remarks["state"] or state
    if state not in STATES:
        raise ValueError(f"docs/results/status.csv says {state!r} of {name}: one of {STATES}")
    differences = (format_differences(whole), format_differences(small))
    texts = (remarks["cost"], remarks["remark"])
    return name, str(count or ""), f"**{state}**", *differences, *texts


def make_table() -> str:
    """Return the rows of all tables and figures of the papers."""
    frame = pd.read_csv(RESULTS, keep_default_na=False, dtype=str).set_index("name")
    missing = set(NAMES) ^ set(frame.index)
    if missing:
        raise ValueError(
            f"docs/results/status.csv: {', '.join(sorted(missing))} missing, or too much"
        )
    rows = []
    for name in frame.index:
        remarks = {str(key): str(value) for key, value in frame.loc[name].items()}
        # A figure of another one's runs has no row.
        if "figure" not in str(name) or not remarks["cost"].startswith(("Table", "Figure")):
            rows.append(make_row(str(name), remarks))
    titles = ("table or figure", "numbers", "state", "whole", "small", "cost", "remarks")
    return markdown(titles, rows)


def main() -> None:
    """Print the table, or put it into the page."""
    tables = {"status": make_table()}
    if "--write" in sys.argv[1:]:
        PAGE.write_text(fill_page(PAGE.read_text(), tables, "scripts/status.py"))
    else:
        print(tables["status"])


if __name__ == "__main__":
    main()
