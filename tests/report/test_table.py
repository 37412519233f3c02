"""Tables made by hand: numbers, marks, and each form of output."""

import csv
import io
import math
from dataclasses import replace

import pandas as pd
import pytest

from fedpfl.report.render import render
from fedpfl.report.table import Cell, Column, Table, format_number, mark_best

EVIL = "a|b_c*d<i>&$x%\\{\x1b[31m\n`=1"


def made(name: str = "FedAvg", **changes: object) -> Table:
    """Two blocks of one and two rows; the third column is empty."""
    columns = (Column("data set"), Column("method"), Column("nothing"))
    columns += (Column("mean", "percent", "before"), Column("Δ", "difference", "before"))
    columns += (Column("down", "short"), Column("place", "long"))
    empty = [Cell()] * 3
    first = [Cell("A"), Cell(name), Cell(), Cell(87.0), Cell(-0.001)]
    best = [Cell("B"), Cell("FedPer"), Cell(), Cell(95.0, 1.414, mark="best"), Cell(1.0)]
    second = Cell(9.5, flag="°†", mark="second", below="96.89 -0.56")
    rows = [
        [*first, Cell(22_400.0, 1310.0), Cell("out/a")],
        [*best, Cell(math.nan), Cell("out/b")],
        [Cell("B"), Cell("Ditto"), Cell(), second, *empty],
    ]
    settings = {"caption": "What_it is.", "notes": (f"A note: {name}",), "by": 1}
    settings |= {"commands": ("make it",), **changes}
    values = {"method": [name], "mean": [1 / 3], "difference": [-1.5], "empty": [math.nan]}
    frame = pd.DataFrame(values)
    return Table("", columns, rows, frame, below="published", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("percent", 96.888, "96.89"),
        ("difference", -0.001, "+0.00"),
        ("difference", -0.56, "-0.56"),
        *(("short", value, text) for value, text in ((0, "0"), (-1500, "-1.5k"), (51_200, "51.2k"), (999.99, "1k"))),
        *(("short", value, text) for value, text in ((999_960, "1M"), (37_249_664, "37.25M"), (2.5e12, "2.5T"))),
        *(("change", value, text) for value, text in ((0, "0"), (-1500, "-1.5k"), (3, "+3"))),
        *(("age", value, text) for value, text in ((-3, "0 s"), (59.9, "59 s"), (7199, "1 h"), (172_800, "2 d"))),
        *(("p", value, text) for value, text in ((0.0001, "<0.001"), (0.0742, "0.074"))),
        *(("number", value, text) for value, text in ((1.2345, "1.23"), (12_345.6, "12,346"))),
        *(("whole", 400.0, "400"), ("entries", 41_000.0, "41,000"), ("exact", 0.99993, "0.99993")),
        ("percent", math.nan, ""),
    ],
)  # fmt: skip
def test_numbers(kind: str, value: float, text: str) -> None:
    assert format_number(kind, value) == text


@pytest.mark.parametrize(
    ("values", "finished", "marks"),
    [
        ([90.0, 95.0, 93.0], "fff", " bs"),
        ([95.001, 95.004, 93.0], "fff", "bb "),  # 95.00 twice: two bests and no second
        ([90.0, 95.0, 93.001, 93.004], "ffff", " bss"),
        ([90.0, 95.0, 93.0], "frf", "s b"),
        ([90.0, 95.0, math.nan], "rrr", "sb "),
    ],
)
def test_best_and_second(values: list[float], finished: str, marks: str) -> None:
    cells = [Cell(value) for value in values]
    mark_best(cells, [state == "f" for state in finished])
    words = {"b": "best", "s": "second", " ": ""}
    assert [cell.mark for cell in cells] == [words[letter] for letter in marks]


def test_terminal() -> None:
    lines = render(made()).splitlines()
    assert lines[0] == "A"
    assert [line.split() for line in lines[1:5] if "─" not in line] == [
        ["before", "before"],
        ["method", "mean", "Δ", "down", "place"],
        ["FedAvg", "87.00", "+0.00", "22.4k(1.3k)", "out/a"],
    ]
    assert lines[6] == "B"
    assert [line.split() for line in lines[10:13]] == [
        ["FedPer", "95.00(1.41)*", "+1.00", "out/b"],
        ["Ditto", "9.50°†+"],
        ["96.89", "-0.56"],
    ]
    assert lines[14:] == [
        *("What_it is. * best, + second of its block, finished runs first.", "A note: FedAvg"),
        *("Missing cells are filled by:", "  make it"),
    ]
    assert "nothing" not in render(made())


