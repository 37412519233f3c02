"""Progress of a run on the terminal, and rows as lines of text."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import timedelta
from statistics import fmean
from typing import Any, ClassVar, TextIO

from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.record.callbacks import Callback, RunInfo
from fedpfl.record.columns import column_name, task_of_columns
from fedpfl.record.eta import RemainingTime

run_label: ContextVar[str] = ContextVar("label", default="")
"""Distinguishes the runs of a sweep; empty for a run that is alone."""


class Console(Callback):
    """Show progress on the terminal: a bar, or plain lines where nobody watches.

    Plain: a line at most every `every` seconds, and for every evaluated and the last round. Of a
    run with a `run_label` only the bar is shown, or after a minute a line, of all such runs at most
    one a minute, and warnings once; the sweeper reports the outcome.

    Args:
        quiet: show nothing at all.
        stream: where to write; by default standard error.
        plain: lines instead of a bar; None decides: lines where the stream is no terminal and in
            the worker processes or threads of a parallel sweep, whose bars would overwrite each
            other.
        every: seconds between two plain lines.
        clock: returns the time in seconds.
    """

    MINUTE: ClassVar[float] = 60.0  # seconds
    # When runs with a label printed a text: a warning, or "" for how far one is.
    _print_times: ClassVar[dict[str, float]] = {}

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        plain: bool | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._quiet = quiet
        self._stream = stream
        self._plain = plain
        self._every = every
        self._clock = clock
        self._run: RunInfo | None = None
        self._bar: Any = None
        self._label = ""
        self._line_time = float("-inf")  # of the last plain line
        self._start_time = self._round_time = clock()
        self._round = 0
        self._last_evaluation = ""

    def on_begin(self, run: RunInfo) -> None:
        """Print the first lines and start the bar."""
        # ---- Step 1: the first lines; of a run with a label only what a reader must know.
        self._run = run
        self._round = run.start_round
        self._label = run_label.get()
        self._start_time = self._round_time = self._clock()
        self._remaining_time = RemainingTime(run.rounds, run.config)
        if not self._label:
            for line in run.lines:
                self._print_line(line)
        for note in run.notes:
            self.on_note(note)
        for line in resumption_lines(run):
            self._print_line(line)

        # ---- Step 2: the bar, unless nobody watches.
        stream = self._stream or sys.stderr
        is_plain = self._plain
        if is_plain is None:
            is_dumb_terminal = os.environ.get("TERM") == "dumb"
            # Bars of several processes would overwrite each other.
            is_plain = _is_worker() or not stream.isatty() or is_dumb_terminal
        if not (is_plain or self._quiet):
            self._start_bar(stream, run)

    def on_round(self, round: Any) -> None:
        """Show one round."""
        assert self._run is not None
        # ---- Step 1: how long did it take?
        row = round.row
        now = self._clock()
        evaluation_seconds = row.get("eval_seconds")
        if evaluation_seconds is not None:
            tuned_score = column_name(task_of_columns(row).score, fine_tuned=True)
            is_tuned = row.get(tuned_score) is not None
            self._remaining_time.add_evaluation(evaluation_seconds, is_tuned)
        # By the clock, as a round also takes what the engine does not time, such as a checkpoint.
        self._remaining_time.add_round(now - self._round_time - (evaluation_seconds or 0))
        self._round_time = now

        # ---- Step 2: what is known.
        self._round = int(row["round"])
        rounds_left = self._run.rounds - self._round
        evaluation = describe_all_clients(row)
        self._last_evaluation = evaluation or self._last_evaluation
        eta = self._eta() if rounds_left else ""

        # ---- Step 3: show it.
        if self._bar is not None:
            text = "  ".join(filter(None, (describe_cohort(row), self._last_evaluation)))
            self._bar.update(
                self._bar.task_ids[0],
                completed=self._round,
                text=text,
                eta=eta,
            )
        elif self._label:
            last_time = max(
                self._start_time,
                self._print_times.get("", self._start_time),
            )
            if rounds_left and now - last_time >= self.MINUTE:
                self._print_times[""] = now
                self._print_line(f"{describe_row(row, self._run.rounds)}  {eta}")
        elif evaluation or not rounds_left or now - self._line_time >= self._every:
            self._line_time = now
            parts = (describe_row(row, self._run.rounds), eta)
            self._print_line("  ".join(filter(None, parts)))

    def on_evaluation(self, round: int) -> None:
        """Say that all clients are evaluated, on lines only where that may take long."""
        assert self._run is not None
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], text="evaluating all clients")
        elif not self._label and self._is_evaluation_slow():
            self._print_line(f"round {round}/{self._run.rounds}  evaluating all clients")

    def on_note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._label and not self._quiet:
            # Runs of a sweep have their warnings in common, which are worth a line once.
            if text in self._print_times:
                return
            self._print_times[text] = self._clock()
        self._print_line(text)

    def on_end(self, status: str, summary: Mapping[str, Any]) -> None:
        """Stop the bar and say how it ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._label:
            return
        elapsed = format_duration(self._clock() - self._start_time)
        result = self._last_evaluation or untrained_note(summary)
        parts = (f"{status} after round {self._round} in {elapsed}", result)
        self._print_line(", ".join(filter(None, parts)))

    def _is_evaluation_slow(self) -> bool:
        """Return whether an evaluation takes long, or nobody knows how long."""
        seconds = self._remaining_time.last_evaluation
        return seconds is None or seconds >= self._every

    def _eta(self) -> str:
        """Return the estimated time of the rounds that are left."""
        eta = f"ETA {format_duration(self._remaining_time.estimate(self._round))}"
        has_evaluated = self._remaining_time.last_evaluation is not None
        return eta if has_evaluated else f"{eta} + evaluations"

    def _print_line(self, text: str) -> None:
        if self._quiet:
            return
        line = ": ".join(filter(None, (self._label, text)))
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream or sys.stderr, flush=True)

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
        self._bar.add_task(
            self._label, total=run.rounds, completed=run.start_round, text="", eta=""
        )
        self._bar.start()


