"""Small tables as text, for the terminal and as Markdown, and numbers as people read them."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from fedpfl.report.text import markdown as escaped
from fedpfl.report.text import plain

GAP = "  "


@dataclass(frozen=True)
class Field:
    """One column. number: to the right and never folded."""

    heading: str
    number: bool = False


def screen() -> int | None:
    """The terminal's width in characters; None where a file or pipe gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def terminal(
    fields: Sequence[Field],
    rows: Sequence[Sequence[str]],
    title: str = "",
    width: int | None = None,
    below: Sequence[str] = (),
) -> str:
    """The table for a terminal of this width, by default as wide as needed. Empty columns are left out.

    Text folds between words; within a word only where nothing else helps. below: a line under each row.
    """
    rows, below, title = [[plain(cell) for cell in row] for row in rows], [*map(plain, below)], plain(title)
    kept = _filled(fields, rows)
    widths = _widths(fields, rows, kept, width)
    lines = [title] if title else []
    lines += _folded([fields[place].heading for place in kept], widths, [fields[place].number for place in kept])
    lines.append("─" * (sum(widths) + len(GAP) * (len(widths) - 1)))
    for number, row in enumerate(rows):
        lines += _folded([row[place] for place in kept], widths, [fields[place].number for place in kept])
        lines += [f"    {below[number]}"] if below else []
    return "\n".join(lines) + "\n"


def fits(fields: Sequence[Field], rows: Sequence[Sequence[str]], width: int | None, folded: bool = False) -> bool:
    """Whether `terminal` needs no more than the width: on one line per row, or `folded` between words."""
    kept = _filled(fields, rows)
    least = _words if folded else _longest
    needed = sum(least(fields[place], [row[place] for row in rows]) for place in kept)
    return width is None or needed + len(GAP) * (len(kept) - 1) <= width


def paragraph(text: str, width: int | None = None) -> str:
    """A line of prose, folded between words to the width, by default left as it is."""
    text = plain(text)
    folded = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) if width else [text]
    return "\n".join(folded) + "\n"


def markdown(fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown. Empty columns are left out."""
    kept = _filled(fields, rows)
    lines = [
        "| " + " | ".join(escaped(fields[place].heading) for place in kept) + " |",
        "|" + "|".join("---:" if fields[place].number else "---" for place in kept) + "|",
        *("| " + " | ".join(escaped(row[place]) for place in kept) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def percent(value: float | None, spread: float = math.nan) -> str:
    """`96.89`, with a spread `96.89(0.03)`; nothing for nothing."""
    if value is None or math.isnan(value):
        return ""
    return f"{value:.2f}" + ("" if math.isnan(spread) else f"({spread:.2f})")


def short(value: float | None, digits: int = 4) -> str:
    """So many digits and a unit: `22.4k`, `1.31M`; nothing for nothing."""
    if value is None or math.isnan(value):
        return ""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        # 999.96 would round to a thousand.
        if float(f"{abs(value):.{digits}g}") >= size:
            return f"{value / size:.{max(3, digits)}g}{unit}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d`, rounded down."""
    seconds = max(0, int(seconds))  # clocks of file servers run ahead
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def size(count: int) -> str:
    """Bytes as `12.3 MB`."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if round(value, 1) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}"


def _filled(fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> list[int]:
    return [place for place in range(len(fields)) if not rows or any(row[place] for row in rows)]


def _longest(field: Field, texts: Sequence[str]) -> int:
    return max(map(len, (field.heading, *texts)))


def _words(field: Field, texts: Sequence[str]) -> int:
    """As wide as the column's longest word; numbers stay whole."""
    if field.number:
        return _longest(field, texts)
    return max((len(word) for text in (field.heading, *texts) for word in text.split()), default=1)


def _widths(fields: Sequence[Field], rows: Sequence[Sequence[str]], kept: list[int], width: int | None) -> list[int]:
    texts = [[row[place] for row in rows] for place in kept]
    widths = [_longest(fields[place], own) for place, own in zip(kept, texts, strict=True)]
    if width is None:
        return widths
    room = width - len(GAP) * (len(kept) - 1)
    words = [_words(fields[place], own) for place, own in zip(kept, texts, strict=True)]
    letters = [own if fields[place].number else min(own, 4) for place, own in zip(kept, words, strict=True)]
    for least in (words, letters):
        while sum(widths) > room:
            spare = [own - limit for own, limit in zip(widths, least, strict=True)]
            if max(spare) <= 0:
                break
            # Of the columns that can give way, the widest.
            widest = max((place for place in range(len(widths)) if spare[place] > 0), key=widths.__getitem__)
            widths[widest] -= 1
    return widths


def _folded(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    """One row as lines."""
    parts = [textwrap.wrap(cell, own, break_on_hyphens=False) or [""] for cell, own in zip(cells, widths, strict=True)]
    lines = []
    for line in itertools.zip_longest(*parts, fillvalue=""):
        padded = [
            part.rjust(own) if end else part.ljust(own) for part, own, end in zip(line, widths, right, strict=True)
        ]
        lines.append(GAP.join(padded).rstrip())
    return lines
