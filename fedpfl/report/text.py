"""Make text from files harmless in terminals, Markdown, LaTeX and HTML."""

from __future__ import annotations

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
    """Return the text on one line, with control characters escaped.

    Control characters are terminal escapes, NUL and bidirectional marks.
    """
    return escape_controls(_SPACES.sub(" ", str(text)))


def clip_text(text: Any, max_length: int = 100) -> str:
    """Return the text on one line, its middle left out where it is too long."""
    text = one_line(text)
    if len(text) <= max_length:
        return text
    tail_length = (max_length - 1) // 2
    head_length = max_length - 1 - tail_length
    return f"{text[:head_length]}…{text[-tail_length:]}"


def join_few(items: Iterable[str], separator: str = ", ") -> str:
    """Join up to four items; of more, join three and count the remaining ones.

    So a sweep does not turn a note into a list of all its values.
    """
    all_items = list(items)
    if len(all_items) <= 4:
        return separator.join(all_items)
    return f"{separator.join(all_items[:3])} and {len(all_items) - 3} more"


def format_range(numbers: Collection[int]) -> str:
    """Return `3` for equal numbers, `3–7` for different ones, nothing for none."""
    if not numbers:
        return ""
    low = min(numbers)
    high = max(numbers)
    return str(low) if low == high else f"{low}–{high}"


def wrap_lines(text: str, width: int | None = None) -> list[str]:
    """Split prose into lines of at most `width` (120) characters; words stay whole."""
    return textwrap.wrap(text, width or 120, break_long_words=False, break_on_hyphens=False)


def letters_and_digits(name: str) -> str:
    """Return letters and digits in lower case, so that `FedOBP` equals `fed_obp`.

    A plus is a word: `FLOCO+` equals `floco_plus` and not `floco`.
    """
    spelled = name.lower().replace("+", "plus")
    return "".join(letter for letter in spelled if letter.isalnum())


def escape_markdown(text: Any) -> str:
    """Escape text for Markdown, inside or outside a table."""
    # Backslashes in the same pass: those that escape are not escaped again.
    text = re.sub(r"([\\|_`*\[\]])", r"\\\1", one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_latex(text: Any) -> str:
    """Escape text for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in one_line(text))


def escape_html(text: Any) -> str:
    """Escape text for HTML."""
    return escape(one_line(text))