def test_a_narrow_terminal_leaves_out_what_matters_least_first() -> None:
    spare = {"method": 0, "mean": 0, "pooled": 2, "down": 3, "up": 3, "round": 1}
    kinds = {name: "whole" if name != "method" else "text" for name in spare}
    columns = tuple(Column(name, kinds[name], spare=own) for name, own in spare.items())
    row = [Cell("FedAvg"), *(Cell(float(place)) for place in range(5))]
    table = Table("", columns, [row], pd.DataFrame({"a": [1]}))
    order = ["up", "down", "pooled", "round"]
    for count in range(5):
        left = [name for name in spare if name not in order[:count]]
        width = sum(len(name) for name in left) + 2 * (len(left) - 1)
        lines = render(table, "terminal", width).splitlines()
        assert lines[0].split() == left
        gone = ", ".join(name for name in spare if name not in left)
        told = " ".join(" ".join(lines).partition("Left out of")[2].split())
        start = f"{width} columns: {gone}. A wider window has them"
        assert told[: len(start)] == (start if gone else "")


def test_markdown() -> None:
    assert render(made(), "markdown").splitlines() == [
        "| data set | method | before mean | before Δ | down | place |",
        "|---|---|---:|---:|---:|---|",
        "| A | FedAvg | 87.00 | +0.00 | 22.4k(1.3k) | out/a |",
        "| B | FedPer | **95.00(1.41)** | +1.00 |  | out/b |",
        "| B | Ditto | <u>9.50°†</u><br>96.89 -0.56 |  |  |  |",
        "",
        r"What\_it is. Bold: best; underlined: second of its block, finished runs first.",
        *("", "A note: FedAvg", "", "Missing cells are filled by:", "", "```", "make it", "```"),
    ]


LATEX = r"""
% \usepackage{booktabs}
% left out: spared
% missing: make it
\begin{table}
\centering
\caption{Title. What\_it is.}
\label{tab:title}
\begin{tabular}{lrrrl}
\toprule
 & \multicolumn{2}{c}{before} &  &  \\
\cmidrule(lr){2-3}
method & mean & $\Delta$ & down & place \\
\midrule
\multicolumn{5}{l}{\emph{A}} \\
FedAvg & 87.00 & +0.00 & 22.4k(1.3k) & out/a \\
\midrule
\multicolumn{5}{l}{\emph{B}} \\
FedPer & \textbf{95.00(1.41)} & +1.00 &  & out/b \\
Ditto & \underline{9.50$^\circ$$^\dagger$} &  &  &  \\
{\scriptsize published} & {\scriptsize 96.89 $-$0.56} &  &  &  \\
\bottomrule
\end{tabular}
\par\smallskip{\footnotesize Method: x; all: said once; mean: x; $\Delta$: x; down: x; place: x. Bold: best; underlined:
second of its block, finished runs first. A note: FedAvg\par}
\end{table}
"""


def test_latex() -> None:
    columns = [replace(one, meaning=f"{one.heading}: x; all: said once") for one in made().columns]
    columns.insert(4, Column("spared", "short", spare=4, meaning="spared: not told"))
    rows = [[*row[:4], Cell(7.0), *row[4:]] for row in made().rows]
    text = render(replace(made(), columns=tuple(columns), rows=rows, title="Title"), "latex")
    assert text.splitlines() == LATEX.strip().splitlines()
    columns = tuple(Column(f"c{at}", "short") for at in range(9))
    many = Table("", columns, [[Cell(-1.5)] * 9], pd.DataFrame())
    assert render(many, "latex").count("table*") == 2, "a wide table spans both columns of text"
    assert "$-$1.5 & $-$1.5" in render(many, "latex")
    text = render(made(EVIL), "latex")
    assert r"a\textbar{}b\_c*d\textless{}i\textgreater{}\&\$x\%\textbackslash{}\{" in text
    plain = text.replace(r"\{", "").replace(r"\}", "")
    assert plain.count("{") == plain.count("}")


def test_csv() -> None:
    (row,) = csv.DictReader(io.StringIO(render(made(f"={EVIL}"), "csv")))
    name = f"={EVIL}".replace("\x1b", r"\x1b").replace("\n", " ")
    assert row == {"method": name, "mean": repr(1 / 3), "difference": "-1.5", "empty": ""}
    shown = (pd.DataFrame({"section": [name], name: [1]}) for name in ("a", "b"))
    frames = [Table("", (), [], frame) for frame in shown]
    assert render(frames, "csv") == "section,a,b\na,1.0,\nb,,1.0\n"
