"""Estimate the remaining time of a run from the rounds that it has played."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any

RECENT_ROUNDS = 50
"""Rounds, and evaluations of each kind, that an estimate is made from."""


class RemainingTime:
    """Estimate the remaining seconds of a run.

    Medians of recent rounds: a round that stalled changes no estimate after it.

    Args:
        rounds: of the whole run; the last one is always evaluated.
        config: resolved configuration, whose `eval` says when all clients are evaluated.
    """

    def __init__(self, rounds: int, config: Mapping[str, Any]):
        settings = config["eval"]
        self._rounds = rounds
        self._every = settings["every"]
        self._tuned_every = 0
        if settings.get("finetune_epochs"):
            self._tuned_every = settings.get("finetune_every", 0)
        self._round_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._evaluation_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        self._tuned_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)

    def add_round(self, seconds: float) -> None:
        """Add the seconds of a round without its evaluation."""
        self._round_seconds.append(seconds)

    def add_evaluation(self, seconds: float, is_tuned: bool) -> None:
        """Add the seconds of an evaluation of all clients."""
        (self._tuned_seconds if is_tuned else self._evaluation_seconds).append(seconds)

    @property
    def last_evaluation(self) -> float | None:
        """Return the seconds of the longer of the last evaluations of both kinds."""
        seconds = [kind[-1] for kind in (self._evaluation_seconds, self._tuned_seconds) if kind]
        return max(seconds, default=None)

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
        """Count the multiples of a period after a round, and the last round; none for 0."""
        if not period or rounds_done >= self._rounds:
            return 0
        # Rounded up: the last round is evaluated even if it is no multiple.
        return -(-self._rounds // period) - rounds_done // period
