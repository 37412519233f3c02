"""Render a table as text: for terminals, Markdown, LaTeX, the HTML page and CSV."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Callable, Sequence

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report.table import Cell, Column, Table
from fedpfl.report.terminal import render_terminal
from fedpfl.report.text import (
    csv_cell,
    escape_html,
    escape_latex,
    escape_markdown,
    one_line,
    wrap_lines,
)

_MAX_SPARE_IN_PRINT = 3
"""The greatest `spare` of columns that a printed page has room for."""
_MAX_COLUMNS_OF_HALF_PAGE = 5
_MINUS = re.compile(r"(?<!\S)-(?=\d)")
FORMATS = {"terminal": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex"}
"""The formats, each with its files' suffix."""


def terminal_width() -> int | None:
    """Return the terminal's width in characters; None where output goes to a file or pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(
    tables: Table | Sequence[Table], form: str = "terminal", width: int | None = None
) -> str:
    """Return tables as text in one of FORMATS.

    Args:
        tables: one or more tables.
        form: the format.
        width: of the terminal, in characters; by default as wide as needed.
    """
    table_list = [tables] if isinstance(tables, Table) else list(tables)
    if form == "csv":
        # One CSV file for several tables: their frames have a column `section`.
        cells = pd.concat([table.frame for table in table_list]).map(csv_cell)
        return cells.to_csv(index=False, lineterminator="\n")
    renderers: dict[str, Callable[[Table], str]] = {
        "terminal": lambda table: render_terminal(table, width),
        "markdown": _render_markdown,
        "latex": _render_latex,
    }
    if form not in renderers:
        raise FedpflError(f"unknown format {form!r}; choose one of: {', '.join(FORMATS)}")
    return "\n".join(map(renderers[form], table_list))


def render_html(table: Table) -> str:
    """Return the page's tables, one per block, sorted by a click on a heading."""
    # ---- Step 1: columns that are not empty; those that the blocks' titles name are left out.
    filled_indices, texts = table.texts("html", escape_html)
    indices = filled_indices[table.by :] if table.by else filled_indices
    columns = [table.columns[index] for index in indices]
    group_cells = ""
    for group, size in table.headings(indices):
        text = escape_html(group)
        group_cells += f'<th colspan="{size}" scope="colgroup" class="group">{text}</th>'
    heading_cells = ""
    for column in columns:
        number_class = " class=number" if column.numeric else ""
        button = f'<button type="button">{escape_html(column.heading)}</button>'
        heading_cells += f'<th scope="col"{number_class}>{button}</th>'
    head = f"<tr>{heading_cells}</tr>"
    if any(column.group for column in columns):
        head = f"<tr>{group_cells}</tr>{head}"

    # ---- Step 2: a table per block.
    blocks = []
    for title, row_indices in table.blocks():
        body = ""
        for row in row_indices:
            cells = [
                _html_cell(table.rows[row][i], table.columns[i], texts[row][i], i == indices[0])
                for i in indices
            ]
            body += f"<tr>{''.join(cells)}</tr>\n"
        classes = "scroll tall" if len(row_indices) > 24 else "scroll"
        label = escape_html(title)
        blocks.append(
            f'<div class="{classes}" tabindex="0" role="group" aria-label="{label}">'
            f'<table class="sortable"><caption>{label}</caption>'
            f"<thead>{head}</thead><tbody>\n{body}</tbody></table></div>"
        )
    return "\n".join(blocks)


def _html_cell(cell: Cell, column: Column, text: str, is_row_heading: bool) -> str:
    attributes = ""
    if column.numeric:
        if isinstance(cell.value, int | float) and not math.isnan(cell.value):
            attributes += f' data-value="{float(cell.value)!r}"'
        attributes += ' class="number"'
    elif column.kind == "long":
        attributes += ' class="path"'
    if cell.link:
        text = f'<a href="{escape_html(cell.link)}">{text}</a>'
    if cell.below:
        text += f" <small>{escape_html(cell.below)}</small>"
    if is_row_heading:
        return f'<th{attributes} scope="row">{text}</th>'
    return f"<td{attributes}>{text}</td>"


