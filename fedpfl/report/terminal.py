"""A table on a terminal: columns fold, go, or stand in further blocks below where the window is
narrow.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence

from fedpfl.report.table import Column, Table
from fedpfl.report.text import one_line, wrap_lines

_GAP = 2


def render_terminal(table: Table, width: int | None) -> str:
    """Return the table as text. width: of the window, in characters; None: as wide as needed."""
    filled, texts = _texts(table)
    heads = [f"{column.group}\n{column.heading}" for column in table.columns]
    whole, words = dict[int, int](), dict[int, int]()
    for at in filled:
        lines = "\n".join([heads[at], *(row[at] for row in texts)]).split("\n")
        whole[at] = max(map(len, lines))
        folds = table.columns[at].kind == "text"
        words[at] = (
            max(len(word) for line in lines for word in line.split() or [" "])
            if folds
            else whole[at]
        )
    room = width or 10**9
    places, under, left_out = _kept(table, filled, whole, words, room)
    out = []
    for title, rows in table.blocks():
        out += [title] if title else []
        for block in (parts := _parts(places, words, room)):
            widths = _widths(
                [at for at in block if table.columns[at].kind == "text"], block, whole, words, room
            )
            grouped = any(table.columns[at].group for at in block)
            top = [heads[at] if grouped else table.columns[at].heading for at in block]
            out += _lines(top, block, widths, table.columns)
            out.append("─" * _needed(block, widths))
            for row in rows:
                out += _lines([texts[row][at] for at in block], block, widths, table.columns)
                out += (
                    [f"    {texts[row][under]}"] if under is not None and block is parts[-1] else []
                )
            out.append("")
    prose = table.prose("terminal", places)
    if left_out:
        names = [table.columns[at].name for at in sorted(left_out)]
        prose.append(
            f"Left out of {width} columns: {', '.join(names)}. A wider window shows them, and so does | less -S."
        )
    for line in map(one_line, prose):
        out += wrap_lines(line, width)
    out += (
        ["Missing cells are filled by:", *(f"  {command}" for command in table.commands)]
        if table.commands
        else []
    )
    return "\n".join(out).rstrip("\n") + "\n"


def _texts(table: Table) -> tuple[list[int], list[list[str]]]:
    """The places of the columns in which anything stands, and every cell's lines."""
    filled, texts = table.texts("terminal", one_line)
    marked = {at for at in filled if any(row[at].mark for row in table.rows)}
    for own, cells in zip(texts, table.rows, strict=True):
        for at, cell in enumerate(cells):
            if at in marked and not cell.mark and own[at]:
                own[at] += " "  # keeps its digits below those of the marked
            own[at] += f"\n{one_line(cell.below)}" if cell.below else ""
    return filled, texts


def _kept(
    table: Table,
    filled: Sequence[int],
    whole: Mapping[int, int],
    words: Mapping[int, int],
    room: int,
) -> tuple[list[int], int | None, list[int]]:
    """The columns that are shown, the one that stands below its rows, and those left out for want
    of room.
    """
    under, left_out = None, list[int]()
    places = [at for at in filled if at >= table.by]
    if _needed(places, whole) > room and table.columns[places[-1]].kind == "long":
        under = places.pop()
    # Text may fold, but not to a tower of words while there is something to leave out.
    fair = {at: max(words[at], min(whole[at], room // 4)) for at in filled}
    while _needed(places, fair) > room and any(table.columns[at].spare for at in places):
        left_out.append(max(places, key=lambda at: (table.columns[at].spare, at)))
        places.remove(left_out[-1])
    return places, under, left_out


def _parts(places: Sequence[int], words: Mapping[int, int], room: int) -> list[list[int]]:
    """The columns side by side; each further part begins with the first column again."""
    first, parts = places[0], [[places[0]]]
    # A long label folds rather than push the numbers out.
    least = {**words, first: min(words[first], max(18, room // 3))}
    for at in places[1:]:
        if len(parts[-1]) > 1 and _needed([*parts[-1], at], least) > room:
            parts.append([first])
        parts[-1].append(at)
    return parts


def _widths(
    texts: Sequence[int],
    part: Sequence[int],
    whole: Mapping[int, int],
    words: Mapping[int, int],
    room: int,
) -> dict[int, int]:
    """The columns' widths: those of text shrink, the widest first, down to their words and then
    through them.
    """
    widths = dict(whole)
    for limit in (words, {at: min(4, own) for at, own in words.items()}):
        while _needed(part, widths) > room and (
            wide := [at for at in texts if widths[at] > limit[at]]
        ):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _needed(places: Sequence[int], widths: Mapping[int, int]) -> int:
    return sum(widths[at] for at in places) + _GAP * (len(places) - 1)


def _lines(
    texts: Sequence[str], part: Sequence[int], widths: Mapping[int, int], columns: Sequence[Column]
) -> list[str]:
    """One row as lines, its text folded to the widths."""
    folded = []
    for text, at in zip(texts, part, strict=True):
        lines = [
            textwrap.wrap(line, widths[at], break_on_hyphens=False) or [""]
            for line in text.split("\n")
        ]
        folded.append([*itertools.chain(*lines)])
    forms = [f"{{:{'>' if columns[at].numeric else '<'}{widths[at]}}}" for at in part]
    row = (" " * _GAP).join(forms)
    return [row.format(*line).rstrip() for line in itertools.zip_longest(*folded, fillvalue="")]
