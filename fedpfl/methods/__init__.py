"""Federated methods: one file per name of the registry, which defines one class; what they share
lies in shared/.
"""

import importlib
import inspect
import pkgutil

from fedpfl.methods.shared.batch import Batch, Data, Shard
from fedpfl.methods.shared.method import (
    FACTS,
    ORDER,
    SEES,
    STORED,
    Method,
    Phase,
    Turn,
    argument_order_fault,
)

__all__ = [
    "FACTS",
    "METHODS",
    "ORDER",
    "SEES",
    "STORED",
    "Batch",
    "Data",
    "Method",
    "Phase",
    "Shard",
    "Turn",
    "argument_order_fault",
]


def _method(name: str) -> type[Method]:
    module = importlib.import_module(f"{__name__}.{name}")
    (own,) = (
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Method)
        and value.__module__ == module.__name__
    )
    return own


METHODS: dict[str, type[Method]] = {
    module.name: _method(module.name)
    for module in pkgutil.iter_modules(__path__)
    if not module.ispkg
}
globals().update(
    {method.__name__: method for method in METHODS.values()}
)  # from fedpfl.methods import FedOBP
