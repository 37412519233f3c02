"""The one exception meant for users, and what may be shown of their input."""

import difflib
from collections.abc import Collection, Iterable

SHORT = 12  # names that are listed even where one is near what was meant


class FedpflError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class Broken(FedpflError):
    """A method breaks its contract, or its own code failed."""


def printable(text: str) -> str:
    """Return a text on one line, with control characters, which a terminal would obey, as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def reason(error: BaseException, kind: bool = False) -> str:
    """Return what an error says, on one line; its class where it says nothing, or with `kind` before what it says."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if kind and text else text or type(error).__name__


def near(word: str, known: Iterable[str], words: str = "; did you mean {}?") -> str:
    """Return `words` about the known word that was probably meant, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), 1)
    return words.replace("{}", close[0]) if close else ""


def one_of(known: Collection[str], got: object) -> str:
    """Return `one of a, b, c, got 'x'`, with what was probably meant."""
    meant = near(str(got), known)
    listed = ", ".join(known) if len(known) <= SHORT or not meant else f"{len(known)} names"
    return f"one of {listed}, got {got!r}{meant}"


def many(count: int, what: str) -> str:
    """Return `1 trial` or `2 trials`."""
    return f"{count} {what}{'s' * (count != 1)}"
