"""Where rows go while a run is going on: the terminal, run.log, and W&B. Sinks mirror, they never decide."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, Self, TextIO

from fedpfl.ground.errors import reason


@dataclass(frozen=True)
class RunInfo:
    """What sinks are told at the beginning.

    job_type: the method. config: resolved, plain values. start_round: rounds done before this process, 0 for a fresh
    run. lines: the first lines for the user. among: instead of them, on a terminal that shows many runs at once.
    facts: what summary.json says at the beginning.
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
    among: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class Sink(Protocol):
    """One place that rows are shown or sent to."""

    def begin(self, run: RunInfo) -> None:
        """Before the first row."""

    def row(self, row: Mapping[str, Any]) -> None:
        """One round; None where nothing was measured."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def picture(self, name: str, path: Path) -> None:
        """An image file."""

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """The last call, also after a failure. status: finished, diverged, failed or interrupted."""


class _Notes(logging.Handler):
    """Turns what the package logs into notes."""

    def __init__(self, sinks: Sinks):
        super().__init__(logging.INFO)
        self._sinks = sinks

    def emit(self, record: logging.LogRecord) -> None:
        """Note a message."""
        self._sinks.note(record.getMessage())


class Sinks:
    """Several sinks as one. A sink that fails is told to end, noted once and dropped; the run goes on.

    As a context manager it notes what the package logs, and ends its sinks when the run did not: `failed` for an
    error, else `interrupted`.
    """

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = list(sinks)
        self._notes = _Notes(self)

    def begin(self, run: RunInfo) -> None:
        """Before the first row."""
        self._each(lambda sink: sink.begin(run))

    def row(self, row: Mapping[str, Any]) -> None:
        """One round."""
        self._each(lambda sink: sink.row(row))

    def note(self, text: str) -> None:
        """A line for the user."""
        self._each(lambda sink: sink.note(text))

    def picture(self, name: str, path: Path) -> None:
        """An image file."""
        self._each(lambda sink: sink.picture(name, path))

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """End every sink, once; later calls do nothing. An interrupt on the way is raised after the last one."""
        interrupt: BaseException | None = None
        # Outward in, so that a sink that fails or takes long can still be told of on the terminal, which is first.
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.end(status, summary)
            except Exception as error:
                self.note(_dropped(sink, error))
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Self:
        package = logging.getLogger("fedpfl")
        package.addHandler(self._notes)
        package.setLevel(logging.INFO)
        package.propagate = False  # Hydra's own handler would print it again
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        package = logging.getLogger("fedpfl")
        package.removeHandler(self._notes)
        package.propagate = True
        if not isinstance(error, Exception):
            self.end("interrupted", {})
            return
        known = {"error": reason(error, kind=True)}
        self.end("failed", known | {"traceback": "".join(traceback.format_exception(error))})

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._drop(sink, error)

    def _drop(self, sink: Sink, error: Exception) -> None:
        if sink not in self._sinks:
            return
        self._sinks.remove(sink)
        with contextlib.suppress(Exception):  # it has failed already, and that is what is told
            sink.end("failed", {})
        self.note(_dropped(sink, error))


class Console:
    """Progress on the terminal: a bar with what is known, or plain lines where nobody watches.

    Plain: a line at most every `every` seconds, and for every evaluated and the last round. plain=None decides: lines
    where the stream is no terminal and in the worker processes or threads of a parallel sweep, whose bars would
    overwrite each other. quiet: nothing at all.
    """

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        plain: bool | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._quiet, self._stream, self._plain, self._every, self._clock = quiet, stream, plain, every, clock
        self._run: RunInfo | None = None
        self._bar: Any = None
        self._prefix = ""
        self._told = float("-inf")
        self._begun = clock()
        self._times: deque[float] = deque(maxlen=51)
        self._round = 0
        self._last = ""

    def begin(self, run: RunInfo) -> None:
        """Print the first lines and start the bar."""
        self._run, self._round = run, run.start_round
        worker = (
            multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread()
        )
        # Lines of parallel runs are mixed on one terminal.
        self._prefix = f"{run.name}: " if worker else ""
        for line in (*(run.among or run.lines), *_resumed(run)):
            self.note(line)
        self._begun = self._clock()
        self._times.append(self._begun)
        stream = self._stream or sys.stderr
        plain = self._plain
        if plain is None:
            plain = worker or not stream.isatty() or os.environ.get("TERM") == "dumb"
        if not (plain or self._quiet):
            self._start_bar(stream, run)

    def row(self, row: Mapping[str, Any]) -> None:
        """Show one round."""
        assert self._run is not None
        now = self._clock()
        self._times.append(now)
        self._round = int(row["round"])
        left = self._run.rounds - self._round
        eta = duration(left * (now - self._times[0]) / (len(self._times) - 1))
        judged = everyone(row)
        self._last = judged or self._last
        if self._bar is not None:
            text = "  ".join(filter(None, (cohort(row), self._last)))
            self._bar.update(self._bar.task_ids[0], completed=self._round, text=text, eta=f"ETA {eta}")
        elif judged or not left or now - self._told >= self._every:
            self._told = now
            self.note(describe_row(row, self._run.rounds) + (f"  ETA {eta}" if left else ""))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(self._prefix + text, file=self._stream or sys.stderr, flush=True)

    def picture(self, name: str, path: Path) -> None:
        """Nothing: the file lies in the run directory."""

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Stop the bar and say how it ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        spent = duration(self._clock() - self._begun)
        self.note(", ".join(filter(None, (f"{status} after round {self._round} in {spent}", self._last))))

    def _start_bar(self, stream: TextIO, run: RunInfo) -> None:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}", markup=False),
            console=Terminal(file=stream),
        )
        self._bar.add_task("", total=run.rounds, completed=run.start_round, text="", eta="")
        self._bar.start()


class LogFile:
    """`run.log` in the run directory: everything as plain lines with local time, appended over resumes."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._rounds = 0

    def begin(self, run: RunInfo) -> None:
        """Open the file and write the first lines."""
        self._file = (run.path / "run.log").open("a+", encoding="utf-8", buffering=1)
        self._rounds = run.rounds
        if _torn(run.path / "run.log"):
            self._file.write("\n")
        for line in (*run.lines, *_resumed(run)):
            self.note(line)

    def row(self, row: Mapping[str, Any]) -> None:
        """Write one round."""
        self.note(describe_row(row, self._rounds))

    def note(self, text: str) -> None:
        """Write a line."""
        if self._file is not None:
            self._file.write(_stamped(text))

    def picture(self, name: str, path: Path) -> None:
        """Write where it lies."""
        self.note(f"picture {name}: {path.name}")

    def end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write how it ended and close the file."""
        error = summary.get("error")
        self.note(f"{status}: {error}" if error else status)
        if self._file is not None:
            self._file.write(summary.get("traceback", ""))
            self._file.close()
            self._file = None


def add_to_log(path: Path, text: str) -> None:
    """Write a line to the `run.log` of a run that has ended; what cannot be written was said on the terminal."""
    with contextlib.suppress(OSError), (path / "run.log").open("a", encoding="utf-8") as file:
        file.write(_stamped(text))


def _resumed(run: RunInfo) -> tuple[str, ...]:
    """Where a resumed run goes on."""
    return (f"resumed     after round {run.start_round} of {run.rounds}",) if run.start_round else ()


def describe_row(row: Mapping[str, Any], rounds: int) -> str:
    """One round as one line: `round 10/400  cohort 61.20 -> 88.31 %  all clients 90.04 %  0.82 s`."""
    seconds = row.get("seconds")
    took = f"{seconds:.2f} s" if seconds is not None else ""
    return "  ".join(filter(None, (f"round {row['round']}/{rounds}", cohort(row), everyone(row), took)))


def cohort(row: Mapping[str, Any]) -> str:
    """The cohort's accuracy before and after its training, `` where unknown."""
    before, after = row.get("cohort_before"), row.get("cohort_after")
    if before is None or after is None:
        return ""
    return f"cohort {before:.2f} -> {after:.2f} %"