def _render_markdown(table: Table) -> str:
    indices, texts = table.texts("markdown", escape_markdown)
    columns = [table.columns[index] for index in indices]
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines.append("| " + " | ".join(escape_markdown(column.name) for column in columns) + " |")
    lines.append("|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|")
    for cells, row_texts in zip(table.rows, texts, strict=True):
        row = []
        for index in indices:
            below = cells[index].below
            row.append(row_texts[index] + (f"<br>{escape_markdown(below)}" if below else ""))
        lines.append("| " + " | ".join(row) + " |")
    for paragraph in table.prose("markdown", indices):
        lines += ["", escape_markdown(paragraph)]
    if table.commands:
        lines += ["", "Missing cells are filled by:", "", "```", *table.commands, "```"]
    return "\n".join(lines) + "\n"


def _render_latex(table: Table) -> str:
    r"""Return LaTeX that needs `\usepackage{booktabs}`.

    A page has no room for the columns that a narrow terminal leaves out first. Many columns span
    both halves of a page.
    """
    # ---- Step 1: the columns for which a page has room.
    filled_indices, texts = table.texts("latex", _escape_latex_number)
    indices = [index for index in filled_indices if index >= table.by]
    spared = [index for index in indices if table.columns[index].spare > _MAX_SPARE_IN_PRINT]
    indices = [index for index in indices if index not in spared]
    left_out = [table.columns[index].name for index in spared]
    is_wide = len(indices) > _MAX_COLUMNS_OF_HALF_PAGE

    # ---- Step 2: comments, caption and headings.
    environment = "table*" if is_wide else "table"
    compact = r"\footnotesize\setlength{\tabcolsep}{4pt}" if is_wide else ""
    title = f"{table.title}." if table.title else ""
    lines = [
        r"% \usepackage{booktabs}",
        *([f"% left out: {', '.join(left_out)}"] if left_out else []),
        *(f"% missing: {one_line(command)}" for command in table.commands),
        rf"\begin{{{environment}}}",
        rf"\centering{compact}",
        *wrap_lines(rf"\caption{{{escape_latex(f'{title} {table.caption}'.strip())}}}"),
        rf"\label{{tab:{_make_label(table)}}}",
        *_latex_head(table, indices),
    ]

    # ---- Step 3: rows.
    for block_title, row_indices in table.blocks():
        lines.append(r"\midrule")
        if table.by:
            emphasized = rf"\emph{{{escape_latex(block_title)}}}"
            lines.append(rf"\multicolumn{{{len(indices)}}}{{l}}{{{emphasized}}} \\")
        for row_index in row_indices:
            lines.append(" & ".join(texts[row_index][index] for index in indices) + r" \\")
            lines += _latex_second_line(table, row_index, indices)

    # ---- Step 4: the text below.
    parts = (table.meanings(indices), table.marks("latex"), *table.notes)
    prose = escape_latex(" ".join(filter(None, parts)))
    lines += [r"\bottomrule", r"\end{tabular}"]
    if prose:
        lines += wrap_lines(rf"\par\smallskip{{\footnotesize {prose}\par}}")
    lines.append(rf"\end{{{environment}}}")
    return "\n".join(lines) + "\n"


def _make_label(table: Table) -> str:
    """Return a word to refer to the table by, of its title or first block."""
    block_titles = [title for title, _ in table.blocks()]
    text = table.title or " ".join(block_titles[:1]) or "results"
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _escape_latex_number(text: str) -> str:
    # LaTeX sets a bare hyphen before a digit as a hyphen.
    return _MINUS.sub("$-$", escape_latex(text))


def _latex_head(table: Table, indices: Sequence[int]) -> list[str]:
    """Return the beginning of the tabular environment, with headings."""
    columns = [table.columns[index] for index in indices]
    group_cells = []
    rules = []
    start = 1
    for group, size in table.headings(indices):
        if group:
            group_cells.append(rf"\multicolumn{{{size}}}{{c}}{{{escape_latex(group)}}}")
            rules.append(rf"\cmidrule(lr){{{start}-{start + size - 1}}}")
        else:
            group_cells.append("")
        start += size
    alignment = "".join("r" if column.numeric else "l" for column in columns)
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    if rules:
        lines += [" & ".join(group_cells) + r" \\", " ".join(rules)]
    lines.append(" & ".join(escape_latex(column.heading) for column in columns) + r" \\")
    return lines


def _latex_second_line(table: Table, row_index: int, indices: Sequence[int]) -> list[str]:
    """Return the line of what stands below the cells of a row, if anything does."""
    texts = [_escape_latex_number(table.rows[row_index][index].below) for index in indices]
    if not any(texts):
        return []
    texts[0] = texts[0] or table.below
    cells = [rf"{{\scriptsize {text}}}" if text else "" for text in texts]
    return [" & ".join(cells) + r" \\"]
