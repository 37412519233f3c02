"""Render a table as text: for terminals, Markdown, LaTeX and CSV."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError
from fedpfl.report.table import Table
from fedpfl.report.terminal import render_terminal
from fedpfl.report.text import (
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
        frame = pd.concat([table.frame for table in table_list])
        frame = frame.map(lambda value: one_line(value) if isinstance(value, str) else value)
        return frame.to_csv(index=False, lineterminator="\n")
    renderers: dict[str, Callable[[Table], str]] = {
        "terminal": lambda table: render_terminal(table, width),
        "markdown": _render_markdown,
        "latex": _render_latex,
    }
    if form not in renderers:
        raise FedpflError(f"unknown format {form!r}; choose one of: {', '.join(FORMATS)}")
    return "\n".join(map(renderers[form], table_list))


def show_tables(*tables: Table, form: str = "terminal") -> None:
    """Print tables, which are the command's answer."""
    answer.add_facts(tables=[table.record for table in tables])
    print(render(tables, form, terminal_width()), end="")


def _render_markdown(table: Table) -> str:
    indices, texts = table.texts("markdown", escape_markdown)
    columns = [table.columns[index] for index in indices]
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines.append(f"| {' | '.join(escape_markdown(column.name) for column in columns)} |")
    lines.append(f"|{'|'.join('---:' if column.numeric else '---' for column in columns)}|")
    for cells, row_texts in zip(table.rows, texts, strict=True):
        row = []
        for index in indices:
            below = cells[index].below
            row.append(row_texts[index] + (f"<br>{escape_markdown(below)}" if below else ""))
        lines.append(f"| {' | '.join(row)} |")
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
    indices = []
    left_out = []
    for index in filled_indices[table.by :]:
        column = table.columns[index]
        if column.spare > _MAX_SPARE_IN_PRINT:
            left_out.append(column.name)
        else:
            indices.append(index)
    is_wide = len(indices) > _MAX_COLUMNS_OF_HALF_PAGE

    # ---- Step 2: rows.
    rows = []
    for title, row_indices in table.blocks():
        rows.append(r"\midrule")
        if table.by:
            rows.append(
                rf"\multicolumn{{{len(indices)}}}{{l}}{{\emph{{{escape_latex(title)}}}}} \\"
            )
        for row_index in row_indices:
            rows.append(_latex_row(texts[row_index][index] for index in indices))
            below = [table.rows[row_index][index].below for index in indices]
            if any(below):
                below[0] = below[0] or table.below
                rows.append(_latex_row(map(_latex_small, below)))

    # ---- Step 3: comments, caption and headings above them, and the text below.
    environment = "table*" if is_wide else "table"
    title = f"{table.title}." if table.title else ""
    label = table.title or next(iter(table.blocks()))[0] or "results"
    parts = (table.meanings(indices), table.marks("latex"), *table.notes)
    prose = escape_latex(" ".join(filter(None, parts)))
    lines = [
        r"% \usepackage{booktabs}",
        *([f"% left out: {', '.join(left_out)}"] if left_out else []),
        *(f"% missing: {one_line(command)}" for command in table.commands),
        rf"\begin{{{environment}}}",
        r"\centering" + (r"\footnotesize\setlength{\tabcolsep}{4pt}" if is_wide else ""),
        *wrap_lines(rf"\caption{{{escape_latex(f'{title} {table.caption}'.strip())}}}"),
        rf"\label{{tab:{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}}}",
        *_latex_head(table, indices),
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        *(wrap_lines(rf"\par\smallskip{{\footnotesize {prose}\par}}") if prose else []),
        rf"\end{{{environment}}}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_small(text: str) -> str:
    return rf"{{\scriptsize {_escape_latex_number(text)}}}" if text else ""


def _escape_latex_number(text: str) -> str:
    # LaTeX sets a bare hyphen before a digit as a hyphen.
    return _MINUS.sub("$-$", escape_latex(text))


def _latex_head(table: Table, indices: Sequence[int]) -> list[str]:
    """Return the beginning of the tabular environment, with headings."""
    columns = [table.columns[index] for index in indices]
    alignment = "".join("r" if column.numeric else "l" for column in columns)
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"\toprule"]
    group_cells = []
    rules = []
    start = 1
    for group, size in table.headings(indices):
        cell = rf"\multicolumn{{{size}}}{{c}}{{{escape_latex(group)}}}"
        group_cells.append(cell if group else "")
        if group:
            rules.append(rf"\cmidrule(lr){{{start}-{start + size - 1}}}")
        start += size
    if rules:
        lines += [_latex_row(group_cells), " ".join(rules)]
    return [*lines, _latex_row(escape_latex(column.heading) for column in columns)]
