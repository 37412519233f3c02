"""Check the words of a command line: each is understood as it stands, or refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence

from fedpfl.ground.errors import FedpflError, did_you_mean

DASHES = "‐‑‒–—―−﹘﹣－"
"""Dashes that word processors and web pages write in place of the keyboard's."""
NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
KEY = re.compile(r"[A-Za-z_][\w./]*", re.ASCII)


def parser_options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return a parser's options with the names of their values ("" for flags)."""
    actions = parser._option_string_actions.items()
    return {name: "" if action.nargs == 0 else action.dest for name, action in actions}


def check_words(
    arguments: Sequence[str], options: Mapping[str, str], advice: str = ""
) -> list[str]:
    """Return a command's words without `--`, after which no word is an option.

    Args:
        arguments: The words from the shell.
        options: The options' names, each with its value's name ("" for flags).
        advice: How to list all options, for an error.

    Raises:
        FedpflError: For an empty word, an unknown option, or an option given twice.
    """
    # ---- Words that nobody means as they stand.
    for word in arguments:
        if not word.strip():
            raise FedpflError(
                "the command has an empty word; leave it out, or give its key a value"
            )
        if word[0] in DASHES:
            corrected = _with_keyboard_dash(word, options)
            raise FedpflError(
                f"{word} begins with a dash that is not the keyboard's; write {corrected}"
            )

    # ---- Options before `--`.
    value_names = set()
    options_end = arguments.index("--") if "--" in arguments else len(arguments)
    for word in arguments[:options_end]:
        if not word.startswith("-") or word == "-" or NEGATIVE.fullmatch(word):
            continue
        name, equals, _ = word.partition("=")
        if name not in options:
            parts = (f"{word} is no option", advice, _suggest_option(word, options))
            raise FedpflError("; ".join(filter(None, parts)))
        if equals and not options[name]:
            raise FedpflError(f"{word}: {name} takes no value; write {name}")
        if options[name] in value_names:
            raise FedpflError(f"{name} is given twice; leave one of them out")
        # By the value's name, not the option's: `-cd` and `--config-dir` are one option.
        value_names |= {options[name]} - {""}

    # ---- Words after `--`.
    after_dashes = list(arguments[options_end + 1 :])
    for word in after_dashes:
        if word.startswith("-"):
            raise FedpflError(f"{word} stands behind --, where nothing is an option; put it before")
    return [*arguments[:options_end], *after_dashes]


def replaced_words(run_words: Iterable[str]) -> str:
    """Return a note about keys that are given twice with different values, "" without any."""
    latest: dict[str, str] = {}
    pairs = []
    for word in run_words:
        key, equals, _ = word.lstrip("+").partition("=")
        if not equals or word.startswith(("-", "~")):
            continue
        if latest.get(key, word) != word:
            pairs.append(f"{latest[key]}, then {word}")
        latest[key] = word
    if not pairs:
        return ""
    return f"given twice, and the last one counts: {'; '.join(pairs)}"


def _suggest_option(word: str, options: Mapping[str, str]) -> str:
    """Return advice on a word that is no option, "" where nothing is near."""
    name, equals, value = word.partition("=")
    bare = _strip_dashes(name)
    if name.startswith("--") and bare:
        completions = [option for option in options if option.startswith(name)]
        if completions:
            return f"did you mean {' or '.join(completions)}?"
    if equals and KEY.fullmatch(bare):
        return f"keys have no dash: {bare}={value}"
    # `-cd` of a command that has `-c` and `-d`.
    letters = [f"-{letter}" for letter in bare]
    if len(letters) > 1 and all(letter in options for letter in letters):
        return f"options stand apart: {' '.join(letters)}"
    if not name.startswith("--"):
        return ""
    long_options = [_strip_dashes(option) for option in options if option.startswith("--")]
    return did_you_mean(bare, long_options, "did you mean --{}?")


def _with_keyboard_dash(word: str, options: Mapping[str, str]) -> str:
    """Return a word that begins with a typographic dash in the form that was meant."""
    bare = _strip_dashes(word)
    name, equals, _ = bare.partition("=")
    for option in (f"-{name}", f"--{name}"):
        if option in options:
            return option + bare.removeprefix(name)
    if equals:
        return bare  # a key and its value
    return f"-{bare}"


def _strip_dashes(word: str) -> str:
    return word.lstrip(f"-{DASHES}")
