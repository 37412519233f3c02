"""Follow a run: the terminal, run.log, loggers of services, and a user's classes."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fedpfl.ground.errors import as_exception, error_text
from fedpfl.ground.records import Record, Values


@dataclass(frozen=True)
class RunInfo:
    """Describe a run at its beginning.

    Attributes:
        name: of the run.
        group: the name that its seeds share.
        job_type: the method.
        tags: further words to find it by.
        config: the resolved configuration, plain values.
        path: the run directory, with `partition.png`.
        identity: hash of what decides the result, without the seed.
        seed: its seed.
        rounds: all rounds that are asked for.
        start_round: rounds done before this process, 0 for a fresh run.
        lines: the first lines for the user.
        notes: warnings for the user.
        facts: the content of summary.json at the beginning.
    """

    name: str
    group: str
    job_type: str
    tags: tuple[str, ...]
    config: Record
    path: Path
    identity: str
    seed: int
    rounds: int
    start_round: int = 0
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Values = field(default_factory=dict)


class Callback:
    """Follow a run without changing it; a subclass overrides the methods that it needs.

    A callback that raises is reported in one line, ended and then skipped; the run goes on.
    """

    def on_begin(self, run: RunInfo) -> None:
        """Handle the beginning of the run, before its first round."""

    def on_round(self, round: Any) -> None:
        """Handle a finished round.

        Args:
            round: has `row` of rounds.csv, in a run also `clients` and the models after it.
        """

    def on_evaluation(self, round: int) -> None:
        """Handle the beginning of an evaluation of all clients, after so many rounds."""

    def on_note(self, text: str) -> None:
        """Handle a line for the user."""

    def on_end(self, status: str, summary: Values) -> None:
        """Handle the end of the run, also after a failure.

        Args:
            status: finished, diverged, failed or interrupted.
            summary: the content of summary.json.
        """


class _NoteHandler(logging.Handler):
    """Pass the package's log messages to the callbacks."""

    def __init__(self, callbacks: Callback):
        super().__init__(logging.INFO)
        self._callbacks = callbacks

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a message."""
        self._callbacks.on_note(record.getMessage())


class Callbacks(Callback):
    """Several callbacks as one, which is ended once.

    As a context manager it passes on the package's log messages. It ends callbacks that the run
    left open, as `failed` after an error, else as `interrupted`.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()):
        self._callbacks = list(callbacks)
        self._handler = _NoteHandler(self)

    def on_begin(self, run: RunInfo) -> None:
        """See Callback."""
        self._call_each("on_begin", run)

    def on_round(self, round: Any) -> None:
        """See Callback."""
        self._call_each("on_round", round)

    def on_evaluation(self, round: int) -> None:
        """See Callback."""
        self._call_each("on_evaluation", round)

    def on_note(self, text: str) -> None:
        """See Callback."""
        self._call_each("on_note", text)

    def on_end(self, status: str, summary: Values) -> None:
        """End each, once; later calls do nothing.

        An interrupt on the way is raised after the last one.
        """
        interrupt: BaseException | None = None
        # The terminal is first, so it ends last: what fails before can still be reported there.
        while self._callbacks:
            callback = self._callbacks.pop()
            try:
                callback.on_end(status, summary)
            except (Exception, SystemExit) as error:
                self._note_failure(callback, error)
            # Ctrl-C must not keep the rest from being ended.
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
        summary = {
            "error": error_text(error, with_class=True),
            "traceback": "".join(traceback.format_exception(error)),
        }
        self.on_end("failed", summary)

    def _call_each(self, name: str, argument: Any) -> None:
        # A copy, as one that fails is removed on the way.
        for callback in list(self._callbacks):
            try:
                getattr(callback, name)(argument)
            except (Exception, SystemExit) as error:
                # A callback that notes something may have been skipped meanwhile.
                if callback in self._callbacks:
                    self._callbacks.remove(callback)
                    # The first failure is the one to report.
                    with contextlib.suppress(Exception, SystemExit):
                        callback.on_end("failed", {})
                    self._note_failure(callback, error)

    def _note_failure(self, callback: Callback, error: Exception | SystemExit) -> None:
        self.on_note(
            f"{type(callback).__name__} failed and is left out, the run goes on: "
            f"{error_text(as_exception(error))}"
        )
