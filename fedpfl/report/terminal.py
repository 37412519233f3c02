"""Render a table for a terminal.

Where the window is narrow, columns fold, are left out, or stand in further blocks below.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedpfl.report.table import Column, Table
from fedpfl.report.text import one_line, wrap_lines

_GAP = 2


@dataclass
class _Layout:
    """How the columns of a table are arranged in a window. Columns are known by their index.

    Attributes:
        window_width: characters of a line.
        full_widths: the longest line of each column.
        word_widths: the longest word of each column, which is the width it may fold to.
        shown: the columns that are shown side by side.
        below: the column that stands below its row, if any.
        left_out: the columns that are not shown.
    """

    window_width: int
    full_widths: dict[int, int]
    word_widths: dict[int, int]
    shown: list[int]
    below: int | None
    left_out: list[int]


def render_terminal(table: Table, width: int | None) -> str:
    """Return the table as text.

    Args:
        table: the table.
        width: of the window, in characters; None: as wide as needed.
    """
    # ---- Step 1: which columns are shown, and where?
    filled_indices, texts = _cell_texts(table)
    headings = [f"{column.group}\n{column.heading}" for column in table.columns]
    layout = _choose_layout(
        table,
        filled_indices,
        [headings, *texts],
        width or 10**9,
    )
    parts = _split_columns(layout)

    # ---- Step 2: each block of rows, part by part.
    lines = []
    for title, row_indices in table.blocks():
        if title:
            lines.append(title)
        for part in parts:
            widths = _column_widths(table, part, layout)
            has_groups = any(table.columns[index].group for index in part)
            part_headings = [
                headings[index] if has_groups else table.columns[index].heading for index in part
            ]
            lines += _fold_row(part_headings, part, widths, table.columns)
            lines.append("─" * _total_width(part, widths))
            for row_index in row_indices:
                row_texts = texts[row_index]
                part_texts = [row_texts[index] for index in part]
                lines += _fold_row(part_texts, part, widths, table.columns)
                if layout.below is not None and part is parts[-1]:
                    lines.append(f"    {row_texts[layout.below]}")
            lines.append("")

    # ---- Step 3: what stands below.
    prose = table.prose("terminal", layout.shown)
    if layout.left_out:
        names = [table.columns[index].name for index in sorted(layout.left_out)]
        prose.append(
            f"Left out of {width} columns: {', '.join(names)}. A wider window shows them, and so "
            "does | less -S."
        )
    for paragraph in prose:
        lines += wrap_lines(one_line(paragraph), width)
    if table.commands:
        lines.append("Missing cells are filled by:")
        lines += [f"  {command}" for command in table.commands]
    return "\n".join(lines).rstrip("\n") + "\n"


def _cell_texts(table: Table) -> tuple[list[int], list[list[str]]]:
    """Return the indices of columns that are not empty, and every cell's lines."""
    filled_indices, texts = table.texts("terminal", one_line)
    marked_columns = {
        index for index in filled_indices if any(row[index].mark for row in table.rows)
    }
    for row_texts, cells in zip(texts, table.rows, strict=True):
        for index, cell in enumerate(cells):
            if index in marked_columns and not cell.mark and row_texts[index]:
                row_texts[index] += " "  # keeps its digits below those of the marked
            if cell.below:
                row_texts[index] += f"\n{one_line(cell.below)}"
    return filled_indices, texts


def _choose_layout(
    table: Table,
    filled_indices: Sequence[int],
    rows: Sequence[Sequence[str]],
    window_width: int,
) -> _Layout:
    """Choose the columns that are shown, and that which stands below its rows.

    Args:
        table: the table.
        filled_indices: the columns that are not empty.
        rows: the texts of headings and rows.
        window_width: characters of a line.
    """
    # ---- Step 1: the widths that columns want and need.
    full_widths = {}
    word_widths = {}
    for index in filled_indices:
        lines = "\n".join(row[index] for row in rows).split("\n")
        full_widths[index] = max(map(len, lines))
        word_widths[index] = full_widths[index]
        if table.columns[index].kind == "text":
            words = [word for line in lines for word in line.split() or [" "]]
            word_widths[index] = max(map(len, words))

    # ---- Step 2: a long last column may stand below.
    below = None
    shown = [index for index in filled_indices if index >= table.by]
    is_too_wide = _total_width(shown, full_widths) > window_width
    if is_too_wide and table.columns[shown[-1]].kind == "long":
        below = shown.pop()

    # ---- Step 3: leave out what can be spared.
    # Text may fold, but not to a tower of words while there is something to leave out.
    fair_widths = {
        index: max(word_widths[index], min(full_widths[index], window_width // 4))
        for index in filled_indices
    }
    left_out = []
    while _total_width(shown, fair_widths) > window_width:
        if not any(table.columns[index].spare for index in shown):
            break
        # Of equals the last, as the first columns say what a row is.
        most_spare = max(shown, key=lambda index: (table.columns[index].spare, index))
        left_out.append(most_spare)
        shown.remove(most_spare)
    return _Layout(
        window_width=window_width,
        full_widths=full_widths,
        word_widths=word_widths,
        shown=shown,
        below=below,
        left_out=left_out,
    )


def _split_columns(layout: _Layout) -> list[list[int]]:
    """Split the columns into parts that fit; each begins with the first column."""
    label_index = layout.shown[0]
    widths = dict(layout.word_widths)
    # A long label folds rather than push the numbers out.
    widths[label_index] = min(
        widths[label_index],
        max(18, layout.window_width // 3),
    )
    parts = [[label_index]]
    for index in layout.shown[1:]:
        part = parts[-1]
        if len(part) > 1 and _total_width([*part, index], widths) > layout.window_width:
            parts.append([label_index])
        parts[-1].append(index)
    return parts


def _column_widths(table: Table, part: Sequence[int], layout: _Layout) -> dict[int, int]:
    """Return the columns' widths in a part.

    Those of text shrink, the widest first, down to their words and then through them.
    """
    widths = dict(layout.full_widths)
    text_columns = [index for index in part if table.columns[index].kind == "text"]
    broken_word_widths = {index: min(4, width) for index, width in layout.word_widths.items()}
    for min_widths in (layout.word_widths, broken_word_widths):
        while _total_width(part, widths) > layout.window_width:
            shrinkable = [index for index in text_columns if widths[index] > min_widths[index]]
            if not shrinkable:
                break
            # Character by character, so that wide columns meet at one width.
            widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def _total_width(indices: Sequence[int], widths: Mapping[int, int]) -> int:
    return sum(widths[index] for index in indices) + _GAP * (len(indices) - 1)


def _fold_row(
    texts: Sequence[str], part: Sequence[int], widths: Mapping[int, int], columns: Sequence[Column]
) -> list[str]:
    """Return one row as lines, its text folded to the widths."""
    # ---- Step 1: each cell's lines
    folded = []
    for text, index in zip(texts, part, strict=True):
        cell_lines = []
        for line in text.split("\n"):
            cell_lines += textwrap.wrap(line, widths[index], break_on_hyphens=False) or [""]
        folded.append(cell_lines)

    # ---- Step 2: the row's lines, as many as its highest cell has
    lines = []
    for number in range(max(map(len, folded), default=0)):
        cells = []
        for cell_lines, index in zip(folded, part, strict=True):
            cell = cell_lines[number] if number < len(cell_lines) else ""
            is_numeric = columns[index].numeric
            cells.append(cell.rjust(widths[index]) if is_numeric else cell.ljust(widths[index]))
        lines.append((" " * _GAP).join(cells).rstrip())
    return lines
