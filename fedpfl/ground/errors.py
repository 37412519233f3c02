"""The one exception meant for users, and what may be shown of their input."""

import difflib
import re
from collections.abc import Collection, Iterable

MAX_LISTED_NAMES = 12  # names that are listed even where one is near what was meant
# Share of two names that must be alike: `dri` is near `dir`, `accuracy` is not near `auroc`
MIN_SIMILARITY = 0.65
LONG_VALUE = re.compile(
    r"(?<!\w)'[^']{120,}'(?!\w)|\[[^]]{120,}]|{[^}]{120,}}|[^\s/]{120,}"
)  # texts, lists, names in a path


class FedpflError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do."""

    def __init__(self, message: str):
        super().__init__(escape_controls(shorten_values(message)))


class MethodError(FedpflError):
    """A method breaks its contract, or its own code failed."""


def shorten_values(text: str) -> str:
    """Return a message with the middle of its long values left out."""
    return LONG_VALUE.sub(lambda value: f"{value[0][:60]} ... {value[0][-20:]}", text)


def escape_controls(text: str) -> str:
    """Return a text on one line, with control characters, which a terminal would obey, as backslash
    escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def error_text(error: BaseException, with_class: bool = False) -> str:
    """Return what an error says, on one line; its class where it says nothing, or with `kind`
    before what it says.
    """
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text}" if with_class and text else text or type(error).__name__
    )


def as_exception(error: Exception | SystemExit) -> Exception:
    """Return an error of somebody else's function as one that ends no program; `origin` undoes it."""
    if isinstance(error, Exception):
        return error
    failed = RuntimeError(error_text(error, with_class=True))
    failed.__cause__ = error
    return failed


def original_error(error: BaseException) -> BaseException:
    """Return what was raised where that became another error: StopIteration in a generator,
    SystemExit.
    """
    return error.__cause__ if isinstance(error.__cause__, StopIteration | SystemExit) else error


def did_you_mean(name: str, names: Iterable[str], template: str = "; did you mean {}?") -> str:
    """Return `words` about the known word that was probably meant, or nothing where none is near."""
    close = difflib.get_close_matches(name, list(names), 1, MIN_SIMILARITY)
    return template.replace("{}", close[0]) if close else ""


def choices_text(names: Collection[str], got: object) -> str:
    """Return `one of a, b, c, got 'x'`, with what was probably meant."""
    meant = did_you_mean(str(got), names)
    listed = (
        ", ".join(names) if len(names) <= MAX_LISTED_NAMES or not meant else f"{len(names)} names"
    )
    return f"one of {listed}, got {got!r}{meant}"


def pluralize(count: int, noun: str) -> str:
    """Return `1 trial` or `2 trials`."""
    return f"{count} {noun}{'s' * (count != 1)}"
