"""A table: what it holds, how its numbers are written, and how terminals, Markdown, LaTeX, HTML and CSV show it."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report.text import clip, csv_cell, html, latex, markdown, plain

FORMATS = {"terminal": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex"}
_STYLES = {
    "terminal": {"best": "{}*", "second": "{}+"},
    "markdown": {"best": "**{}**", "second": "<u>{}</u>"},
    "latex": {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"},
    "html": {"best": "<b>{}</b>", "second": "<u>{}</u>"},
}
_GAP = 2


@dataclass(frozen=True)
class Column:
    """One column.

    kind: `text`, `long` (text that is never cut, below its row where there is no room), or as `number` writes it.
    group: a heading above several columns. spare: a narrow terminal leaves out the columns of the greatest first, those
    of 0 never.
    """

    heading: str
    kind: str = "text"
    group: str = ""
    spare: int = 0

    @property
    def numeric(self) -> bool:
        """Whether it stands to the right and sorts by number."""
        return self.kind not in ("text", "long")


@dataclass
class Cell:
    """One cell: text, or a number with its sample standard deviation over seeds.

    kind: where it is not the column's. mark: `best` or `second`. flag: signs behind it. below: a second line. link:
    where a click in the page leads. state: a status that the page colours. order: what text is sorted by in the page.
    """

    value: str | float | None = None
    std: float = math.nan
    kind: str = ""
    mark: str = ""
    flag: str = ""
    below: str = ""
    link: str = ""
    state: str = ""
    order: float = math.nan

    def text(self, column: Column) -> str:
        """Return the cell as people read it: `96.89(0.03)`, `+0.12`, `1.31k`, or nothing."""
        kind = self.kind or column.kind
        if self.value is None or isinstance(self.value, str):
            return plain(self.value or "") if kind == "long" else clip(self.value or "", 160)
        spread = f"({number(kind, self.std, 2)})" if kind == "percent" or self.std > 0 else "()"
        if not math.isfinite(self.value):
            return "-" if self.below else ""
        return number(kind, self.value) + (spread + self.flag).removeprefix("()")


@dataclass(frozen=True)
class Table:
    """A table. rows: a cell per column. frame: the exact numbers, which are what CSV holds.

    by: how many of the first columns divide the rows into blocks. notes: what a reader must know besides caption, one
    line each. below: what second lines of cells are. commands: what fills empty cells.
    """

    title: str
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)
    caption: str = ""
    notes: tuple[str, ...] = ()
    by: int = 0
    below: str = ""
    commands: tuple[str, ...] = ()

    def texts(self, form: str, escape: Callable[[str], str]) -> tuple[list[int], list[list[str]]]:
        """Return the places of the columns in which anything stands, and every cell styled for a form of output."""
        styles = {"": "{}"} | _STYLES[form]
        rows = [
            [
                styles[cell.mark].format(escape(cell.text(column)))
                for cell, column in zip(row, self.columns, strict=True)
            ]
            for row in self.rows
        ]
        return [at for at in range(len(self.columns)) if not rows or any(row[at] for row in rows)], rows

    def blocks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield title and places of the rows of each block."""
        keys = [", ".join(str(cell.value) for cell in row[: self.by]) for row in self.rows]
        for key, places in itertools.groupby(range(len(keys)), keys.__getitem__):
            yield key or self.title, list(places)
        if not keys:
            yield self.title, []

    def prose(self, form: str) -> list[str]:
        """Return what stands below the table: caption, what marks mean, and notes."""
        marked = any(cell.mark for row in self.rows for cell in row)
        words = "* best, + second" if form == "terminal" else "Bold: best; underlined: second"
        words = f"{words} of {'its block' if self.by else 'its column'}, finished runs first." if marked else ""
        return [line for line in (f"{self.caption} {words}".strip(), *self.notes) if line]

    def headings(self, places: Sequence[int]) -> list[tuple[str, int]]:
        """Return the groups of these columns, each with the number of columns that it spans."""
        groups = itertools.groupby(places, lambda at: self.columns[at].group or at)
        return [(group if isinstance(group, str) else "", len(list(members))) for group, members in groups]


