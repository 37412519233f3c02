"""Ctrl-C and the signals of schedulers: one line and an exit status of its own, whatever a command
is at.

SIGTERM is how schedulers, `kill` and torchrun end a process; SIGUSR2 how submitit has Slurm
announce that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from fedpfl.ground.terminal import print_notice

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit status by signal; where several came, the last of these counts."""
if hasattr(signal, "SIGUSR2"):
    EXIT_STATUS[signal.SIGUSR2] = 143
RESUME_ADVICE = "the same command goes on from the last checkpoint"
REPEAT_SECONDS = 10.0
"""Seconds in which a further signal is the same news: a terminal, a scheduler and torchrun may all
tell a process.
"""

_answered: list[signal.Signals] = []
_heard: list[int] = []
_since: list[float] = []
_first: list[Callable[[], None]] = []


class Interrupt(KeyboardInterrupt):
    """Say by which signal, and what is to be told of it."""

    def __init__(self, number: int):
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.number, self.status = number, EXIT_STATUS[signal.Signals(number)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel from a worker process to the one that started it."""
        return Interrupt, (self.number,)


def exit_during_import(number: int, frame: object) -> NoReturn:
    """End a command whose modules are being imported, a second or two in which nothing is open."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0":
        print(f"fedpfl: {Interrupt(number)} before anything was done", file=sys.stderr, flush=True)
    os._exit(Interrupt(number).status)


def raise_interrupt(number: int, frame: object) -> None:
    """Raise Interrupt, at which runs are saved; not again while that may be going on."""
    _heard.append(number)
    if _since and time.monotonic() - _since[0] < REPEAT_SECONDS:
        return
    _since[:] = [time.monotonic()]
    for act in _first:
        act()
    raise Interrupt(number)


@contextmanager
def before_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """Have this done as soon as a signal comes, before anything ends by it."""
    _first.append(act)
    try:
        yield
    finally:
        _first.remove(act)


def install_handler(how: Callable[[int, object], None]) -> None:
    """Answer the signals so from here on, but for those that whoever started this process has it
    ignore.
    """
    _heard.clear()
    _since.clear()
    # None: it is not Python that answers.
    _answered[:] = [
        number for number in EXIT_STATUS if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    for number in _answered:
        signal.signal(number, how)


def reinstall_handlers() -> None:
    """Answer as `playing` again where a library has put itself in its place, as Ray does, with a
    dump of the stack.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _answered:
            signal.signal(number, raise_interrupt)


def ignore_signals() -> None:
    """Answer no signal from here on: the process ends, and another one would only spoil its last
    words.
    """
    for number in EXIT_STATUS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Save the run that is played here before a launcher's process answers a signal as its launcher
    has it.

    So does submitit queue a job again once its run is saved. Where nobody answers the Interrupt
    goes on. In a command, which hears already, and in a thread, which signals do not reach, nothing
    is done.
    """
    before = {number: signal.getsignal(number) for number in EXIT_STATUS}
    if (
        raise_interrupt in before.values()
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    install_handler(raise_interrupt)
    interrupt = None
    try:
        yield
    except KeyboardInterrupt as error:
        interrupt = error
    finally:
        _give_back(before)
    if interrupt:
        _hand_on(interrupt, before)


def _hand_on(interrupt: KeyboardInterrupt, before: Mapping[signal.Signals, Any]) -> NoReturn:
    """Have the signal answered as it was `before`, and end the process; raise the interrupt where
    nobody answers.
    """
    number = _said()
    then = before[number] if number else None
    if number is None or not callable(then) or then is signal.default_int_handler:
        raise interrupt
    print_notice(f"{interrupt}; {RESUME_ADVICE}")
    then(number, None)
    sys.exit(EXIT_STATUS[number])


def _give_back(before: Mapping[signal.Signals, Any]) -> None:
    _answered.clear()
    for number, how in before.items():
        if how is not None:
            signal.signal(number, how)


def _said() -> signal.Signals | None:
    """Return which signal is to be answered of those that came, if any did."""
    return max(map(signal.Signals, _heard), key=lambda own: [*EXIT_STATUS].index(own), default=None)


def exit_interrupted(error: KeyboardInterrupt, tell: Callable[[str], None]) -> NoReturn:
    """Say that the command was interrupted, and end it."""
    ignore_signals()  # threads are ending
    if not str(error) and (number := _said()):
        error = Interrupt(number)  # which a library has raised again as its own
    tell(f"{str(error) or 'interrupted'}; {RESUME_ADVICE}")
    sys.exit(getattr(error, "status", EXIT_STATUS[signal.SIGINT]))
