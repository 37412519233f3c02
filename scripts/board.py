"""Make the table of docs/board.md from docs/results/board_small.csv.

    python scripts/board.py [BOARD.CSV] [--write]

Prints the table; with --write it keeps the given board's rows and puts the table between its marks
in the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from fedpfl.board import BOARD_COLUMNS, CAPTION, PROVENANCE_COLUMNS, read_rows
from fedpfl.methods import METHODS
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.render import render
from fedpfl.report.table import Table

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "board.md"
ROWS_FILE = DOCS / "results" / "board_small.csv"
BEGIN, END = "<!-- made by scripts/board.py -->", "<!-- to here -->"


def make_table(rows: pd.DataFrame) -> str:
    """Return the table in Markdown, with notes on the methods that have no row."""
    if rows.empty:
        return "Not run yet."
    notes = []
    for setting, setting_rows in rows.groupby("setting"):
        titles = {*setting_rows["method"]}
        missing_methods = [
            name
            for name in METHODS
            if not METHODS[name].pairs and METHOD_TITLES.get(name, name) not in titles
        ]
        if missing_methods:
            notes.append(f"Without a row in {setting}: {', '.join(missing_methods)}.")
    versions = "; ".join(rows["versions"].unique())
    # A file that an earlier version made lacks some.
    columns = {key: column for key, column in BOARD_COLUMNS.items() if key in rows.columns}
    table = Table.of(
        rows.to_dict("records"),
        columns,
        caption=f"{CAPTION} Made with {versions}.",
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
