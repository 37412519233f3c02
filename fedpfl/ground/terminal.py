"""Parse command lines, and print notices and errors as single lines on standard error."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError, escape_controls, shorten_values
from fedpfl.ground.words import check_words


def print_notice(text: object) -> None:
    """Print one line on standard error, where it does not mix with results."""
    line = escape_controls(shorten_values(str(text)))
    answer.last_error[:] = [line]
    print(f"fedpfl: {line}", file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses words in one line and takes no abbreviated options."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, **settings)

    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse words in any order."""
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            check_words(arguments, self._option_string_actions)
        except FedpflError as error:
            self.error(str(error))
        return super().parse_intermixed_args(arguments, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message, and exit with status 2."""
        print_notice(f"{message}; {self.prog} --help tells what it takes")
        sys.exit(2)


class _LossyStream(io.FileIO):
    """A standard stream that drops output after its reader has left (`| head`)."""

    def write(self, data: Any, /) -> int:
        """Write, or drop the data if the reader has left."""
        try:
            return super().write(data)
        except BrokenPipeError:
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, self.fileno())  # for child processes too
            os.close(null_device)
            return len(data)


def outlive_readers() -> None:
    """Let a command run to its end after the reader of its output has left."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # `python -u` has no buffer
        if not isinstance(raw, io.FileIO) or isinstance(raw, _LossyStream):
            continue
        with contextlib.suppress(OSError):
            stream.flush()
            lossy: Any = _LossyStream(raw.fileno(), "w", closefd=False)
            buffered = lossy if buffer is raw else io.BufferedWriter(lossy)
            text = io.TextIOWrapper(
                buffered,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, text)
