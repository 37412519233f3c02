"""Federated methods: a file per name of the registry, which defines one class.

Shared code lies in shared/.
"""

import importlib
import inspect
import pkgutil

from fedpfl.methods.shared.batch import LONGEST_CHUNK, Batch, Data, Shard
from fedpfl.methods.shared.method import (
    FACTS,
    SEES,
    STORED,
    Method,
    Phase,
    Turn,
)

__all__ = [
    "FACTS",
    "LONGEST_CHUNK",
    "METHODS",
    "SEES",
    "STORED",
    "Batch",
    "Data",
    "Method",
    "Phase",
    "Shard",
    "Turn",
]


def _import_method(name: str) -> type[Method]:
    """Return the one method that a file defines; imported ones belong to other files."""
    module = importlib.import_module(f"{__name__}.{name}")
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    (method,) = (
        value
        for value in classes
        if issubclass(value, Method) and value.__module__ == module.__name__
    )
    return method


METHODS: dict[str, type[Method]] = {
    module.name: _import_method(module.name)
    for module in pkgutil.iter_modules(__path__)
    if not module.ispkg
}
globals().update(
    {method.__name__: method for method in METHODS.values()}
)  # from fedpfl.methods import FedOBP
