"""Ranges of numbers in annotations, such as `mu: Annotated[float, AtLeast(0)]`.

`casting` checks values against them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from annotated_types import Ge as AtLeast
from annotated_types import Gt as Above
from annotated_types import Interval
from annotated_types import Le as AtMost
from annotated_types import Lt as Below

__all__ = ["Above", "AtLeast", "AtMost", "Below", "Between", "describe_range"]

RELATIONS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def Between(minimum: float, maximum: float) -> Interval:
    """Return the range from `minimum` to `maximum`, both included."""
    return Interval(ge=minimum, le=maximum)


def describe_range(notes: Iterable[Any]) -> str:
    """Return the numbers within all ranges among an annotation's notes in words."""
    limits: dict[str, Any] = {}
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
