"""How lines look: a method has one colour and one marker everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES

# Okabe and Ito's colours, distinguishable with any colour vision, then as many darker ones.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"),
    *("#332288", "#882255", "#7A8B00", "#006D6D", "#8B4513", "#C00020", "#5FA52A", "#7B5FB5"),
)

_FREQUENT_METHODS = (
    *("fedobp", "fedper", "fedrep", "fedavg", "fedala", "apfl", "lg_fedavg", "local_only"),
    *("fedselect", "flute", "feddpa", "floco", "pfedfda", "ditto", "fedbn", "fedrod"),
)
"""They are compared most often, so that none shares its colour; their places choose these."""
_METHODS = list(dict.fromkeys((*_FREQUENT_METHODS, *METHOD_TITLES)))


def number_styles(
    groups: Iterable[Group], label_of: Callable[[Group], str] = lambda group: group.method
) -> dict[str, int]:
    """Return the number of each label's style.

    The first configuration of a method has the method's style. Further ones, and users' methods,
    have one that their label decides.

    Args:
        groups: the configurations.
        label_of: names a line.
    """
    # ---- Step 1: a number that no other configuration decides.
    wanted_numbers: dict[str, int] = {}
    seen_methods = set()
    for group in groups:
        method = group.method_name
        label = label_of(group)
        if label not in wanted_numbers:
            is_known = method in _METHODS and method not in seen_methods
            digest = zlib.crc32(group.method.encode())  # FedAvg+FT looks as FedAvg does
            wanted_numbers[label] = _METHODS.index(method) if is_known else digest
            seen_methods.add(method)

    # ---- Step 2: the next colour where two would share one, frequent methods first.
    style_numbers: dict[str, int] = {}
    used_colors: set[int] = set()
    for label in sorted(wanted_numbers, key=wanted_numbers.__getitem__):
        number = wanted_numbers[label]
        while number % len(COLORS) in used_colors and len(used_colors) < len(COLORS):
            number += 1
        used_colors.add(number % len(COLORS))
        style_numbers[label] = number
    return style_numbers
