"""Options of a command line: each is known as it stands, or refused."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from fedpfl.ground.errors import FedpflError, did_you_mean

NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


def check_words(arguments: Sequence[str], options: Collection[str], advice: str = "") -> list[str]:
    """Return the words of a command. Raises FedpflError for an unknown option.

    Args:
        arguments: The words from the shell.
        options: The options' names.
        advice: How to list all options, for an error.
    """
    for word in arguments:
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name in options or NEGATIVE.fullmatch(word):
            continue
        suggestion = did_you_mean(name, options)
        if equals and not suggestion:
            suggestion = f"; keys have no dash: {name.lstrip('-')}={value}"
        raise FedpflError(f"{word} is no option{advice and '; '}{advice}{suggestion}")
    return list(arguments)