def number(kind: str, value: float, digits: int = 4) -> str:
    """Return a number as people read it; nothing for nan.

    kind: percent, difference (of percents), short (so many digits and a unit: `22.4k`), change (short, with a sign),
    whole, decimal, entries, exact, size (of bytes), age (of seconds), p, or number (three digits).
    """
    if not math.isfinite(value):
        return ""
    if kind == "difference":
        return f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    if kind == "change":
        return ("-" if value < 0 else "+" if value > 0 else "") + number("short", abs(value), 3)
    if kind in ("short", "size"):
        value, digits = float(f"{value:.{digits}g}"), max(3, digits)  # 999.96 rounds to a thousand
        power = min(4, max(0, math.floor(math.log10(abs(value) or 1)) // 3))
        shown = f"{value / 1000**power:.{digits}g}" if power else f"{value:g}"
        unit = ("", "k", "M", "G", "T")[power]
        return shown + (unit if kind == "short" else f" {unit}B")
    if kind == "age":
        seconds = max(0, int(value))  # clocks of file servers run ahead
        for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
            if seconds >= size:
                return f"{seconds // size} {unit}"
        return f"{seconds} s"
    if kind == "p":
        return "<0.001" if value < 0.001 else f"{value:.3f}"
    forms = {"percent": "{:.2f}", "whole": "{:.0f}", "decimal": "{:.2f}", "entries": "{:,.0f}", "exact": "{:.10g}"}
    return forms.get(kind, "{:.3g}" if abs(value) < 1000 else "{:,.0f}").format(value)


def mark(cells: Sequence[Cell], finished: Sequence[bool]) -> None:
    """Mark the best and the second of cells, as far as the digits shown tell them apart.

    Unfinished runs compete only where there are no finished ones; one number is no best, and after two there is no
    second.
    """
    known = [
        (round(cell.value, 2), whole, cell)
        for cell, whole in zip(cells, finished, strict=True)
        if isinstance(cell.value, float) and not math.isnan(cell.value)
    ]
    known = [one for one in known if one[1]] or known
    values = sorted((value for value, *_ in known), reverse=True)
    for value, _, cell in known if len(known) > 1 else ():
        if value == values[0]:
            cell.mark = "best"
        elif value == values[1]:
            cell.mark = "second"


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample standard deviation; nan where a seed lacks the value, and the deviation of one seed."""
    count = len(values)
    mean = math.fsum(values) / count if count else math.nan
    spread = math.fsum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else math.nan
    return mean, math.sqrt(spread)


def screen() -> int | None:
    """Return the terminal's width in characters; None where a file or pipe gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def render(tables: Table | Sequence[Table], form: str = "terminal", width: int | None = None) -> str:
    """Return tables as text in one of FORMATS. width: of the terminal, in characters; by default as wide as needed."""
    every = [tables] if isinstance(tables, Table) else list(tables)
    if form == "csv":
        return pd.concat([table.frame for table in every]).map(csv_cell).to_csv(index=False, lineterminator="\n")
    shown = {"terminal": lambda table: _terminal(table, width), "markdown": _markdown, "latex": _latex}
    if form not in shown:
        raise FedpflError(f"unknown format {form!r}; choose one of: {', '.join(FORMATS)}")
    return "\n".join(map(shown[form], every))


def as_html(table: Table, kind: str = "") -> str:
    """Return the table for the page, one per block, sorted by a click on a heading. kind: classes of its frame."""
    filled, texts = table.texts("html", html)
    places = filled[table.by :] if table.by else filled
    columns = [table.columns[at] for at in places]
    top = "".join(
        f'<th colspan="{size}" scope="colgroup" class="group">{html(group)}</th>' if group else "<td></td>"
        for group, size in table.headings(places)
    )
    top = f"<tr>{top}</tr>" if any(column.group for column in columns) else ""
    heads = "".join(
        f'<th scope="col"{" class=number" * column.numeric}><button type="button">{html(column.heading)}</button></th>'
        for column in columns
    )
    blocks = []
    for title, rows in table.blocks():
        body = ""
        for row in rows:
            cells = [_td(table.rows[row][at], table.columns[at], texts[row][at], at == places[0]) for at in places]
            body += f"<tr>{''.join(cells)}</tr>\n"
        tall = " tall" if len(rows) > 24 else ""
        blocks.append(
            f'<div class="scroll {kind}{tall}" tabindex="0" role="group" aria-label="{html(title)}">'
            f'<table class="sortable"><caption>{html(title)}</caption>'
            f"<thead>{top}<tr>{heads}</tr></thead><tbody>\n{body}</tbody></table></div>"
        )
    return "\n".join(blocks)


def _td(cell: Cell, column: Column, text: str, first: bool) -> str:
    value = cell.value if isinstance(cell.value, int | float) else cell.order
    attributes = "" if math.isnan(value) or not column.numeric else f' data-value="{float(value)!r}"'
    attributes += ' class="number"' if column.numeric else ' class="path"' if column.kind == "long" else ""
    if cell.state:
        text = f'<span class="status {cell.state}">{text}</span>'
    if cell.link:
        text = f'<a href="{html(cell.link)}">{text}</a>'
    text += f" <small>{html(cell.below)}</small>" if cell.below else ""
    return f'<th{attributes} scope="row">{text}</th>' if first else f"<td{attributes}>{text}</td>"


def _markdown(table: Table) -> str:
    places, texts = table.texts("markdown", markdown)
    columns = [table.columns[at] for at in places]
    lines = [f"### {markdown(table.title)}", ""] if table.title else []
    lines.append("| " + " | ".join(markdown(f"{column.group} {column.heading}".strip()) for column in columns) + " |")
    lines.append("|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|")
    for cells, row in zip(table.rows, texts, strict=True):
        both = [row[at] + f"<br>{markdown(cells[at].below)}" * bool(cells[at].below) for at in places]
        lines.append("| " + " | ".join(both) + " |")
    lines += [line for text in table.prose("markdown") for line in ("", markdown(text))]
    if table.commands:
        lines += ["", "Missing cells are filled by:", "", "```", *table.commands, "```"]
    return "\n".join(lines) + "\n"


def _latex(table: Table) -> str:
    r"""Needs `\usepackage{booktabs,graphicx}`."""
    places, texts = table.texts("latex", latex)
    columns = [table.columns[at] for at in places]
    top, rules, start = list[str](), list[str](), 1
    for group, size in table.headings(places):
        top.append(rf"\multicolumn{{{size}}}{{c}}{{{latex(group)}}}" if group else "")
        rules += [rf"\cmidrule(lr){{{start}-{start + size - 1}}}"] if group else []
        start += size
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        *(f"% missing: {plain(command)}" for command in table.commands),
        r"\begin{table*}",
        rf"\caption{{{latex(' '.join((f'{table.title}.' * bool(table.title), *table.prose('latex'))).strip())}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join('r' if column.numeric else 'l' for column in columns)}}}",
        r"\toprule",
        *([" & ".join(top) + r" \\", " ".join(rules)] if rules else []),
        " & ".join(latex(column.heading) for column in columns) + r" \\",
    ]
    for _, rows in table.blocks():
        lines.append(r"\midrule")
        for row in rows:
            lines.append(" & ".join(texts[row][at] for at in places) + r" \\")
            small = [latex(table.rows[row][at].below) for at in places]
            if any(small):
                small[0] = small[0] or table.below
                lines.append(" & ".join(rf"{{\scriptsize {text}}}" * bool(text) for text in small) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]) + "\n"


