"""Ranges of numbers in annotations, such as `mu: Annotated[float, AtLeast(0)]`.

`casting` checks values against them.
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
    """The finite numbers within limits, such as `("at least", 0), ("below", 1)`."""

    limits: tuple[tuple[str, float], ...]

    def __contains__(self, value: float) -> bool:
        # Without limits, too: nan and infinity are no value of any key.
        if not math.isfinite(value):
            return False
        return all(COMPARISONS[relation](value, limit) for relation, limit in self.limits)

    def require_value(self, value: float) -> float:
        """Return the value if the range holds it. Raises ValueError if not."""
        if value not in self:
            raise ValueError(str(self))
        return value

    def __add__(self, other: Range) -> Range:
        """Return the numbers within the limits of both."""
        return Range(self.limits + other.limits)

    def __str__(self) -> str:
        match self.limits:
            case (("at least", minimum),):
                return f"{minimum} or more"
            case (("above", 0),):
                return "a positive number"
            case (("at least", minimum), ("at most", maximum)):
                return f"between {minimum} and {maximum}"
        return " and ".join(f"{relation} {limit}" for relation, limit in self.limits)


def _make_range(relation: str, limit: float) -> Range:
    return Range(((relation, limit),))


AtLeast = partial(_make_range, "at least")
Above = partial(_make_range, "above")
AtMost = partial(_make_range, "at most")
Below = partial(_make_range, "below")


def Between(minimum: float, maximum: float) -> Range:
    """Return the range from `minimum` to `maximum`, both included."""
    return AtLeast(minimum) + AtMost(maximum)
