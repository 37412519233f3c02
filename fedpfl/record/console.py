"""Progress of a run on the terminal, and rows as lines of text."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import timedelta
from statistics import fmean
from typing import Any, ClassVar, TextIO

from fedpfl.record.callbacks import Callback, RunInfo
from fedpfl.record.forecast import Forecast, Remaining, Schedule

run_label: ContextVar[str] = ContextVar("label", default="")
"""What tells the run from the others of a sweep; empty for one that is alone."""


class Console(Callback):
    """Show progress on the terminal: a bar with what is known, or plain lines where nobody watches.

    Plain: a line at most every `every` seconds, and for every evaluated and the last round.
    plain=None decides: lines where the stream is no terminal and in the worker processes or threads
    of a parallel sweep, whose bars would
    overwrite each other. quiet: nothing at all.

    Of a run with a `label` only the bar is shown, or after a minute a line, of all such runs at
    most one a minute, and what may go wrong, once, and how long it will take if that is more than a
    minute; how it ended is said by who plays them.
    """

    MINUTE: ClassVar[float] = 60.0  # seconds
    _spoken: ClassVar[
        dict[str, float]
    ] = {}  # when runs with a label said what: a warning, or "" for how far one is

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        plain: bool | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._quiet, self._stream, self._plain, self._every, self._clock = (
            quiet,
            stream,
            plain,
            every,
            clock,
        )
        self._run: RunInfo | None = None
        self._bar: Any = None
        self._label = ""
        self._told = float("-inf")
        self._begun = self._before = clock()
        self._played: deque[float] = deque(maxlen=50)  # seconds of the last rounds
        self._evaluated: deque[float] = deque(maxlen=50)  # and evaluations of all clients
        self._tuned: deque[float] = deque(maxlen=50)  # those with fine-tuning
        self._round = 0
        self._last = ""

    def on_begin(self, run: RunInfo) -> None:
        """Print the first lines and start the bar."""
        self._run, self._round = run, run.start_round
        worker = (
            multiprocessing.parent_process() is not None
            or threading.current_thread() is not threading.main_thread()
        )
        self._label = run_label.get()
        self._begun = self._before = self._clock()
        for line in () if self._label else run.lines:
            self._say(line)
        if self._label and (told := _long(run, self.MINUTE)):
            self._say(told)
        for note in run.notes:
            self.on_note(note)
        for line in resumption_lines(run):
            self._say(line)
        stream = self._stream or sys.stderr
        plain = self._plain
        if plain is None:
            plain = worker or not stream.isatty() or os.environ.get("TERM") == "dumb"
        if not (plain or self._quiet):
            self._start_bar(stream, run)

    def on_round(self, round: Any) -> None:
        """Show one round."""
        assert self._run is not None
        row, now = round.row, self._clock()
        if (evaluated := row.get("eval_seconds")) is not None:
            (self._evaluated if row.get("ft_accuracy") is None else self._tuned).append(evaluated)
        self._played.append(now - self._before - (evaluated or 0))
        self._before = now
        self._round = int(row["round"])
        left = self._run.rounds - self._round
        judged = describe_all_clients(row)
        self._last = judged or self._last
        eta = self._eta(left) if left else ""
        if self._bar is not None:
            text = "  ".join(filter(None, (describe_cohort(row), self._last)))
            self._bar.update(self._bar.task_ids[0], completed=self._round, text=text, eta=eta)
        elif self._label:
            if left and now - max(self._begun, self._spoken.get("", self._begun)) >= self.MINUTE:
                self._spoken[""] = now
                self._say(f"{describe_row(row, self._run.rounds)}  {eta}")
        elif judged or not left or now - self._told >= self._every:
            self._told = now
            self._say("  ".join(filter(None, (describe_row(row, self._run.rounds), eta))))

    def on_evaluation(self, round: int) -> None:
        """Say that all clients are evaluated, on lines only where that takes long or nobody knows
        how long.
        """
        assert self._run is not None
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], text="evaluating all clients")
        elif not self._label and self._is_slow():
            self._say(f"round {round}/{self._run.rounds}  evaluating all clients")

    def _is_slow(self) -> bool:
        """Tell whether an evaluation takes long, or nobody knows how long."""
        assert self._run is not None
        last = [own[-1] for own in (self._evaluated, self._tuned) if own]
        if not last and self._run.forecast:
            last = [self._run.forecast.tuned_evaluation]
        return not last or max(last) >= self._every

    def _eta(self, left: int) -> str:
        """Return the rest of the run, by the last rounds and evaluations or by what was timed
        before the first.

        What was neither measured nor timed is named.
        """
        assert self._run is not None
        rounds = self._run.rounds
        remaining = Schedule.of(rounds, self._run.config).remaining(rounds - left)
        timed = self._run.forecast or Forecast(0.0, 0.0, 0.0)
        kinds = [fmean(own or [0.0]) for own in (self._evaluated, self._tuned)]
        plain, tuned = kinds[0] or timed.evaluation, kinds[1] or timed.tuned_evaluation
        measured = Forecast(fmean(self._played or [timed.round]), plain or tuned, tuned or plain)
        told = f"ETA {format_duration(remaining.seconds(measured))}"
        return told + ("" if plain or tuned else " + evaluations")

    def on_note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._label and not self._quiet:
            if text in self._spoken:
                return
            self._spoken[text] = self._clock()
        self._say(text)

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        line = ": ".join(filter(None, (self._label, text)))
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream or sys.stderr, flush=True)

    def on_end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Stop the bar and say how it ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._label:
            return
        spent = format_duration(self._clock() - self._begun)
        last = self._last or untrained_note(summary)
        self._say(", ".join(filter(None, (f"{status} after round {self._round} in {spent}", last))))

    def _start_bar(self, stream: TextIO, run: RunInfo) -> None:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}", markup=False),
            console=Terminal(file=stream),
            transient=bool(self._label),
        )
        eta = self._eta(run.rounds - run.start_round) if run.forecast else ""
        self._bar.add_task(
            self._label, total=run.rounds, completed=run.start_round, text="", eta=eta
        )
        self._bar.start()


def describe_expected_time(remaining: Remaining, forecast: Forecast) -> str:
    """Write how long it will take: `about 0:12:30: 400 rounds of 1.2 s, 40 evaluations of 8 s`."""
    return f"about {format_duration(remaining.seconds(forecast))}: {remaining.describe(forecast)}"


def _long(run: RunInfo, least: float) -> str:
    """Return `expected` of a run that takes so many seconds or more; `` of others."""
    if run.forecast is None:
        return ""
    remaining = Schedule.of(run.rounds, run.config).remaining(run.start_round)
    return (
        describe_expected_time(remaining, run.forecast)
        if remaining.seconds(run.forecast) >= least
        else ""
    )


def resumption_lines(run: RunInfo) -> tuple[str, ...]:
    """Return where a resumed run goes on."""
    return (
        (f"resumed     after round {run.start_round} of {run.rounds}",) if run.start_round else ()
    )


def describe_row(row: Mapping[str, Any], rounds: int) -> str:
    """Write one round as one line: `round 10/400  cohort 61.20 -> 88.31 %  all clients 90.04 %
    0.82 s`.
    """
    seconds = row.get("seconds")
    took = f"{seconds:.2f} s" if seconds is not None else ""
    return "  ".join(
        filter(
            None,
            (
                f"round {row['round']}/{rounds}",
                describe_cohort(row),
                describe_all_clients(row),
                took,
            ),
        )
    )


def describe_cohort(row: Mapping[str, Any]) -> str:
    """Write the cohort's accuracy before and after its training, `` where unknown."""
    before, after = row.get("cohort_before"), row.get("cohort_after")
    if before is None or after is None:
        return ""
    return f"cohort {before:.2f} -> {after:.2f} %"


