"""What is left of a run: rounds and evaluations by kind, and the seconds that they are expected to
take.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedpfl.ground.errors import pluralize


class Forecast(NamedTuple):
    """Seconds that a run's parts are expected to take, by what was timed before its first round.

    Attributes:
        round: training, aggregating and evaluating a cohort.
        evaluation: evaluating all clients.
        tuned_evaluation: the same with fine-tuning.
    """

    round: float
    evaluation: float
    tuned_evaluation: float


class Remaining(NamedTuple):
    """Numbers of what is still to be done: rounds, plain evaluations, and those with fine-tuning."""

    rounds: int
    evaluations: int
    tuned_evaluations: int

    def seconds(self, forecast: Forecast) -> float:
        """Return how long all of it takes."""
        return sum(count * each for count, each in zip(self, forecast, strict=True))

    def describe(self, forecast: Forecast) -> str:
        """Write what it is made of: `400 rounds of 1.2 s, 36 evaluations of 8 s, 4 with fine-tuning
        of 30 s`.
        """
        words = [f"{pluralize(self.rounds, 'round')} of {_short(forecast.round)}"]
        if self.evaluations:
            words.append(
                f"{pluralize(self.evaluations, 'evaluation')} of {_short(forecast.evaluation)}"
            )
        if self.tuned_evaluations:
            each = _short(forecast.tuned_evaluation)
            words.append(
                f"{pluralize(self.tuned_evaluations, 'evaluation')} with fine-tuning of {each}"
            )
        return ", ".join(words)


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
        own = config["eval"]
        tuned_every = own.get("finetune_every", 0) if own.get("finetune_epochs") else 0
        return cls(rounds, own["every"], tuned_every)

    def remaining(self, done: int) -> Remaining:
        """Return what is left after so many rounds."""
        if done >= self.rounds:
            return Remaining(0, 0, 0)
        evaluated = self._count(self.every, done)
        tuned = self._count(self.tuned_every, done) if self.tuned_every else 0
        return Remaining(self.rounds - done, evaluated - tuned, tuned)

    def _count(self, every: int, done: int) -> int:
        """Count the multiples of `every` after `done`, and the last round."""
        return -(-self.rounds // every) - done // every


def _short(seconds: float) -> str:
    """Write seconds with two digits."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
