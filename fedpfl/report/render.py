"""A table as text: for terminals, Markdown, LaTeX, the HTML page and CSV."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Sequence

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

_PAGE, _WIDE = 3, 7
"""The greatest `spare` that a printed page has room for, and how many columns one of two columns of
text has.
"""
_MINUS = re.compile(r"(?<!\S)-(?=\d)")
FORMATS = {"terminal": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex"}


def terminal_width() -> int | None:
    """Return the terminal's width in characters; None where a file or pipe gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(
    tables: Table | Sequence[Table], form: str = "terminal", width: int | None = None
) -> str:
    """Return tables as text in one of FORMATS. width: of the terminal, in characters; by default as
    wide as needed.
    """
    every = [tables] if isinstance(tables, Table) else list(tables)
    if form == "csv":
        return (
            pd.concat([table.frame for table in every])
            .map(csv_cell)
            .to_csv(index=False, lineterminator="\n")
        )
    shown = {
        "terminal": lambda table: render_terminal(table, width),
        "markdown": _markdown,
        "latex": _latex,
    }
    if form not in shown:
        raise FedpflError(f"unknown format {form!r}; choose one of: {', '.join(FORMATS)}")
    return "\n".join(map(shown[form], every))


def render_html(table: Table, kind: str = "") -> str:
    """Return the table for the page, one per block, sorted by a click on a heading. kind: classes
    of its frame.
    """
    filled, texts = table.texts("html", escape_html)
    places = filled[table.by :] if table.by else filled
    columns = [table.columns[at] for at in places]
    top = "".join(
        f'<th colspan="{size}" scope="colgroup" class="group">{escape_html(group)}</th>'
        if group
        else "<td></td>"
        for group, size in table.headings(places)
    )
    top = f"<tr>{top}</tr>" if any(column.group for column in columns) else ""
    heads = "".join(
        f'<th scope="col"{" class=number" if column.numeric else ""}>'
        f'<button type="button">{escape_html(column.heading)}</button></th>'
        for column in columns
    )
    blocks = []
    for title, rows in table.blocks():
        body = ""
        for row in rows:
            cells = [
                _td(table.rows[row][at], table.columns[at], texts[row][at], at == places[0])
                for at in places
            ]
            body += f"<tr>{''.join(cells)}</tr>\n"
        tall = " tall" if len(rows) > 24 else ""
        blocks.append(
            f'<div class="scroll {kind}{tall}" tabindex="0" role="group" aria-label="{escape_html(title)}">'
            f'<table class="sortable"><caption>{escape_html(title)}</caption>'
            f"<thead>{top}<tr>{heads}</tr></thead><tbody>\n{body}</tbody></table></div>"
        )
    return "\n".join(blocks)


def _td(cell: Cell, column: Column, text: str, first: bool) -> str:
    value = cell.value if isinstance(cell.value, int | float) else cell.order
    attributes = (
        "" if math.isnan(value) or not column.numeric else f' data-value="{float(value)!r}"'
    )
    attributes += (
        ' class="number"' if column.numeric else ' class="path"' if column.kind == "long" else ""
    )
    if cell.state:
        text = f'<span class="status {cell.state}">{text}</span>'
    if cell.link:
        text = f'<a href="{escape_html(cell.link)}">{text}</a>'
    text += f" <small>{escape_html(cell.below)}</small>" if cell.below else ""
    return f'<th{attributes} scope="row">{text}</th>' if first else f"<td{attributes}>{text}</td>"


def _markdown(table: Table) -> str:
    places, texts = table.texts("markdown", escape_markdown)
    columns = [table.columns[at] for at in places]
    lines = [f"### {escape_markdown(table.title)}", ""] if table.title else []
    lines.append("| " + " | ".join(escape_markdown(column.name) for column in columns) + " |")
    lines.append("|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|")
    for cells, row in zip(table.rows, texts, strict=True):
        both = [
            row[at] + (f"<br>{escape_markdown(cells[at].below)}" if cells[at].below else "")
            for at in places
        ]
        lines.append("| " + " | ".join(both) + " |")
    lines += [
        line for text in table.prose("markdown", places) for line in ("", escape_markdown(text))
    ]
    if table.commands:
        lines += ["", "Missing cells are filled by:", "", "```", *table.commands, "```"]
    return "\n".join(lines) + "\n"


def _latex(table: Table) -> str:
    r"""Needs `\usepackage{booktabs}`. A page has no room for what a narrow terminal leaves out
    first.
    """
    filled, texts = table.texts("latex", lambda text: _MINUS.sub("$-$", escape_latex(text)))
    places = [at for at in filled if at >= table.by and table.columns[at].spare <= _PAGE]
    columns = [table.columns[at] for at in places]
    sparer = [table.columns[at].name for at in filled if table.columns[at].spare > _PAGE]
    top, rules, start = list[str](), list[str](), 1
    for group, size in table.headings(places):
        top.append(rf"\multicolumn{{{size}}}{{c}}{{{escape_latex(group)}}}" if group else "")
        rules += [rf"\cmidrule(lr){{{start}-{start + size - 1}}}"] if group else []
        start += size
    wide = len(places) > _WIDE
    lines = [
        r"% \usepackage{booktabs}",
        *([f"% left out: {', '.join(sparer)}"] if sparer else []),
        *(f"% missing: {one_line(command)}" for command in table.commands),
        rf"\begin{{table{'*' * wide}}}",
        r"\centering" + r"\footnotesize\setlength{\tabcolsep}{4pt}" * wide,
        *wrap_lines(
            rf"\caption{{{escape_latex(' '.join((f'{table.title}.' if table.title else '', table.caption)).strip())}}}"
        ),
        rf"\begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in columns)}}}",
        r"\toprule",
        *([" & ".join(top) + r" \\", " ".join(rules)] if rules else []),
        " & ".join(escape_latex(column.heading) for column in columns) + r" \\",
    ]
    for title, rows in table.blocks():
        lines.append(r"\midrule")
        lines += (
            [rf"\multicolumn{{{len(places)}}}{{l}}{{\emph{{{escape_latex(title)}}}}} \\"]
            if table.by
            else []
        )
        for row in rows:
            lines.append(" & ".join(texts[row][at] for at in places) + r" \\")
            small = [_MINUS.sub("$-$", escape_latex(table.rows[row][at].below)) for at in places]
            if any(small):
                small[0] = small[0] or table.below
                lines.append(
                    " & ".join(rf"{{\scriptsize {text}}}" if text else "" for text in small)
                    + r" \\"
                )
    below = escape_latex(
        " ".join(filter(None, (table.meanings(places), table.marks("latex"), *table.notes)))
    )
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += wrap_lines(rf"\par\smallskip{{\footnotesize {below}\par}}") if below else []
    return "\n".join([*lines, rf"\end{{table{'*' * wide}}}"]) + "\n"