def resumption_lines(run: RunInfo) -> tuple[str, ...]:
    """Say after which round a resumed run continues; nothing of others."""
    if not run.start_round:
        return ()
    return (f"resumed     after round {run.start_round} of {run.rounds}",)


def describe_row(row: Mapping[str, Any], rounds: int) -> str:
    """Write one round as one line, with accuracies and seconds.

    Such as `round 10/400  cohort 61.20 -> 88.31 %  all clients 90.04 %  0.82 s`.
    """
    seconds = row.get("seconds")
    parts = (
        f"round {row['round']}/{rounds}",
        describe_cohort(row),
        describe_all_clients(row),
        f"{seconds:.2f} s" if seconds is not None else "",
    )
    return "  ".join(filter(None, parts))


def describe_cohort(row: Mapping[str, Any]) -> str:
    """Write the cohort's accuracy, or loss, before and after its training, `` where unknown."""
    has_accuracy = task_of_columns(row) is CLASSIFICATION
    before = row.get("cohort_before" if has_accuracy else "cohort_loss_before")
    after = row.get("cohort_after" if has_accuracy else "cohort_loss_after")
    if before is None or after is None:
        return ""
    if has_accuracy:
        return f"cohort {before:.2f} -> {after:.2f} %"
    return f"cohort's loss {before:.4g} -> {after:.4g}"


def describe_all_clients(row: Mapping[str, Any]) -> str:
    """Write all clients' mean score, `` where they were not evaluated."""
    titles = {"test": "all clients", "validation": "validation", "unseen": "unseen"}
    parts = [_describe_score(row, title, split) for split, title in titles.items()]
    if row.get("asr") is not None:
        parts.append(f"attack success {row['asr']:.2f} %")
    return ", ".join(filter(None, parts))


