"""How lines look: a method has one colour and one marker everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES

# Okabe and Ito's colours, distinguishable with any colour vision, then as many darker ones.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"),
    *("#332288", "#882255", "#7A8B00", "#006D6D", "#8B4513", "#C00020", "#5FA52A", "#7B5FB5"),
)
MARKER_COUNT = 7
"""No divisor of it divides the number of colours: 112 lines are told apart."""

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

    The first configuration of a method has the method's style; further ones, and methods that only
    the user has, take what no method of these groups has.

    Args:
        groups: the configurations.
        label_of: names a line.
    """
    # ---- Step 1: the first label of each method.
    labels_by_method: dict[str, list[str]] = {}
    for group in groups:
        labels = labels_by_method.setdefault(group.runs[0].method_name, [])
        if label_of(group) not in labels:
            labels.append(label_of(group))
    style_numbers = {
        labels[0]: _METHODS.index(method)
        for method, labels in labels_by_method.items()
        if method in _METHODS
    }

    # ---- Step 2: the others, in the order of the groups.
    # A colour of its method would not tell a configuration from the first one.
    free_numbers = (
        number for number in range(1_000_000) if number not in set(style_numbers.values())
    )
    for labels in labels_by_method.values():
        for label in labels:
            if label not in style_numbers:
                style_numbers[label] = next(free_numbers)
    return style_numbers
