"""Count what is left of a run, and forecast how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedpfl.ground.errors import pluralize


class Forecast(NamedTuple):
    """Expected seconds of a run's parts, timed before its first round.

    Attributes:
        round: training, aggregating and evaluating a cohort.
        evaluation: evaluating all clients.
        tuned_evaluation: the same with fine-tuning.
    """

    round: float
    evaluation: float
    tuned_evaluation: float


class Remaining(NamedTuple):
    """Numbers of remaining rounds, plain evaluations, and evaluations with fine-tuning."""

    rounds: int
    evaluations: int
    tuned_evaluations: int

    def seconds(self, forecast: Forecast) -> float:
        """Return how long all of it takes."""
        return sum(count * seconds for count, seconds in zip(self, forecast, strict=True))

    def describe(self, forecast: Forecast) -> str:
        """Write the parts, such as `400 rounds of 1.2 s, 36 evaluations of 8 s`."""
        parts = [f"{pluralize(self.rounds, 'round')} of {_format_seconds(forecast.round)}"]
        if self.evaluations:
            parts.append(
                f"{pluralize(self.evaluations, 'evaluation')} of"
                f" {_format_seconds(forecast.evaluation)}"
            )
        if self.tuned_evaluations:
            seconds = _format_seconds(forecast.tuned_evaluation)
            parts.append(
                f"{pluralize(self.tuned_evaluations, 'evaluation')} with fine-tuning of {seconds}"
            )
        return ", ".join(parts)


@dataclass(frozen=True)
class Schedule:
    """When a run is evaluated.

    Attributes:
        rounds: of the whole run; the last one is always evaluated.
        every: rounds between two evaluations.
        tuned_every: rounds between two with fine-tuning, 0 for never.
    """

    rounds: int
    every: int
    tuned_every: int = 0

    @classmethod
    def of(cls, rounds: int, config: Mapping[str, Any]) -> Schedule:
        """Return that of a configuration's run of so many rounds."""
        settings = config["eval"]
        tuned_every = 0
        if settings.get("finetune_epochs"):
            tuned_every = settings.get("finetune_every", 0)
        return cls(rounds, settings["every"], tuned_every)

    def remaining(self, rounds_done: int) -> Remaining:
        """Return what is left after so many rounds."""
        if rounds_done >= self.rounds:
            return Remaining(0, 0, 0)
        evaluated = self._count(self.every, rounds_done)
        tuned = self._count(self.tuned_every, rounds_done) if self.tuned_every else 0
        return Remaining(self.rounds - rounds_done, evaluated - tuned, tuned)

    def _count(self, period: int, rounds_done: int) -> int:
        """Count the multiples of `period` after `rounds_done`, and the last round."""
        # Rounded up: the last round is evaluated whether or not it is a multiple.
        return -(-self.rounds // period) - rounds_done // period


def _format_seconds(seconds: float) -> str:
    """Write seconds with two digits."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