def _describe_score(row: Mapping[str, Any], title: str, split: str) -> str:
    """Write the score of a split, before and after fine-tuning.

    Args:
        row: of rounds.csv.
        title: of the split.
        split: of `columns.SPLITS`.
    """
    task = task_of_columns(row)
    score = row.get(column_name(task.score, split))
    tuned_score = row.get(column_name(task.score, split, fine_tuned=True))
    if score is None and tuned_score is None:
        return ""
    fine_tuned = ""
    if tuned_score is not None:
        fine_tuned = f"fine-tuned {task.describe_score(tuned_score)}"
    if score is None:
        return f"{title} {fine_tuned}"
    text = f"{title} {task.describe_score(score)}"
    return f"{text} ({fine_tuned})" if fine_tuned else text


def describe_result(summary: Mapping[str, Any]) -> str:
    """Write a finished run's mean score over clients, or that nobody trained."""
    return describe_all_clients(summary.get("last", {})) or untrained_note(summary)


def untrained_note(summary: Mapping[str, Any]) -> str:
    """Say that no client of a finished run has made a step; `` of others."""
    if summary.get("trained") == 0:
        return "no client has made a step, so there is no accuracy"
    return ""


def format_duration(seconds: float) -> str:
    """Write seconds as `1:02:03`, after a day as `1 day, 1:02:03`."""
    # A forecast of ages is still a text, not an overflow.
    longest = timedelta.max.total_seconds() // 2
    return str(timedelta(seconds=round(min(max(0.0, seconds), longest))))


def describe_sweep_progress(events: str, jobs: int, now: float) -> str:
    """Return such as `3/8 done, ETA 0:12:30`, or without ETA where it is unknown.

    The remaining jobs are taken to need as long as those that ended, as many at once as now.

    Args:
        events: a line for each job that began: its number and when; another when it ended, with the
            seconds that it took, 0 where it had nothing to do.
        jobs: the number of all jobs.
        now: the time.
    """
    job_seconds, start_times = _parse_events(events)
    progress = f"{len(job_seconds)}/{jobs} done"
    if len(job_seconds) == jobs:
        return f"{progress} in {format_duration(now - min(start_times.values()))}"
    seconds = _seconds_left(events, jobs, now, free=1)
    return f"{progress}, ETA {format_duration(seconds)}" if seconds else progress


def describe_job_start(events: str, jobs: int, now: float, number: int) -> str:
    """Return such as `run 2 of 8, elapsed 0:01:00, ETA 0:12:30`.

    Arguments are those of `describe_sweep_progress`, and the number of the run that begins.
    """
    _, start_times = _parse_events(events)
    elapsed = format_duration(now - min(start_times.values()))
    parts = [f"run {number} of {jobs}", f"elapsed {elapsed}"]
    seconds = _seconds_left(events, jobs, now)
    if seconds:
        parts.append(f"ETA {format_duration(seconds)}")
    return ", ".join(parts)


def _is_worker() -> bool:
    """Return whether this is a worker process or thread of a parallel sweep."""
    if multiprocessing.parent_process() is not None:
        return True
    return threading.current_thread() is not threading.main_thread()


def _parse_events(events: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of the jobs that ended, and when each began, by number."""
    job_seconds = {}
    start_times = {}
    for line in events.splitlines():
        job, start_time, *seconds = line.split()
        start_times[job] = float(start_time)
        if seconds:
            job_seconds[job] = float(seconds[-1])
    return job_seconds, start_times


def _seconds_left(events: str, jobs: int, now: float, free: int = 0) -> float:
    """Return how long the rest of a sweep may take, 0 where nothing tells it.

    Args:
        events: as of `describe_sweep_progress`.
        jobs: the number of all jobs.
        now: the time.
        free: jobs that may begin at once beside those that are running.
    """
    job_seconds, start_times = _parse_events(events)
    known_seconds = [seconds for seconds in job_seconds.values() if seconds]
    if not known_seconds:
        return 0.0
    mean_seconds = fmean(known_seconds)
    running = [
        now - start_time for job, start_time in start_times.items() if job not in job_seconds
    ]
    waiting_count = jobs - len(start_times)
    remaining = [max(0.0, mean_seconds - elapsed) for elapsed in running]
    # The place of a job that has just ended goes to the next one.
    side_by_side = len(running) + (free if waiting_count else 0)
    total = sum(remaining) + mean_seconds * waiting_count
    # At least as long as the slowest that runs.
    return max([total / max(1, side_by_side), *remaining])
