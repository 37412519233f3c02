"""Ctrl-C and the signals of schedulers: one line, and an exit status of their own.

SIGTERM is how schedulers, `kill` and torchrun end a process; with SIGUSR2 submitit has Slurm
announce that.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from fedpfl.ground.terminal import outlive_readers, print_notice

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""The exit status by signal; where several came, the last of these counts."""
if hasattr(signal, "SIGUSR2"):
    EXIT_STATUS[signal.SIGUSR2] = 143
RESUME_ADVICE = "the same command goes on from the last checkpoint"
REPEAT_SECONDS = 10.0
"""Within so many seconds a further signal counts as the same one.

A terminal, a scheduler and torchrun may all signal one process.
"""

# Signals that this process handles, those that came since, the time of the last Interrupt, and the
# functions to call before one.
_handled_signals: list[signal.Signals] = []
_received_signals: list[int] = []
_interrupt_times: list[float] = []
_actions: list[Callable[[], None]] = []


class Interrupt(KeyboardInterrupt):
    """A signal that ends the run; its text is the line for the user."""

    def __init__(self, number: int):
        super().__init__("interrupted" if number == signal.SIGINT else "terminated")
        self.number = number
        self.status = EXIT_STATUS[signal.Signals(number)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for the process that started a worker."""
        return Interrupt, (self.number,)


def begin_imports() -> None:
    """Prepare a command for the import of its modules, in which nothing is open yet."""
    # Modules stay: a sixth of the start would go to looking for garbage among them.
    gc.disable()
    install_handler(exit_during_import)
    outlive_readers()


def end_imports() -> None:
    """Raise Interrupt for signals from now on, and collect garbage again, outside modules."""
    install_handler(raise_interrupt)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def exit_during_import(number: int, frame: object) -> NoReturn:
    """End a command while its modules are imported, when nothing is open."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0":
        print(f"fedpfl: {Interrupt(number)} before anything was done", file=sys.stderr, flush=True)
    os._exit(Interrupt(number).status)


def raise_interrupt(number: int, frame: object) -> None:
    """Raise Interrupt, at which runs are saved, unless one was raised a moment ago."""
    _received_signals.append(number)
    # A second Interrupt would break off the saving.
    if _interrupt_times and time.monotonic() - _interrupt_times[0] < REPEAT_SECONDS:
        return
    _interrupt_times[:] = [time.monotonic()]
    for action in _actions:
        action()
    raise Interrupt(number)


@contextmanager
def before_interrupt(action: Callable[[], None]) -> Iterator[None]:
    """Within the context, call `action` as soon as a signal comes, before it ends anything."""
    _actions.append(action)
    try:
        yield
    finally:
        _actions.remove(action)


def install_handler(handler: Callable[[int, object], None]) -> None:
    """Handle the signals from now on, but for those the parent process ignores."""
    _received_signals.clear()
    _interrupt_times.clear()
    # None: the handler was not installed from Python.
    _handled_signals[:] = [
        number for number in EXIT_STATUS if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]
    for number in _handled_signals:
        signal.signal(number, handler)


def reinstall_handlers() -> None:
    """Install `raise_interrupt` again where a library, such as Ray, has replaced it."""
    if threading.current_thread() is threading.main_thread():
        for number in _handled_signals:
            signal.signal(number, raise_interrupt)


def ignore_signals() -> None:
    """Ignore the signals from now on, as the process is about to end."""
    for number in EXIT_STATUS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interrupt_on_signals() -> Iterator[None]:
    """Within the context raise Interrupt for signals, then let the launcher's handler have them.

    So a run is saved before submitit, for example, queues its job again. Without a handler of the
    launcher's the Interrupt goes on. Nothing changes within a command, which raises it already, and
    in threads, which signals do not reach.
    """
    handlers_before = {number: signal.getsignal(number) for number in EXIT_STATUS}
    is_main_thread = threading.current_thread() is threading.main_thread()
    if raise_interrupt in handlers_before.values() or not is_main_thread:
        yield
        return
    install_handler(raise_interrupt)
    interrupt = None
    try:
        yield
    except KeyboardInterrupt as error:
        interrupt = error
    finally:
        _restore_handlers(handlers_before)
    if interrupt:
        _call_handler(interrupt, handlers_before)


def _call_handler(interrupt: KeyboardInterrupt, handlers: Mapping[signal.Signals, Any]) -> NoReturn:
    """Call the signal's handler and end the process; without a handler raise the interrupt."""
    number = _decisive_signal()
    handler = handlers[number] if number else None
    if number is None or not callable(handler) or handler is signal.default_int_handler:
        raise interrupt
    print_notice(f"{interrupt}; {RESUME_ADVICE}")
    handler(number, None)
    sys.exit(EXIT_STATUS[number])


def _restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    _handled_signals.clear()
    for number, handler in handlers.items():
        if handler is not None:
            signal.signal(number, handler)


def _decisive_signal() -> signal.Signals | None:
    """Return the signal that decides the exit status, None if none came."""
    order = [*EXIT_STATUS]
    return max(map(signal.Signals, _received_signals), key=order.index, default=None)


def exit_interrupted(error: KeyboardInterrupt, notify: Callable[[str], None]) -> NoReturn:
    """Say that the command was interrupted, and end the process."""
    ignore_signals()  # threads are ending
    if not str(error) and (number := _decisive_signal()):
        error = Interrupt(number)  # a library has raised its own error instead
    notify(f"{str(error) or 'interrupted'}; {RESUME_ADVICE}")
    sys.exit(getattr(error, "status", EXIT_STATUS[signal.SIGINT]))
