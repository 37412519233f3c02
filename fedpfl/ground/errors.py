"""The one exception meant for users, and what may be shown of their input."""

import difflib
import re
from collections.abc import Collection, Iterable

SHORT = 12  # names that are listed even where one is near what was meant
# Share of two names that must be alike: `dri` is near `dir`, `accuracy` is not near `auroc`
LIKE = 0.65
LONG = re.compile(
    r"(?<!\w)'[^']{120,}'(?!\w)|\[[^]]{120,}]|{[^}]{120,}}|[^\s/]{120,}"
)  # texts, lists, names in a path


class FedpflError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do."""

    def __init__(self, message: str):
        super().__init__(printable(brief(message)))


class Broken(FedpflError):
    """A method breaks its contract, or its own code failed."""


def brief(text: str) -> str:
    """Return a message with the middle of its long values left out."""
    return LONG.sub(lambda value: f"{value[0][:60]} ... {value[0][-20:]}", text)


def printable(text: str) -> str:
    """Return a text on one line, with control characters, which a terminal would obey, as backslash
    escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def reason(error: BaseException, kind: bool = False) -> str:
    """Return what an error says, on one line; its class where it says nothing, or with `kind`
    before what it says.
    """
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if kind and text else text or type(error).__name__


def contained(error: Exception | SystemExit) -> Exception:
    """Return an error of somebody else's function as one that ends no program; `origin` undoes it."""
    if isinstance(error, Exception):
        return error
    failed = RuntimeError(reason(error, kind=True))
    failed.__cause__ = error
    return failed


def origin(error: BaseException) -> BaseException:
    """Return what was raised where that became another error: StopIteration in a generator,
    SystemExit.
    """
    return error.__cause__ if isinstance(error.__cause__, StopIteration | SystemExit) else error


def near(word: str, known: Iterable[str], words: str = "; did you mean {}?") -> str:
    """Return `words` about the known word that was probably meant, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), 1, LIKE)
    return words.replace("{}", close[0]) if close else ""


def one_of(known: Collection[str], got: object) -> str:
    """Return `one of a, b, c, got 'x'`, with what was probably meant."""
    meant = near(str(got), known)
    listed = ", ".join(known) if len(known) <= SHORT or not meant else f"{len(known)} names"
    return f"one of {listed}, got {got!r}{meant}"


def many(count: int, what: str) -> str:
    """Return `1 trial` or `2 trials`."""
    return f"{count} {what}{'s' * (count != 1)}"