def describe_all_clients(row: Mapping[str, Any]) -> str:
    """Write all clients' mean accuracy, `` where they were not evaluated."""

    def judged(words: str, prefix: str = "") -> str:
        plain, tuned = row.get(f"{prefix}accuracy"), row.get(f"{prefix}ft_accuracy")
        if plain is None and tuned is None:
            return ""
        more = f"fine-tuned {tuned:.2f} %" if tuned is not None else ""
        if plain is None:
            return f"{words} {more}"
        return f"{words} {plain:.2f} %" + (f" ({more})" if more else "")

    return ", ".join(
        filter(
            None, (judged("all clients"), judged("validation", "val_"), judged("unseen", "unseen_"))
        )
    )


def describe_result(summary: Mapping[str, Any]) -> str:
    """Write what a finished run came to: all clients' mean accuracy, or that nobody trained."""
    return describe_all_clients(summary.get("last", {})) or untrained_note(summary)


def untrained_note(summary: Mapping[str, Any]) -> str:
    """Say that no client of a finished run has made a step; `` of others."""
    return (
        "no client has made a step, so there is no accuracy" if summary.get("trained") == 0 else ""
    )


def format_duration(seconds: float) -> str:
    """Write seconds as `1:02:03`, after a day as `1 day, 1:02:03`."""
    most = timedelta.max.total_seconds() // 2
    return str(timedelta(seconds=round(min(max(0.0, seconds), most))))


def describe_sweep_progress(events: str, jobs: int, now: float) -> str:
    """Return how far a sweep is: `3/8 done, ETA 0:12:30`, or without ETA where nothing tells it.

    events: a line for each job that began: its number and when; another when it ended, with the
    seconds that it took, 0 where it had nothing to do. The others are taken to need as long as
    those that ended, as many at once as now.
    """
    ended, began = _jobs(events)
    done = f"{len(ended)}/{jobs} done"
    if len(ended) == jobs:
        return f"{done} in {format_duration(now - min(began.values()))}"
    seconds = _seconds_left(events, jobs, now, free=1)
    return f"{done}, ETA {format_duration(seconds)}" if seconds else done


def describe_job_start(events: str, jobs: int, now: float, number: int) -> str:
    """Return which run of a sweep begins: `run 2 of 8, elapsed 0:01:00, ETA 0:12:30`. Arguments as
    of `progress`.
    """
    _, began = _jobs(events)
    parts = [f"run {number} of {jobs}", f"elapsed {format_duration(now - min(began.values()))}"]
    if seconds := _seconds_left(events, jobs, now):
        parts.append(f"ETA {format_duration(seconds)}")
    return ", ".join(parts)


def _jobs(events: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of the jobs that ended, and when each began, by number."""
    said = [line.split() for line in events.splitlines()]
    ended = {job: float(seconds) for job, _, *rest in said for seconds in rest}
    return ended, {job: float(when) for job, when, *_ in said}


def _seconds_left(events: str, jobs: int, now: float, free: int = 0) -> float:
    """Return how long the rest of a sweep may take, 0 where nothing tells it.

    Args:
        events: as of `progress`.
        jobs: in all.
        now: when it is.
        free: jobs that may begin at once beside those that are running.
    """
    ended, began = _jobs(events)
    took = [seconds for seconds in ended.values() if seconds]
    if not took:
        return 0.0
    running = [now - when for job, when in began.items() if job not in ended]
    waiting = jobs - len(began)
    left = [max(0.0, fmean(took) - spent) for spent in running]
    side_by_side = len(running) + (free if waiting else 0)
    return max([(sum(left) + fmean(took) * waiting) / max(1, side_by_side), *left])
