"""The one exception meant for users, and the form in which messages quote their input."""

import difflib
import re
from collections.abc import Collection, Iterable

# Up to so many names are listed even where one of them is probably meant.
MAX_LISTED_NAMES = 12
# Share of two names that must agree: `dri` is near `dir`, `accuracy` is not near `auroc`.
MIN_SIMILARITY = 0.65
# Texts in quotes, lists, mappings and names in a path of 120 characters or more.
LONG_VALUE = re.compile(r"(?<!\w)'[^']{120,}'(?!\w)|\[[^]]{120,}]|{[^}]{120,}}|[^\s/]{120,}")


class FedpflError(Exception):
    """An error that the user can correct.

    The message is one line: the fault, its place, and the remedy.
    """

    def __init__(self, message: str):
        super().__init__(escape_controls(shorten_values(message)))


class MethodError(FedpflError):
    """A method breaks its contract, or its own code failed."""


def missing_extra(problem: str, extra: str) -> FedpflError:
    """Return the error for an absent package of one of this project's extras."""
    # No package index has this project, and its name there may become a stranger's.
    return FedpflError(f"{problem}; pip install -e '.[{extra}]' in a checkout of fedpfl")


def shorten_values(text: str) -> str:
    """Leave out the middle of long values in a message."""
    return LONG_VALUE.sub(lambda match: f"{match[0][:60]} ... {match[0][-20:]}", text)


def escape_controls(text: str) -> str:
    """Return a text on one line, with control characters as backslash escapes."""
    # A terminal would obey them.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def error_text(error: BaseException, with_class: bool = False) -> str:
    """Return an error's message on one line.

    Args:
        error: Any exception.
        with_class: Whether the class stands before the message. Without a message the class is
            returned alone in either case.
    """
    class_name = type(error).__name__
    message = getattr(error, "strerror", None) or " ".join(str(error).split())
    if not message:
        return class_name
    if with_class:
        return f"{class_name}: {message}"
    return message


def as_exception(error: Exception | SystemExit) -> Exception:
    """Turn SystemExit in a user's function into an error that ends no program.

    `original_error` returns it again.
    """
    if isinstance(error, Exception):
        return error
    replacement = RuntimeError(error_text(error, with_class=True))
    replacement.__cause__ = error
    return replacement


def original_error(error: BaseException) -> BaseException:
    """Return the StopIteration or SystemExit that became another error, else the error."""
    # A generator turns StopIteration into RuntimeError; `as_exception` does so with SystemExit.
    if isinstance(error.__cause__, StopIteration | SystemExit):
        return error.__cause__
    return error


def did_you_mean(name: str, names: Iterable[str], template: str = "; did you mean {}?") -> str:
    """Return the template with the most similar name, or "" where none is near."""
    matches = difflib.get_close_matches(name, list(names), 1, MIN_SIMILARITY)
    if not matches:
        return ""
    # Not `format`: the name may have braces.
    return template.replace("{}", matches[0])


def choices_text(names: Collection[str], value: object) -> str:
    """Return `one of a, b, c, got 'x'`, with the name that was probably meant."""
    suggestion = did_you_mean(str(value), names)
    if len(names) <= MAX_LISTED_NAMES or not suggestion:
        choices = ", ".join(names)
    else:
        choices = f"{len(names)} names"
    return f"one of {choices}, got {value!r}{suggestion}"


def pluralize(count: int, noun: str) -> str:
    """Return `1 trial` or `2 trials`."""
    return f"{count} {noun}{'s' * (count != 1)}"
