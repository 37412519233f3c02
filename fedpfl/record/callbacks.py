"""Who hears of a run while it goes on: the terminal, run.log, loggers of services, and classes of a
user's.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fedpfl.ground.errors import error_text
from fedpfl.record.forecast import Forecast


@dataclass(frozen=True)
class RunInfo:
    """Describe a run at its beginning.

    job_type: the method. config: resolved, plain values. path: the run directory, with
    `partition.png`. start_round: rounds done before this process, 0 for a fresh run. lines: the
    first lines for the user. notes: those of them that
    say what may go wrong. facts: what summary.json says at the beginning. forecast: seconds that
    rounds and evaluations are expected to take, None where that is not known.
    """

    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]
    config: dict[str, Any]
    path: Path
    identity: str
    seed: int
    rounds: int
    start_round: int = 0
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    forecast: Forecast | None = None


class Callback:
    """Hear of a run while it goes on: a subclass overrides what it needs, and decides nothing of
    the run.

    One that raises is told to end, named in one line and left out; the run goes on.
    """

    def on_begin(self, run: RunInfo) -> None:
        """Hear what is run, before its first round."""

    def on_round(self, round: Any) -> None:
        """Hear of a finished round: `row` of rounds.csv, in a run also `clients` and the models
        after it.
        """

    def on_evaluation(self, round: int) -> None:
        """Hear that all clients are about to be evaluated, after so many rounds."""

    def on_note(self, text: str) -> None:
        """Hear a line for the user."""

    def on_end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Hear how it ended, also after a failure. status: finished, diverged, failed or
        interrupted.
        """


class _Notes(logging.Handler):
    """Turn what the package logs into notes."""

    def __init__(self, callbacks: Callback):
        super().__init__(logging.INFO)
        self._callbacks = callbacks

    def emit(self, record: logging.LogRecord) -> None:
        """Note a message."""
        self._callbacks.on_note(record.getMessage())


class Callbacks(Callback):
    """Play several callbacks as one, that is ended once.

    As a context manager it notes what the package logs, and ends them when the run did not:
    `failed` for an error, else `interrupted`.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()):
        self._callbacks = list(callbacks)
        self._handler = _Notes(self)

    def on_begin(self, run: RunInfo) -> None:
        """See Callback."""
        self._each(lambda one: one.on_begin(run))

    def on_round(self, round: Any) -> None:
        """See Callback."""
        self._each(lambda one: one.on_round(round))

    def on_evaluation(self, round: int) -> None:
        """See Callback."""
        self._each(lambda one: one.on_evaluation(round))

    def on_note(self, text: str) -> None:
        """See Callback."""
        self._each(lambda one: one.on_note(text))

    def on_end(self, status: str, summary: Mapping[str, Any]) -> None:
        """End each, once; later calls do nothing. An interrupt on the way is raised after the last
        one.
        """
        interrupt: BaseException | None = None
        # Outward in, so that one that fails or takes long can still be told of on the terminal,
        # which is first.
        while self._callbacks:
            one = self._callbacks.pop()
            try:
                one.on_end(status, summary)
            except Exception as error:
                self._note_failed(one, error)
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Self:
        package = logging.getLogger("fedpfl")
        package.addHandler(self._handler)
        package.setLevel(logging.INFO)
        package.propagate = False  # Hydra's own handler would print it again
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        package = logging.getLogger("fedpfl")
        package.removeHandler(self._handler)
        package.propagate = True
        if not isinstance(error, Exception):
            self.on_end("interrupted", {})
            return
        known = {"error": error_text(error, with_class=True)}
        self.on_end("failed", known | {"traceback": "".join(traceback.format_exception(error))})

    def _each(self, call: Callable[[Callback], None]) -> None:
        for one in list(self._callbacks):
            try:
                call(one)
            except Exception as error:
                self._leave_out(one, error)

    def _leave_out(self, one: Callback, error: Exception) -> None:
        if one in self._callbacks:
            self._callbacks.remove(one)
            with contextlib.suppress(Exception):  # it has failed already, and that is what is told
                one.on_end("failed", {})
            self._note_failed(one, error)

    def _note_failed(self, one: Callback, error: Exception) -> None:
        self.on_note(
            f"{type(one).__name__} failed and is left out, the run goes on: {error_text(error)}"
        )
