"""The one exception meant for users, and what may be shown of their input."""


class FedpflError(Exception):
    """Something the user can mend. The message is one line: what is wrong, where, and what to do."""

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return a text on one line, with control characters, which a terminal would obey, as backslash escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
