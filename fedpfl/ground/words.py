"""The words of a command: each is understood as it stands, or refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence

from fedpfl.ground.errors import FedpflError, did_you_mean

DASHES = "‐‑‒–—―−﹘﹣－"
"""Dashes that word processors and web pages write for the keyboard's."""
NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
KEY = re.compile(r"[A-Za-z_][\w./]*", re.ASCII)


def parser_options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return a parser's options, each with its value's name, "" where it takes none."""
    actions = parser._option_string_actions.items()
    return {name: "" if action.nargs == 0 else action.dest for name, action in actions}


def check_words(words: Sequence[str], options: Mapping[str, str], advice: str = "") -> list[str]:
    """Return a command's words without `--`, behind which nothing is an option.

    Args:
        words: as the shell gave them.
        options: their names, each with its value's name, "" where it takes none.
        advice: what tells all options, for an error.

    Raises:
        FedpflError: for an empty word, a word that looks like an option and is none, an option
        given twice.
    """
    values = set()
    for word in words:
        if not word.strip():
            raise FedpflError(
                "the command has an empty word; leave it out, or give its key a value"
            )
        if word[0] in DASHES:
            right = _typed(word, options)
            raise FedpflError(
                f"{word} begins with a dash that is not the keyboard's; write {right}"
            )
    end = words.index("--") if "--" in words else len(words)
    for word in words[:end]:
        if not word.startswith("-") or word == "-" or NEGATIVE.fullmatch(word):
            continue
        name, equals, _ = word.partition("=")
        if name not in options:
            parts = (f"{word} is no option", advice, _meant_option(word, options))
            raise FedpflError("; ".join(filter(None, parts)))
        if equals and not options[name]:
            raise FedpflError(f"{word}: {name} takes no value; write {name}")
        if options[name] in values:
            raise FedpflError(f"{name} is given twice; leave one of them out")
        values |= {options[name]} - {""}
    behind = list(words[end + 1 :])
    if option := next((word for word in behind if word.startswith("-")), None):
        raise FedpflError(f"{option} stands behind --, where nothing is an option; put it before")
    return [*words[:end], *behind]


def replaced_words(words: Iterable[str]) -> str:
    """Return a note about keys that are given twice with different values, "" without any."""
    latest: dict[str, str] = {}
    pairs = []
    for word in words:
        key, equals, _ = word.lstrip("+").partition("=")
        if not equals or word.startswith(("-", "~")):
            continue
        if latest.get(key, word) != word:
            pairs.append(f"{latest[key]}, then {word}")
        latest[key] = word
    return f"given twice, and the last one counts: {'; '.join(pairs)}" if pairs else ""


def _meant_option(word: str, options: Mapping[str, str]) -> str:
    """Return what a word that is no option was probably meant to be, "" where nothing is near."""
    name, equals, value = word.partition("=")
    bare = _bare(name)
    longer = [
        option for option in options if name.startswith("--") and bare and option.startswith(name)
    ]
    if longer:
        return f"did you mean {' or '.join(longer)}?"
    if equals and KEY.fullmatch(bare):
        return f"keys have no dash: {bare}={value}"
    letters = [f"-{letter}" for letter in bare]
    if len(letters) > 1 and all(letter in options for letter in letters):
        return f"options stand apart: {' '.join(letters)}"
    if not name.startswith("--"):
        return ""
    return did_you_mean(
        bare, [_bare(option) for option in options if option.startswith("--")], "did you mean --{}?"
    )


def _typed(word: str, options: Mapping[str, str]) -> str:
    """Return a word that begins with another dash as the keyboard has it."""
    bare = _bare(word)
    name, equals, _ = bare.partition("=")
    option = next((option for option in (f"-{name}", f"--{name}") if option in options), "")
    if option or not equals:
        return f"{option or '-'}{bare.removeprefix(name) if option else bare}"
    return bare


def _bare(word: str) -> str:
    return word.lstrip(f"-{DASHES}")
