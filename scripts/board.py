"""The table of docs/board.md from docs/results/board_small.csv: `python scripts/board.py
[BOARD.CSV] [--write]`.

Prints the table; with --write it keeps the given board's rows and puts the table between its marks
in the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from fedpfl.board import BOARD_COLUMNS, CAPTION, PROVENANCE_COLUMNS, read_rows
from fedpfl.methods import METHODS
from fedpfl.report.names import METHOD_TITLES as NAMES
from fedpfl.report.render import render
from fedpfl.report.table import Table

DOCS = Path(__file__).parents[1] / "docs"
PAGE, ROWS = DOCS / "board.md", DOCS / "results" / "board_small.csv"
BEGIN, END = "<!-- made by scripts/board.py -->", "<!-- to here -->"


def table(frame: pd.DataFrame) -> str:
    """Return the table in Markdown, with what has no row; nothing is measured where the frame is
    empty.
    """
    if frame.empty:
        return "Not run yet."
    notes = []
    for setting, rows in frame.groupby("setting"):
        lacking = [
            name
            for name in METHODS
            if not METHODS[name].pairs and NAMES.get(name, name) not in {*rows["method"]}
        ]
        notes += [f"Without a row in {setting}: {', '.join(lacking)}."] if lacking else []
    made = frame["versions"].unique()
    records = frame.to_dict("records")
    shown = Table.of(
        records,
        BOARD_COLUMNS,
        caption=f"{CAPTION} Made with {'; '.join(made)}.",
        notes=tuple(notes),
        by=1,
    )
    return render(shown, "markdown").strip()


def filled(page: str, text: str) -> str:
    """Return the page with a text between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def rows(path: Path = ROWS) -> pd.DataFrame:
    """Return a board's rows, none where there is no file."""
    columns = [*BOARD_COLUMNS, *PROVENANCE_COLUMNS]
    return (
        pd.read_csv(path, dtype={"identity": str})
        if path.is_file()
        else pd.DataFrame(columns=columns)
    )


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:] if word != "--write"]
    if given and "--write" in sys.argv:
        read_rows(given[0])  # raises for cells that a spreadsheet would take for a formula
        ROWS.write_bytes(given[0].read_bytes())
    text = table(rows(*given))
    if "--write" in sys.argv:
        PAGE.write_text(filled(PAGE.read_text(), text))
    print(text)
