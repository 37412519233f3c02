"""Text from files, made harmless where it is shown: terminals, Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Collection, Iterable
from html import escape
from typing import Any

from fedpfl.ground.errors import escape_controls

_SPACES = re.compile(r"[\n\r\t\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "Δ": r"$\Delta$",
    "°": r"$^\circ$",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    "–": "--",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}


def one_line(text: Any) -> str:
    """Return the text on one line, control characters (terminal escapes, NUL, bidirectional marks)
    written out.
    """
    return escape_controls(_SPACES.sub(" ", str(text)))


def clip_text(text: Any, most: int = 100) -> str:
    """Return `plain` text of at most so many characters, its middle left out where it is longer."""
    text = one_line(text)
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def join_few(words: Iterable[str], between: str = ", ") -> str:
    """Join words; a sweep must not turn a note into a list of its values."""
    every = list(words)
    return (
        between.join(every)
        if len(every) <= 4
        else f"{between.join(every[:3])} and {len(every) - 3} more"
    )


def format_range(numbers: Collection[int]) -> str:
    """Return `3`, or `3–7` for the least and the greatest of different numbers; nothing for none."""
    low, high = (min(numbers), max(numbers)) if numbers else ("", "")
    return str(low) if low == high else f"{low}–{high}"


def wrap_lines(text: str, width: int | None = None) -> list[str]:
    """Return prose as lines, by default of at most 120 characters; words stay whole."""
    return textwrap.wrap(text, width or 120, break_long_words=False, break_on_hyphens=False)


def letters_and_digits(name: str) -> str:
    """Return letters and digits in lower case: `FedOBP`, `fedobp` and `fed_obp` are one method."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def escape_markdown(text: Any) -> str:
    """Return text as it is to be read in Markdown, in a table or not."""
    text = re.sub(r"([\\|_`*\[\]])", r"\\\1", one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_latex(text: Any) -> str:
    """Return text as it is to be read in LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in one_line(text))


def escape_html(text: Any) -> str:
    """Return text as it is to be read in HTML."""
    return escape(one_line(text))


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: text that begins like one gets a `'`
    in front.
    """
    if not isinstance(value, str):
        return None if isinstance(value, float) and math.isnan(value) else value
    value = one_line(value)
    with contextlib.suppress(ValueError):
        if math.isfinite(float(value)):
            return value
    return f"'{value}" if value.lstrip()[:1] in ("=", "+", "-", "@") else value
