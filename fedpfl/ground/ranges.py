"""Ranges of numbers, as annotations say them: `mu: Annotated[float, AtLeast(0)]`; `casting` reads
them.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import partial

COMPARISONS = {
    "at least": operator.ge,
    "above": operator.gt,
    "at most": operator.le,
    "below": operator.lt,
}


@dataclass(frozen=True)
class Range:
    """Hold the finite numbers within all of its limits, such as `("at least", 0), ("below", 1)`."""

    limits: tuple[tuple[str, float], ...]

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and all(
            COMPARISONS[word](value, limit) for word, limit in self.limits
        )

    def __add__(self, other: Range) -> Range:
        """Return the numbers that both hold."""
        return Range(self.limits + other.limits)

    def __str__(self) -> str:
        match self.limits:
            case (("at least", least),):
                return f"{least} or more"
            case (("above", 0),):
                return "a positive number"
            case (("at least", least), ("at most", most)):
                return f"between {least} and {most}"
        return " and ".join(f"{word} {limit}" for word, limit in self.limits)


def _limited(word: str, limit: float) -> Range:
    return Range(((word, limit),))


AtLeast, Above = partial(_limited, "at least"), partial(_limited, "above")
AtMost, Below = partial(_limited, "at most"), partial(_limited, "below")


def Between(least: float, most: float) -> Range:
    """Return the range from `least` to `most`, both included."""
    return AtLeast(least) + AtMost(most)
