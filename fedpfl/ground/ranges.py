"""Ranges of numbers in annotations, such as `mu: NonNegative` or `epochs: Annotated[int, AtLeast(2)]`.

`casting` checks values against them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from annotated_types import Ge as AtLeast
from annotated_types import Gt as Above
from annotated_types import Interval
from annotated_types import Le as AtMost
from annotated_types import Lt as Below

from fedpfl.ground.records import Record

__all__ = [
    "Above",
    "AtLeast",
    "AtMost",
    "Below",
    "Between",
    "Count",
    "NonNegative",
    "Positive",
    "PositiveProportion",
    "Proportion",
    "ProportionBelowOne",
    "WholeNumber",
    "describe_range",
]

RELATIONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def Between(minimum: float, maximum: float) -> Interval:
    """Return the range from `minimum` to `maximum`, both included."""
    return Interval(ge=minimum, le=maximum)


NonNegative = Annotated[float, AtLeast(0)]
Positive = Annotated[float, Above(0)]
Proportion = Annotated[float, Between(0, 1)]
PositiveProportion = Annotated[float, Above(0), AtMost(1)]
ProportionBelowOne = Annotated[float, AtLeast(0), Below(1)]
WholeNumber = Annotated[int, AtLeast(0)]
Count = Annotated[int, AtLeast(1)]


def describe_range(notes: Iterable[Any]) -> str:
    """Return the numbers within all ranges among an annotation's notes in words."""
    limits: Record = {}
    for note in notes:
        for name in RELATIONS:
            if getattr(note, name, None) is not None:
                limits[name] = getattr(note, name)
    match limits:
        case {"ge": minimum, "le": maximum}:
            return f"between {minimum} and {maximum}"
        case {"ge": minimum} if len(limits) == 1:
            return f"{minimum} or more"
        case {"gt": 0} if len(limits) == 1:
            return "a positive number"
    return " and ".join(f"{RELATIONS[name]} {limit}" for name, limit in limits.items())
