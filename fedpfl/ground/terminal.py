"""What all commands share: how they read words, and one line on standard error for what is wrong."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fedpfl.ground.errors import FedpflError, escape_controls, shorten_values
from fedpfl.ground.words import check_words, parser_options, replaced_words


def print_notice(text: object) -> None:
    """Print one line for the user where it does not mix with results."""
    print(f"fedpfl: {escape_controls(shorten_values(str(text)))}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Read a command's words, and refuse them in one line, as everything is refused.

    Options are written out. repeats: whether a key that is given again has both values, as a
    filter's has.
    """

    def __init__(self, *, repeats: bool = False, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)
        self._repeats = repeats

    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Read words that stand in any order, each of them as it stands."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            words = check_words(
                words, parser_options(self), f"{self.prog} --help tells what it takes"
            )
        except FedpflError as error:
            print_notice(error)
            sys.exit(2)
        chosen = super().parse_intermixed_args(words, namespace)
        if not self._repeats and (note := replaced_words(words)):
            print_notice(note)
        return chosen

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end the process with status 2."""
        print_notice(f"{message}; {self.prog} --help tells what it takes")
        sys.exit(2)


class _Stream(io.FileIO):
    """A standard stream whose reader may leave: what is written from then on is lost, as `| head`
    wants it.
    """

    def write(self, data: Any, /) -> int:
        """Write, to nowhere once nobody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for child processes too
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Let a command go on to its end where what it prints is no longer read."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # `python -u` has no buffer
        if not isinstance(raw, io.FileIO) or isinstance(raw, _Stream):
            continue
        with contextlib.suppress(OSError):
            stream.flush()
            quiet: Any = _Stream(raw.fileno(), "w", closefd=False)
            text = io.TextIOWrapper(
                quiet if buffer is raw else io.BufferedWriter(quiet),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, text)