def everyone(row: Mapping[str, Any]) -> str:
    """All clients' mean accuracy, `` where they were not evaluated."""

    def told(words: str, prefix: str = "") -> str:
        plain, tuned = row.get(f"{prefix}accuracy"), row.get(f"{prefix}ft_accuracy")
        if plain is None and tuned is None:
            return ""
        more = f"fine-tuned {tuned:.2f} %" if tuned is not None else ""
        if plain is None:
            return f"{words} {more}"
        return f"{words} {plain:.2f} %" + (f" ({more})" if more else "")

    return ", ".join(filter(None, (told("all clients"), told("validation", "val_"), told("unseen", "unseen_"))))


def duration(seconds: float) -> str:
    """`1:02:03`."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def progress(events: str, jobs: int, now: float) -> str:
    """Return how far a sweep is: `3/8 done, ETA 0:12:30`, or without ETA where nothing tells it.

    events: a line for each job that began: its number and when; another when it ended, with the seconds that it took,
    0 where it had nothing to do. The others are taken to need as long as those that ended, as many at once as now.
    """
    told = [line.split() for line in events.splitlines()]
    ended = {job: float(seconds) for job, _, *rest in told for seconds in rest}
    began = {job: float(when) for job, when, *_ in told}
    done = f"{len(ended)}/{jobs} done"
    took = [seconds for seconds in ended.values() if seconds]
    running = [now - when for job, when in began.items() if job not in ended]
    waiting = jobs - len(began)
    if len(ended) == jobs:
        return f"{done} in {duration(now - min(began.values()))}"
    if not took:
        return done
    left = [max(0.0, fmean(took) - spent) for spent in running]
    seconds = max([(sum(left) + fmean(took) * waiting) / (len(running) + bool(waiting)), *left])
    return f"{done}, ETA {duration(seconds)}" if seconds else done


def _stamped(text: str) -> str:
    """A line with local time."""
    return f"{datetime.now().astimezone().isoformat(timespec='seconds')} {' '.join(text.split())}\n"


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def _dropped(sink: Sink, error: Exception) -> str:
    return f"{type(sink).__name__} failed and is left out, the run goes on: {reason(error)}"
