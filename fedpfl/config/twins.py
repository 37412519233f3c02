"""A plugin as another process would have it: imported anew, where texts hash otherwise.

What a process remembers from earlier calls is not there, unseeded generators draw other numbers,
and sets list their members in another order. A twin of a right method, network, reader or partition
computes the same.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path, PurePath
from types import CodeType, ModuleType
from typing import Any

from torch import Tensor

from fedpfl import models
from fedpfl.config import plugins
from fedpfl.config.beside import ModuleSources
from fedpfl.config.schema import ModelOptions
from fedpfl.ground.errors import FedpflError
from fedpfl.models import Net


def import_twin(kind_name: str, name: str) -> Any:
    """Return a choice as another process would import it, where a plugin has added it.

    Args:
        kind_name: of PLUGIN_KINDS.
        name: the choice's.
    """
    choice = plugins.PLUGIN_KINDS[kind_name].registry[name]
    plugin = plugins.find_plugin(kind_name, name)
    if plugin is None:
        return choice
    module_name, (file, text) = next(iter(plugin.sources.items()))
    # Some files can be imported once: they register an operator, or a class elsewhere.
    with _modules_forgotten(plugin.sources), contextlib.suppress(FedpflError):
        twin = plugins.execute_file(file, module_name, text, _compile_otherwise, SHADOWS)
        return getattr(twin, kind_name)[name]
    return choice


def build_repeatable_network(
    name: str, shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> Net:
    """Return a network as `models.build_network` does.

    Raises:
        FedpflError: as there, and for a plugin's that is another one where it is imported anew.
    """
    net = models.build_network(name, shape, classes, seed, **options)
    shared_keys = {*vars(ModelOptions()), "adapter"}
    own_options = {key: value for key, value in options.items() if key not in shared_keys}
    twin = import_twin("MODELS", name)
    models.require_equal_twin(name, twin, shape, classes, seed, **own_options)
    return net


@contextlib.contextmanager
def twin_chosen(kind_name: str, name: str) -> Iterator[None]:
    """Have a choice be its twin for a while."""
    registry = plugins.PLUGIN_KINDS[kind_name].registry
    choice = registry[name]
    registry[name] = import_twin(kind_name, name)
    try:
        yield
    finally:
        registry[name] = choice


@contextlib.contextmanager
def _modules_forgotten(sources: ModuleSources) -> Iterator[None]:
    """Have modules imported anew for a while, in silence, and be what they were afterwards."""
    modules = {name: sys.modules[name] for name in sources if name in sys.modules}
    plugins.forget_modules(sources)
    finder = _TwinFinder(sources)
    sys.meta_path.insert(0, finder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        sys.meta_path.remove(finder)
        plugins.forget_modules(sources)
        for name, module in modules.items():
            sys.modules[name] = module
            parent, _, attribute = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], attribute, module)


# ---- modules beside the plugin


class _TwinFinder(MetaPathFinder):
    """Find the modules beside a plugin that it imports."""

    def __init__(self, sources: ModuleSources):
        self._sources = sources

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return how a module is loaded, None for those of other folders."""
        if name not in self._sources:
            return None
        file, text = self._sources[name]
        return spec_from_file_location(name, file, loader=_TwinLoader(name, file, text))


class _TwinLoader(SourceFileLoader):
    """Load a module whose texts hash otherwise."""

    def __init__(self, name: str, file: Path, text: bytes):
        super().__init__(name, str(file))
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of its text."""
        # Of the text that was imported: a file may have changed since, or have a cache.
        return _compile_otherwise(self._text, self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module."""
        vars(module).update(SHADOWS)
        super().exec_module(module)


# ---- sets and hashes


def _may_hash_otherwise(value: Any) -> bool:
    """Return whether another process may hash a value otherwise."""
    if isinstance(value, tuple | frozenset):
        return any(map(_may_hash_otherwise, value))
    # Texts have a salt, and where nothing else is said the hash is that of a place in memory.
    is_of_place = isinstance(value, Tensor) or type(value).__hash__ is object.__hash__
    return is_of_place or isinstance(value, str | bytes | Enum | PurePath)


class _AnySet(type):
    """Have sets of the usual kind count as instances."""

    def __instancecheck__(cls, value: Any) -> bool:
        # Libraries answer with the usual kind.
        if cls is OtherSet:
            return isinstance(value, set)
        if cls is OtherFrozenset:
            return isinstance(value, frozenset)
        return super().__instancecheck__(value)


class OtherSet(set, metaclass=_AnySet):
    """List members the other way round, where another process might."""

    def __iter__(self) -> Iterator[Any]:
        return _list_otherwise(super().__iter__())


class OtherFrozenset(frozenset, metaclass=_AnySet):
    """List members the other way round, where another process might."""

    def __iter__(self) -> Iterator[Any]:
        return _list_otherwise(super().__iter__())


def _list_otherwise(members: Iterator[Any]) -> Iterator[Any]:
    # Numbers hash alike everywhere.
    ordered = list(members)
    return iter(ordered[::-1] if any(map(_may_hash_otherwise, ordered)) else ordered)


def other_hash(value: Any) -> int:
    """Return a hash as another process might have it."""
    return ~hash(value) if _may_hash_otherwise(value) else hash(value)


SHADOWS: Mapping[str, Any] = {
    "set": OtherSet,
    "frozenset": OtherFrozenset,
    "hash": other_hash,
    "_OtherSet": OtherSet,  # of displays, whatever a file calls `set`
}
"""What stands in a twin's modules for Python's own."""


class _SetDisplays(ast.NodeTransformer):
    """Make calls of displays such as `{"a", "b"}`."""

    # Python makes its own kind of set of these, whatever the name `set` means.
    def visit_Set(self, node: ast.Set) -> ast.expr:
        self.generic_visit(node)
        return _call_set(ast.List(node.elts, ast.Load()), node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.expr:
        self.generic_visit(node)
        return _call_set(ast.ListComp(node.elt, node.generators), node)


def _call_set(members: ast.expr, node: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name("_OtherSet", ast.Load()), [members], [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


def _compile_otherwise(text: bytes, path: str) -> CodeType:
    module = _SetDisplays().visit(ast.parse(text, path))
    return plugins.compile_plainly(module, path)
