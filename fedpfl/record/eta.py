"""Estimate how long the rest of a run, or of a sweep, takes from the rounds played."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from statistics import fmean, median_low

RECENT_ROUNDS = 50
RECENT_EVALUATIONS = 10
"""Rounds and evaluations that an estimate is made from."""


class RemainingTime:
    """Estimate the remaining time of a run.

    Rounds count by their median: one that stalled changes no estimate after it. Evaluations count
    by their mean, as some have fine-tuning.

    Args:
        rounds: of the whole run; the last one is always evaluated.
        every: the rounds between two evaluations of all clients.
    """

    def __init__(self, rounds: int, every: int):
        self._rounds = rounds
        self._every = every
        self._round_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._evaluation_seconds: deque[float] = deque(maxlen=RECENT_EVALUATIONS)

    def add(self, seconds: float, evaluation_seconds: float | None) -> None:
        """Add a round, with its evaluation of all clients if it had one."""
        if evaluation_seconds is not None:
            self._evaluation_seconds.append(evaluation_seconds)
            seconds -= evaluation_seconds
        self._round_seconds.append(seconds)

    def describe(self, rounds_done: int) -> str:
        """Return such as `ETA 0:12:30`, or an empty text after the last round."""
        if rounds_done >= self._rounds:
            return ""
        eta = f"ETA {format_duration(self.estimate(rounds_done))}"
        return eta if self._evaluation_seconds else f"{eta} + evaluations"

    def estimate(self, rounds_done: int) -> float:
        """Return the seconds after a round; evaluations count once one has been timed."""
        rounds_left = self._rounds - rounds_done
        # Rounded up: the last round is evaluated even if it is no multiple.
        evaluations_left = -(-self._rounds // self._every) - rounds_done // self._every
        round_seconds = median_low(self._round_seconds or [0.0])
        evaluation_seconds = fmean(self._evaluation_seconds or [0.0])
        return rounds_left * round_seconds + evaluations_left * evaluation_seconds


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
    fields = [line.split() for line in events.splitlines()]
    elapsed = format_duration(now - min(float(start_time) for _, start_time, *_ in fields))
    started = {job for job, *_ in fields}
    seconds = {job: float(times[1]) for job, *times in fields if len(times) > 1}
    if len(seconds) == jobs:
        return f"{jobs}/{jobs} done in {elapsed}"

    # The next job takes the place of one that has ended.
    side_by_side = len(started) - len(seconds)
    if not number and len(started) < jobs:
        side_by_side += 1
    mean_seconds = fmean([*filter(None, seconds.values())] or [0.0])
    seconds_left = mean_seconds * (jobs - len(seconds)) / side_by_side
    text = f"run {number} of {jobs}, elapsed {elapsed}" if number else f"{len(seconds)}/{jobs} done"
    return f"{text}, ETA {format_duration(seconds_left)}" if seconds_left else text


def format_duration(seconds: float) -> str:
    """Write seconds as `1:02:03`, after a day as `1 day, 1:02:03`."""
    return str(timedelta(seconds=round(max(0.0, seconds))))
