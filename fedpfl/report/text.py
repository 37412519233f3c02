"""Text from files, made harmless where it is shown: terminals, Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import contextlib
import math
import os
import re
import unicodedata
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

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


def plain(text: Any) -> str:
    """Return the text on one line, control characters (terminal escapes, NUL, bidirectional marks) written out."""
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        letter if letter == " " or unicodedata.category(letter)[0] not in "CZ" else _written_out(letter)
        for letter in text
    )


def _written_out(letter: str) -> str:
    if letter in "\n\r\t" or unicodedata.category(letter) == "Zs":
        return " "
    return letter.encode("unicode_escape").decode()


def clip(text: Any, most: int = 100) -> str:
    """Return `plain` text of at most so many characters, its middle left out where it is longer."""
    text = plain(text)
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def markdown(text: Any) -> str:
    """Return text as it is to be read in Markdown, in a table or not."""
    text = re.sub(r"([\\|_`*\[\]])", r"\\\1", plain(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(text: Any) -> str:
    """Return text as it is to be read in LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in plain(text))


def html(text: Any) -> str:
    """Return text as it is to be read in HTML."""
    return escape(plain(text))


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Write a file whole or not at all: yields a name beside it, which takes its place at the end."""
    temporary = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: text that begins like one gets a `'` in front."""
    if not isinstance(value, str):
        return None if isinstance(value, float) and math.isnan(value) else value
    value = plain(value)
    if value.lstrip()[:1] in ("=", "+", "-", "@") and not _is_number(value):
        return f"'{value}"
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