def _terminal(table: Table, width: int | None) -> str:
    filled, texts = table.texts("terminal", plain)
    marked = {at for at in filled if any(row[at].mark for row in table.rows)}
    for own, cells in zip(texts, table.rows, strict=True):
        for at, cell in enumerate(cells):
            # What is not marked keeps its digits below those of the others.
            own[at] += " " * (at in marked and not cell.mark and bool(own[at]))
            own[at] += f"\n{plain(cell.below)}" if cell.below else ""
    heads = [f"{column.group}\n{column.heading}" for column in table.columns]
    whole, words = dict[int, int](), dict[int, int]()
    for at in filled:
        lines = "\n".join([heads[at], *(row[at] for row in texts)]).split("\n")
        whole[at] = max(map(len, lines))
        folds = table.columns[at].kind == "text"
        words[at] = max(len(word) for line in lines for word in line.split() or [" "]) if folds else whole[at]

    def needed(places: Sequence[int], widths: dict[int, int]) -> int:
        return sum(widths[at] for at in places) + _GAP * (len(places) - 1)

    under, left_out = None, list[int]()
    places = [at for at in filled if at >= table.by]
    room = width or 10**9
    if needed(places, whole) > room and table.columns[places[-1]].kind == "long":
        under = places.pop()
    # Text may fold, but not to a tower of words while there is something to leave out.
    fair = {at: max(words[at], min(whole[at], room // 4)) for at in filled}
    while needed(places, fair) > room and any(table.columns[at].spare for at in places):
        left_out.append(max(places, key=lambda at: (table.columns[at].spare, at)))
        places.remove(left_out[-1])
    first, blocks = places[0], [places[:1]]
    for at in places[1:]:
        # A long label folds rather than push the numbers out.
        least = words | {first: min(words[first], max(18, room // 3))}
        if len(blocks[-1]) > 1 and needed([*blocks[-1], at], least) > room:
            blocks.append([first])
        blocks[-1].append(at)
    out = []
    for title, rows in table.blocks():
        for place, block in enumerate(blocks):
            widths = dict(whole)
            for limit in (words, {at: min(4, own) for at, own in words.items()}):
                texts_of = [at for at in block if table.columns[at].kind == "text"]
                while needed(block, widths) > room and (wide := [at for at in texts_of if widths[at] > limit[at]]):
                    widths[max(wide, key=widths.__getitem__)] -= 1
            out += [title] if place == 0 and title else []
            grouped = any(table.columns[at].group for at in block)
            top = [heads[at] if grouped else table.columns[at].heading for at in block]
            out += _lines(top, block, widths, table.columns)
            out.append("─" * needed(block, widths))
            for row in rows:
                out += _lines([texts[row][at] for at in block], block, widths, table.columns)
                out += [f"    {texts[row][under]}"] if under is not None and block is blocks[-1] else []
            out.append("")
    prose = table.prose("terminal")
    if left_out:
        names = [f"{table.columns[at].group} {table.columns[at].heading}".strip() for at in sorted(left_out)]
        prose.append(
            f"Left out of {width} columns: {', '.join(names)}. A wider window shows them, and so does | less -S."
        )
    for line in map(plain, prose):
        out += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) if width else [line]
    out += ["Missing cells are filled by:", *(f"  {command}" for command in table.commands)] if table.commands else []
    return "\n".join(out).rstrip("\n") + "\n"


def _lines(texts: Sequence[str], block: Sequence[int], widths: dict[int, int], columns: Sequence[Column]) -> list[str]:
    """One row of a terminal as lines, its text folded to the widths."""
    parts = []
    for text, at in zip(texts, block, strict=True):
        folded = [textwrap.wrap(line, widths[at], break_on_hyphens=False) or [""] for line in text.split("\n")]
        parts.append([line for lines in folded for line in lines])
    forms = [f"{{:{'>' if columns[at].numeric else '<'}{widths[at]}}}" for at in block]
    row = (" " * _GAP).join(forms)
    return [row.format(*line).rstrip() for line in itertools.zip_longest(*parts, fillvalue="")]
