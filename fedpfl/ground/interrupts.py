"""Ctrl-C, and the SIGTERM of schedulers: one line and an exit status of its own, whatever a command is at."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Interrupt(KeyboardInterrupt):
    """Say by which signal, and what is to be told of it."""

    def __init__(self, number: int):
        super().__init__("terminated" if number == signal.SIGTERM else "interrupted")
        self.status = STATUS[signal.Signals(number)]


def importing(number: int, frame: object) -> NoReturn:
    """End a command whose modules are being imported, a second or two in which nothing is open."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0":
        print(f"fedpfl: {Interrupt(number)} before anything was done", file=sys.stderr, flush=True)
    os._exit(Interrupt(number).status)


def playing(number: int, frame: object) -> NoReturn:
    """Raise Interrupt, at which runs are saved."""
    raise Interrupt(number)


def answer(how: Callable[[int, object], NoReturn]) -> None:
    """Answer both signals so from here on, but for those that whoever started this process has it ignore."""
    for number in STATUS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, how)


def ended(error: KeyboardInterrupt, tell: Callable[[str], None]) -> NoReturn:
    """Say that the command was interrupted, and end it."""
    for number in STATUS:
        signal.signal(number, signal.SIG_IGN)  # threads are ending; a second one would only spoil the message
    tell(f"{str(error) or 'interrupted'}; the same command goes on from the last checkpoint")
    sys.exit(getattr(error, "status", STATUS[signal.SIGINT]))
