"""Estimate how long the rest of a run, or of a sweep, takes from the rounds played."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from statistics import fmean, median_low
from typing import Any

RECENT_ROUNDS = 50
"""Rounds, and evaluations of each kind, that an estimate is made from."""


class RemainingTime:
    """Estimate the remaining time of a run.

    By medians of recent rounds: a round that stalled changes no estimate after it.

    Args:
        rounds: of the whole run; the last one is always evaluated.
        settings: the configuration's `eval`, which says when all clients are evaluated.
    """

    def __init__(self, rounds: int, settings: Mapping[str, Any]):
        self._rounds = rounds
        self._every = settings["every"]
        self._tuned_every = 0
        if settings.get("finetune_epochs"):
            self._tuned_every = settings.get("finetune_every", 0)
        self._round_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._evaluation_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._tuned_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)

    def add(self, seconds: float, evaluation_seconds: float | None, is_tuned: bool) -> None:
        """Add a round, with its evaluation of all clients if it had one."""
        if evaluation_seconds is not None:
            kind = self._tuned_seconds if is_tuned else self._evaluation_seconds
            kind.append(evaluation_seconds)
        self._round_seconds.append(seconds - (evaluation_seconds or 0.0))

    def describe(self, rounds_done: int) -> str:
        """Return such as `ETA 0:12:30`, or an empty text after the last round."""
        if rounds_done >= self._rounds:
            return ""
        eta = f"ETA {format_duration(self.estimate(rounds_done))}"
        has_evaluated = self._evaluation_seconds or self._tuned_seconds
        return eta if has_evaluated else f"{eta} + evaluations"

    def estimate(self, rounds_done: int) -> float:
        """Return the seconds after a round; evaluations count once one has been timed."""
        evaluations = self._count_evaluations(self._every, rounds_done)
        tuned = self._count_evaluations(self._tuned_every, rounds_done)
        # One kind stands in for the other until both have been timed.
        plain_seconds = self._evaluation_seconds or self._tuned_seconds or [0.0]
        tuned_seconds = self._tuned_seconds or self._evaluation_seconds or [0.0]
        return (
            (self._rounds - rounds_done) * median_low(self._round_seconds or [0.0])
            + (evaluations - tuned) * median_low(plain_seconds)
            + tuned * median_low(tuned_seconds)
        )

    def _count_evaluations(self, period: int, rounds_done: int) -> int:
        """Count the evaluations that a period leaves after a round."""
        if not period or rounds_done >= self._rounds:
            return 0
        # Rounded up: the last round is evaluated even if it is no multiple.
        return -(-self._rounds // period) - rounds_done // period


def describe_sweep(events: str, jobs: int, now: float, number: int = 0) -> str:
    """Describe a sweep's progress: `3/8 done, ETA 0:12:30`, or with the elapsed time.

    The remaining jobs are taken to need as long as those that ended, as many in parallel as now.

    Args:
        events: a line for each job that began: its number and when; another when it ended, with the
            seconds that it took, 0 where it had nothing to do.
        jobs: the number of all jobs.
        now: the time.
        number: of the job that begins; 0 if one has ended.
    """
    # ---- Step 1: the seconds of the jobs that ended, and when each began.
    job_seconds = {}
    start_times = {}
    for line in events.splitlines():
        job, start_time, *seconds = line.split()
        start_times[job] = float(start_time)
        if seconds:
            job_seconds[job] = float(seconds[-1])

    # ---- Step 2: the seconds left, at least as many as the slowest running job needs.
    mean_seconds = fmean(list(filter(None, job_seconds.values())) or [0.0])
    running = [start_times[job] for job in start_times.keys() - job_seconds.keys()]
    remaining = [max(0.0, mean_seconds - (now - start_time)) for start_time in running]
    waiting_count = jobs - len(start_times)
    # The next job takes the place of one that has ended.
    side_by_side = len(running) + (waiting_count > 0 and not number)
    total = sum(remaining) + mean_seconds * waiting_count
    seconds_left = max([total / max(1, side_by_side), *remaining])

    # ---- Step 3: all of it in words.
    elapsed = format_duration(now - min(start_times.values()))
    if len(job_seconds) == jobs:
        return f"{jobs}/{jobs} done in {elapsed}"
    text = f"{len(job_seconds)}/{jobs} done"
    if number:
        text = f"run {number} of {jobs}, elapsed {elapsed}"
    return f"{text}, ETA {format_duration(seconds_left)}" if seconds_left else text


def format_duration(seconds: float) -> str:
    """Write seconds as `1:02:03`, after a day as `1 day, 1:02:03`."""
    return str(timedelta(seconds=round(max(0.0, seconds))))
