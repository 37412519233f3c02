"""Signals: one that comes again is the same news, and a launcher's process answers once the run is
saved.
"""

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fedpfl.ground import interrupts
from fedpfl.ground.interrupts import Interrupt

BOTH = [signal.SIGTERM, signal.SIGUSR2]


def forget_answers() -> None:
    """Answer signals as a new process does."""
    for number in interrupts.EXIT_STATUS:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the answers as they were; by a clock that stands, so that nothing takes long."""
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: 100.0))
    before = {number: signal.getsignal(number) for number in interrupts.EXIT_STATUS}
    # Commands that other tests have played in this process may have left theirs.
    forget_answers()
    yield
    for number, how in before.items():
        signal.signal(number, how)
    interrupts._interrupt_times.clear()


@pytest.mark.parametrize(
    ("number", "status", "told"),
    [(signal.SIGINT, 130, "interrupted"), *((number, 143, "terminated") for number in BOTH)],
)
def test_a_signal_is_an_interrupt_with_a_status_and_travels_between_processes(number, status, told):
    interrupts.install_handler(interrupts.raise_interrupt)
    with pytest.raises(Interrupt) as caught:
        os.kill(os.getpid(), number)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.status, str(error)) == (status, told)


def test_what_comes_again_does_not_disturb_the_saving_until_that_takes_long(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    interrupts.install_handler(interrupts.raise_interrupt)
    with pytest.raises(Interrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    for number in interrupts.EXIT_STATUS:
        os.kill(os.getpid(), number)
    now[0] += interrupts.REPEAT_SECONDS
    with pytest.raises(Interrupt):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)


def test_what_is_to_be_done_first_is_done_once_and_only_where_it_was_asked_for():
    done: list[int] = []
    for times in (1, 1):
        interrupts.install_handler(interrupts.raise_interrupt)
        asked = interrupts.before_interrupt(lambda: done.append(1)) if not done else nullcontext()
        with pytest.raises(Interrupt), asked:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(done) == times


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupts.install_handler(interrupts.raise_interrupt)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_launcher_answers_once_the_run_is_saved(capsys):
    """Of several signals that which asks for more, as queueing again does."""
    order: list[object] = []
    for number in BOTH:
        signal.signal(number, lambda number, frame: order.append(signal.Signals(number)))

    def run() -> None:
        with interrupts.interrupt_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGUSR2)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                order.append("saved")

    with pytest.raises(SystemExit) as end:
        run()
    assert order == ["saved", signal.SIGUSR2]
    assert end.value.code == 143
    told = "fedpfl: terminated; the same command goes on from the last checkpoint\n"
    assert capsys.readouterr().err == told
    os.kill(os.getpid(), signal.SIGTERM)
    assert order[2:] == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nobody_answers_the_interrupt_goes_on_and_all_is_as_before(number):
    """As in the workers of joblib, which hand it to the process that told them."""
    with pytest.raises(Interrupt), interrupts.interrupt_on_signals():
        os.kill(os.getpid(), number)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_and_a_command_keep_their_answers():
    interrupts.install_handler(interrupts.raise_interrupt)
    with pytest.raises(Interrupt), interrupts.interrupt_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    forget_answers()
    kept: list[object] = []

    def job() -> None:
        with interrupts.interrupt_on_signals():
            kept.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=job)
    thread.start()
    thread.join()
    assert kept == [signal.SIG_DFL]
