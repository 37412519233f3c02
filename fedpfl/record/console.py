"""Progress of a run on the terminal, and rows as lines of text."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, TextIO

from fedpfl.ground import answer
from fedpfl.ground.records import Values
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.record.callbacks import Callback, RunInfo
from fedpfl.record.columns import column_name, task_of_columns
from fedpfl.record.eta import RemainingTime, format_duration

SPLIT_TITLES = {"test": "all clients", "validation": "validation", "unseen": "unseen"}
LINE_SECONDS = 5.0
LABELLED_LINE_SECONDS = 60.0
run_label: ContextVar[str] = ContextVar("label", default="")
"""Distinguishes the runs of a sweep; empty for a run that is alone."""


class Console(Callback):
    """Show progress on the terminal: a bar, or plain lines without a terminal.

    Plain: a line at most every LINE_SECONDS, and for every evaluated and the last round. Of a
    run with a `run_label` only the bar is shown, or after a minute a line, of all such runs at most
    one a minute, and each warning once; the sweeper reports the outcome.

    Args:
        quiet: show nothing at all.
        stream: where to write; by default standard error.
        clock: returns the time in seconds.
    """

    # When runs with a label printed a text: a warning, or "" for how far one is.
    _print_times: ClassVar[dict[str, float]] = {}

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._bar: Any = None
        self._label = ""
        self._line_time = float("-inf")  # of the last plain line
        self._start_time = self._round_time = clock()
        self._rounds = self._round = 0
        self._last_evaluation = ""

    def on_begin(self, run: RunInfo) -> None:
        """Print the first lines and start the bar."""
        self._path = run.path
        self._rounds = run.rounds
        self._round = run.start_round
        self._label = run_label.get()
        self._start_time = self._round_time = self._clock()
        self._remaining_time = RemainingTime(run.rounds, run.config["eval"]["every"])
        for line in () if self._label else run.lines:
            self._print_line(line)
        for note in run.notes:
            self.on_note(note)
        for line in resumption_lines(run):
            self._print_line(line)
        is_dumb_terminal = os.environ.get("TERM") == "dumb"
        # Bars of several processes would overwrite each other.
        if self._stream.isatty() and not (self._quiet or is_dumb_terminal or _is_worker()):
            self._start_bar()

    def on_round(self, round: Any) -> None:
        """Show one round."""
        row = round.row
        now = self._clock()
        # By the clock: the engine does not time everything in a round, such as a checkpoint.
        self._remaining_time.add(now - self._round_time, row.get("eval_seconds"))
        self._round_time = now
        self._round = int(row["round"])
        evaluation = describe_all_clients(row)
        self._last_evaluation = evaluation or self._last_evaluation
        eta = self._remaining_time.describe(self._round)
        if self._bar is not None:
            text = "  ".join(filter(None, (describe_cohort(row), self._last_evaluation)))
            self._update_bar(completed=self._round, text=text, eta=eta)
        elif self._label:
            last_time = max(self._start_time, self._print_times.get("", self._start_time))
            if eta and now - last_time >= LABELLED_LINE_SECONDS:
                self._print_times[""] = now
                self._print_line(f"{describe_row(row, self._rounds)}  {eta}")
        elif evaluation or not eta or now - self._line_time >= LINE_SECONDS:
            self._line_time = now
            parts = (describe_row(row, self._rounds), eta)
            self._print_line("  ".join(filter(None, parts)))

    def on_evaluation(self, round: int) -> None:
        """Say on the bar that all clients are evaluated."""
        if self._bar is not None:
            self._update_bar(text="evaluating all clients")

    def on_note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._label and not self._quiet:
            # Runs of a sweep have their warnings in common, which are worth a line once.
            if text in self._print_times:
                return
            self._print_times[text] = self._clock()
        self._print_line(text)

    def on_end(self, status: str, summary: Values) -> None:
        """Stop the bar and say how it ended."""
        answer.add_facts(runs=[{"path": self._path, **summary, "status": status}])
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._label:
            return
        elapsed = format_duration(self._clock() - self._start_time)
        result = self._last_evaluation or untrained_note(summary)
        parts = (f"{status} after round {self._round} in {elapsed}", result)
        self._print_line(", ".join(filter(None, parts)))

    def _print_line(self, text: str) -> None:
        if self._quiet:
            return
        line = ": ".join(filter(None, (self._label, text)))
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=self._stream, flush=True)

    def _start_bar(self) -> None:
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}", markup=False),
            console=Terminal(file=self._stream),
            transient=bool(self._label),
        )
        self._bar.add_task(self._label, total=self._rounds, completed=self._round, text="", eta="")
        self._bar.start()

    def _update_bar(self, **fields: Any) -> None:
        self._bar.update(self._bar.task_ids[0], **fields)


def resumption_lines(run: RunInfo) -> tuple[str, ...]:
    """Return a line for a resumed run: after which round it continues."""
    if not run.start_round:
        return ()
    return (f"resumed     after round {run.start_round} of {run.rounds}",)


def describe_row(row: Values, rounds: int) -> str:
    """Write one round as one line, with accuracies and seconds.

    Such as `round 10/400  cohort 61.20 -> 88.31 %  all clients 90.04 %  0.82 s`.
    """
    parts = [f"round {row['round']}/{rounds}", describe_cohort(row), describe_all_clients(row)]
    if row.get("seconds") is not None:
        parts.append(f"{row['seconds']:.2f} s")
    return "  ".join(filter(None, parts))


def describe_cohort(row: Values) -> str:
    """Write the cohort's accuracy, or loss, before and after its training, `` where unknown."""
    has_accuracy = task_of_columns(row) is CLASSIFICATION
    before = row.get("cohort_before" if has_accuracy else "cohort_loss_before")
    after = row.get("cohort_after" if has_accuracy else "cohort_loss_after")
    if before is None or after is None:
        return ""
    if has_accuracy:
        return f"cohort {before:.2f} -> {after:.2f} %"
    return f"cohort's loss {before:.4g} -> {after:.4g}"


def describe_all_clients(row: Values) -> str:
    """Write all clients' mean score, `` where they were not evaluated."""
    task = task_of_columns(row)
    parts = []
    for split, title in SPLIT_TITLES.items():
        score = row.get(column_name(task.score, split))
        tuned_score = row.get(column_name(task.score, split, fine_tuned=True))
        if score is not None:
            parts.append(f"{title} {task.describe_score(score)}")
            if tuned_score is not None:
                parts[-1] += f" (fine-tuned {task.describe_score(tuned_score)})"
    if row.get("asr") is not None:
        parts.append(f"attack success {row['asr']:.2f} %")
    return ", ".join(parts)


def describe_result(summary: Values) -> str:
    """Write a finished run's mean score over clients, or a note that no client trained."""
    return describe_all_clients(summary.get("last", {})) or untrained_note(summary)


def untrained_note(summary: Values) -> str:
    """Return a note if no client of a finished run has trained."""
    if summary.get("trained") == 0:
        return "no client has made a step, so there is no accuracy"
    return ""


def _is_worker() -> bool:
    """Tell worker processes and threads of a parallel sweep from the main one."""
    is_process = multiprocessing.parent_process() is not None
    return is_process or threading.current_thread() is not threading.main_thread()
