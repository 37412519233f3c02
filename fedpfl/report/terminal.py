"""Render a table for a terminal, which folds columns and leaves out those that can be spared."""

from __future__ import annotations

import io
from typing import Any

from fedpfl.report.table import Table
from fedpfl.report.text import one_line, wrap_lines

_WIDE = 10_000


def render_terminal(table: Table, width: int | None) -> str:
    """Return the table as text.

    Args:
        table: the table.
        width: of the window, in characters; None: as wide as needed.
    """
    from rich import box  # slow to load
    from rich.console import Console
    from rich.table import Table as RichTable

    # ---- Step 1: the columns for which the window has room.
    filled_indices, texts = table.texts("terminal", one_line)
    candidates = [index for index in filled_indices if index >= table.by]
    shown = _choose_columns(table, texts, candidates, width or _WIDE)

    # ---- Step 2: a table for each block of rows.
    output = io.StringIO()
    console = Console(file=output, width=width or _WIDE, highlight=False, markup=False, emoji=False)
    for title, row_indices in table.blocks():
        block = RichTable(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for index in shown:
            column = table.columns[index]
            heading = f"{column.group}\n{column.heading}" if column.group else column.heading
            justify: Any = "right" if column.numeric else "left"
            block.add_column(heading, justify=justify, overflow="fold")
        for row_index in row_indices:
            cells = [
                "\n".join(
                    filter(None, (texts[row_index][index], table.rows[row_index][index].below))
                )
                for index in shown
            ]
            block.add_row(*cells)
        console.print(*filter(None, [title]), block, "", sep="\n")

    # ---- Step 3: the text below.
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    prose = table.prose("terminal", shown)
    left_out = [table.columns[index].name for index in candidates if index not in shown]
    if left_out:
        prose.append(
            f"Left out of {width} columns: {', '.join(left_out)}. A wider window has them."
        )
    for paragraph in prose:
        lines += wrap_lines(one_line(paragraph), width)
    if table.commands:
        lines += ["Missing cells are filled by:", *(f"  {command}" for command in table.commands)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _choose_columns(
    table: Table, texts: list[list[str]], candidates: list[int], width: int
) -> list[int]:
    """Return the columns for which there is room, without those that are spared first."""
    shown = list(candidates)
    while _needed_width(table, texts, shown) > width:
        # Of equals the last, as the first columns name a row.
        most_spared = max(shown, key=lambda index: (table.columns[index].spare, index))
        if not table.columns[most_spared].spare:
            break
        shown.remove(most_spared)
    return shown


def _needed_width(table: Table, texts: list[list[str]], indices: list[int]) -> int:
    """Return the width at which no number folds, and text at its words."""
    total = -2
    for index in indices:
        column = table.columns[index]
        cells = [column.heading, column.group, *(row[index] for row in texts)]
        words = cells if column.numeric else [word for cell in cells for word in cell.split()]
        total += 2 + min(max(map(len, words), default=1), 40)
    return total
