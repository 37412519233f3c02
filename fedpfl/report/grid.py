"""Tables with own values beside published ones: for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report.published import Published
from fedpfl.report.tables import over_seeds
from fedpfl.report.text import csv_cell, latex, markdown, plain


@dataclass
class Cell:
    """Own values by seed, and the published one."""

    values: dict[int, float] = field(default_factory=dict)
    reached: str = ""
    """Of runs that are not finished: what there is instead."""
    published: Published | None = None
    mark: str = ""
    differs: bool = False
    """Whether a paired test over seeds tells it from the line it was compared with."""

    @property
    def own(self) -> tuple[float, float]:
        """Mean and sample standard deviation over seeds."""
        return over_seeds(list(self.values.values())) if self.values else (math.nan, math.nan)

    @property
    def difference(self) -> float:
        """Own minus published."""
        return self.own[0] - self.published.value if self.published else math.nan


@dataclass(frozen=True)
class Grid:
    """A table. rows: label and kind (percent, count or exact); columns: two lines of heading, the first of groups.

    cells: by row and column. missing: the commands that fill what is empty.
    """

    name: str
    rows: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]
    cells: dict[tuple[int, int], Cell]
    caption: str
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def mark(self) -> None:
        """Mark the best and the second percentage of each column, as far as shown digits tell them apart."""
        for j in range(len(self.columns)):
            own = {i: self.cells[i, j] for i, (_, kind) in enumerate(self.rows) if kind == "percent"}
            shown = {i: round(cell.own[0], 2) for i, cell in own.items() if cell.values}
            for value, mark in zip(sorted(set(shown.values()), reverse=True)[:2], ("best", "second"), strict=False):
                for i in (i for i, mine in shown.items() if mine == value):
                    self.cells[i, j].mark = mark


def render(grid: Grid, form: str = "terminal", width: int | None = None) -> str:
    """The table as text: terminal, markdown, latex or csv. width: of the terminal, in characters."""
    forms: dict[str, Callable[[Grid, int | None], str]] = {
        **{"terminal": _terminal, "markdown": _markdown},
        **{"latex": _latex, "csv": _csv},
    }
    if form not in forms:
        raise FedpflError(f"unknown format {form!r}; choose one of: {', '.join(forms)}")
    return forms[form](grid, width)


def _number(value: float, kind: str) -> str:
    return {"percent": f"{value:.2f}", "count": f"{value:,.0f}", "exact": f"{value:.10g}"}[kind]


def _own(grid: Grid, i: int, j: int) -> str:
    """`96.33(0.10)`, with `°` if not finished and `†` if it differs; empty without a run."""
    cell, kind = grid.cells[i, j], grid.rows[i][1]
    if not cell.values:
        return ""
    mean, spread = cell.own
    told = "" if math.isnan(spread) or kind != "percent" else f"({spread:.2f})"
    return _number(mean, kind) + told + ("°" if cell.reached else "") + ("†" if cell.differs else "")


def _theirs(grid: Grid, i: int, j: int) -> str:
    """`96.89 -0.56`, or what there is of it."""
    cell, kind = grid.cells[i, j], grid.rows[i][1]
    if cell.published is None:
        return ""
    text = _number(cell.published.value, kind)
    if math.isnan(cell.difference) or kind == "exact":
        return text
    if kind == "percent":
        return f"{text} {round(cell.difference, 2) + 0.0:+.2f}"
    return f"{text} {round(cell.difference):+d}"


def _terminal(grid: Grid, width: int | None) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=io.StringIO(), width=width or 10_000, record=True)
    marks = {"best": "*", "second": "+", "": ""}
    # As many columns side by side as the width takes; a cell is at most this wide, with rich's padding.
    most = 17
    label = max(len(name) for name, _ in grid.rows) + 2
    across = max(1, ((width or 10_000) - label - 2) // most)
    places = list(range(len(grid.columns)))
    for start in range(0, len(places), across):
        block = places[start : start + across]
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        shown.add_column(Text("\n"))
        for j in block:
            shown.add_column(Text("\n".join(grid.columns[j])), justify="right", no_wrap=True)
        for i, (name, _kind) in enumerate(grid.rows):
            texts = [
                f"{_own(grid, i, j) or '-'}{marks[grid.cells[i, j].mark]}\n{_theirs(grid, i, j)}".rstrip()
                for j in block
            ]
            shown.add_row(Text(name), *map(Text, texts))
        console.print(shown)
    best = " * best, + second." if any(cell.mark for cell in grid.cells.values()) else ""
    for text in (grid.caption + best, *grid.notes):
        console.print(Text(plain(text)), width=width or 120)
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"
    return text + "".join(f"{line}\n" for line in _to_fill(grid))


def _to_fill(grid: Grid) -> list[str]:
    return ["Missing cells are filled by:", *(f"  {command}" for command in grid.missing)] if grid.missing else []


def _markdown(grid: Grid, _: int | None) -> str:
    styles = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    heads = [" ".join(column) for column in grid.columns]
    lines = ["| | " + " | ".join(map(markdown, heads)) + " |", "|---|" + "---:|" * len(heads)]
    for i, (name, _kind) in enumerate(grid.rows):
        texts = []
        for j in range(len(heads)):
            own = styles[grid.cells[i, j].mark].format(_own(grid, i, j) or "-")
            theirs = _theirs(grid, i, j)
            texts.append(f"{own}<br>{theirs}" if theirs else own)
        lines.append(f"| {markdown(name)} | " + " | ".join(texts) + " |")
    lines += [line for note in (grid.caption, *grid.notes) for line in ("", markdown(note))]
    if grid.missing:
        lines += ["", "Missing cells are filled by:", "", "```", *grid.missing, "```"]
    return "\n".join(lines) + "\n"


def _latex(grid: Grid, _: int | None) -> str:
    r"""Needs `\usepackage{booktabs,graphicx}`. The best is bold, the second underlined; published values are small."""
    styles = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
    groups = [(name, len(list(same))) for name, same in groupby(first for first, _ in grid.columns)]
    top = [rf"\multicolumn{{{size}}}{{c}}{{{latex(name)}}}" for name, size in groups]
    ends = list(accumulate((size for _, size in groups), initial=1))
    rules = [rf"\cmidrule(lr){{{start + 1}-{end}}}" for start, end in pairwise(ends)]
    body = []
    for i, (name, _kind) in enumerate(grid.rows):
        own = [styles[grid.cells[i, j].mark].format(latex(_own(grid, i, j) or "--")) for j in range(len(grid.columns))]
        body.append(f"{latex(name)} & {' & '.join(own)} \\\\")
        theirs = [latex(_theirs(grid, i, j)) for j in range(len(grid.columns))]
        if any(theirs):
            small = [rf"{{\scriptsize {text}}}" if text else "" for text in theirs]
            body.append(rf"{{\scriptsize published}} & {' & '.join(small)} \\")
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        *(f"% missing: {command}" for command in grid.missing),
        r"\begin{table*}",
        rf"\caption{{{latex(' '.join((grid.caption, *grid.notes)))}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{l{'r' * len(grid.columns)}}}",
        r"\toprule",
        f" & {' & '.join(top)} \\\\",
        " ".join(rules),
        f" & {' & '.join(latex(second) for _, second in grid.columns)} \\\\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def _csv(grid: Grid, _: int | None) -> str:
    """Long form: a row per cell, unrounded."""
    rows = []
    for (i, j), cell in grid.cells.items():
        mean, spread = cell.own
        rows.append(
            {
                "table": grid.name,
                "row": grid.rows[i][0],
                "dataset": grid.columns[j][0],
                "setting": grid.columns[j][1],
                "own": mean,
                "own_seed_std": spread,
                "seeds": " ".join(map(str, sorted(cell.values))),
                "unfinished": cell.reached,
                "published": cell.published.value if cell.published else math.nan,
                "published_std": cell.published.std if cell.published else math.nan,
                "difference": cell.difference,
                "rank": {"best": 1, "second": 2}.get(cell.mark),
            }
        )
    return pd.DataFrame(rows).map(csv_cell).to_csv(index=False, lineterminator="\n")
