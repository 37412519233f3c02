"""Make the table of docs/board.md from docs/results/board_small.csv.

    python scripts/board.py [BOARD.CSV] [--write]

Prints the table; with --write it keeps the given board's rows and puts the table between its marks
in the page.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

from fedpfl.board import BOARD_COLUMNS, PROVENANCE_COLUMNS, add_groups, read_rows
from fedpfl.report.render import render
from fedpfl.report.table import Table

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "board.md"
ROWS_FILE = DOCS / "results" / "board_small.csv"
SHOWN_ROWS = 4
SHOWN_COLUMNS = (
    *("setting", "group", "method", "accuracy", "ft_accuracy", "unseen_accuracy"),
    *("harmed_fedavg", "bits_up", "sim_seconds"),
)
BEGIN, END = "<!-- made by scripts/board.py -->", "<!-- to here -->"


def make_table(rows: pd.DataFrame) -> str:
    """Return the first rows of each setting in Markdown, with groups, and versions."""
    if rows.empty:
        return "Not run yet."
    notes = add_groups(rows)
    shown = rows.groupby("setting", sort=False).head(SHOWN_ROWS)
    table = Table.of(
        shown.to_dict("records"),
        {name: replace(BOARD_COLUMNS[name], meaning="") for name in SHOWN_COLUMNS if name in rows},
        caption=f"Made with {'; '.join(rows['versions'].unique())}.",
        notes=tuple(notes),
        by=1,
    )
    return render(table, "markdown").strip()


def replace_table(page: str, text: str) -> str:
    """Return the page with a text between its marks."""
    before, after_mark = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{after_mark.split(END)[1]}"


def load_rows(path: Path = ROWS_FILE) -> pd.DataFrame:
    """Return a board's rows, none where there is no file."""
    if path.is_file():
        return pd.read_csv(path, dtype={"identity": str})
    return pd.DataFrame(columns=[*BOARD_COLUMNS, *PROVENANCE_COLUMNS])


def main() -> None:
    """Print the table; put it and the given rows where they belong with --write."""
    should_write = "--write" in sys.argv
    paths = [Path(word) for word in sys.argv[1:] if word != "--write"]
    path = paths[0] if paths else ROWS_FILE
    if paths and should_write:
        read_rows(path)  # raises for a file that is no board
        ROWS_FILE.write_bytes(path.read_bytes())
    text = make_table(load_rows(path))
    if should_write:
        PAGE.write_text(replace_table(PAGE.read_text(), text))
    print(text)


if __name__ == "__main__":
    main()
