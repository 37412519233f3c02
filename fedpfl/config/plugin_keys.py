"""The keys of a plugin's class or function: its arguments, with their defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Collection
from typing import Any

from fedpfl.ground.checks import VARIADIC
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record


def read_defaults(
    value: Callable[..., Any], supplied: Collection[str], reserved: Collection[str]
) -> Record:
    """Return the defaults of the keys that a class or function has.

    An argument is no key and keeps its default if a configuration cannot hold the default, such as
    a class or a path.

    Args:
        value: The class or function.
        supplied: Arguments that fedpfl gives, which are no keys.
        reserved: Keys of the group that never reach the class or function.

    Raises:
        FedpflError: For an argument of a reserved name.
    """
    # A dataclass's signature shows what makes a default, not the default.
    fields = getattr(value, "__dataclass_fields__", {})
    defaults: Record = {}
    for key, parameter in inspect.signature(value).parameters.items():
        if key in supplied or parameter.kind in VARIADIC:
            continue
        # The group uses the key of that name itself: this argument would never be set.
        if key in reserved:
            raise FedpflError(f"its argument {key} is a key that every choice has; rename it")
        default = parameter.default
        if key in fields and fields[key].default_factory is not dataclasses.MISSING:
            default = fields[key].default_factory()
        if default is inspect.Parameter.empty:
            defaults[key] = "???"  # Hydra's word for what has to be chosen
            continue
        with contextlib.suppress(TypeError, ValueError):
            defaults[key] = json.loads(json.dumps(default))
    return defaults
