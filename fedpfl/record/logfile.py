"""run.log: a run as plain lines with local time, appended over resumes."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from fedpfl.ground.records import Values
from fedpfl.record.callbacks import Callback, RunInfo
from fedpfl.record.console import describe_row, resumption_lines


class LogFile(Callback):
    """Write `run.log` in the run directory: plain lines with local time, appended over resumes."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._rounds = 0

    def on_begin(self, run: RunInfo) -> None:
        """Open the file and write the first lines."""
        path = run.path / "run.log"
        # Line by line, so that a kill takes none along.
        self._file = path.open("a+", encoding="utf-8", buffering=1)
        self._rounds = run.rounds
        if path.read_bytes()[-1:] not in (b"", b"\n"):  # a kill in the middle of a line
            self._file.write("\n")
        for line in (*run.lines, *run.notes, *resumption_lines(run)):
            self.on_note(line)

    def on_round(self, round: Any) -> None:
        """Write one round."""
        self.on_note(describe_row(round.row, self._rounds))

    def on_note(self, text: str) -> None:
        """Write a line."""
        if self._file is not None:
            self._file.write(_with_time(text))

    def on_end(self, status: str, summary: Values) -> None:
        """Write how it ended and close the file."""
        error = summary.get("error")
        self.on_note(f"{status}: {error}" if error else status)
        if self._file is not None:
            self._file.write(summary.get("traceback", ""))
            self._file.close()
            self._file = None


def append_to_log(path: Path, text: str) -> None:
    """Write a line to the `run.log` of a run that has ended.

    What cannot be written was said on the terminal.
    """
    with contextlib.suppress(OSError), (path / "run.log").open("a", encoding="utf-8") as file:
        file.write(_with_time(text))


def _with_time(text: str) -> str:
    """Return a line with local time."""
    return f"{datetime.now().astimezone().isoformat(timespec='seconds')} {' '.join(text.split())}\n"
