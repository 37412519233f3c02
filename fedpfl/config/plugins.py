"""Plugins: methods, networks and data in a user's Python files become choices."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from torch import nn

from fedpfl.config.beside import ModuleSources, find_local_imports, read_source
from fedpfl.config.plugin_keys import read_defaults
from fedpfl.config.schema import ModelOptions
from fedpfl.data import datasets, partition
from fedpfl.engine.measures import PLUGIN_MEASURES
from fedpfl.ground.checks import refuse_single_text
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Record
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.methods import METHODS, Method
from fedpfl.models import MODELS
from fedpfl.record.callbacks import Callback
from fedpfl.record.columns import CLIENT_COLUMNS, METRICS, list_measure_columns


class Kind(NamedTuple):
    """Describe a kind of choice that a plugin may add.

    Attributes:
        group: the configuration group that chooses it.
        registry: the existing names.
        supplied: arguments that fedpfl gives, which are no keys.
        common: keys that every choice of the group has beside its own.
        reserved: keys of the group that a choice is not given.
    """

    group: str
    registry: Record
    supplied: tuple[str, ...] = ()
    common: Mapping[str, Any] = {}
    reserved: frozenset[str] = frozenset({"name"})


PLUGIN_KINDS = {
    "METHODS": Kind("method", METHODS),
    "MODELS": Kind(
        "model",
        MODELS,
        supplied=("shape", "classes"),
        common={"weights": None},
        reserved=frozenset({"name", *vars(ModelOptions())}),
    ),
    "DATASETS": Kind(
        "dataset",
        datasets.DATA_SETS,
        supplied=("source", "task"),
        reserved=datasets.SHARED_KEYS,
    ),
    "PARTITIONS": Kind(
        "partition",
        partition.SCHEMES,
        supplied=partition.SUPPLIED_ARGUMENTS,
    ),
}
"""By the name that a plugin gives its dictionary of names and classes or functions."""

# YAML of the same name says what differs from the file's defaults; that is what Hydra warns of.
warnings.filterwarnings("ignore", r"\s*'.*' is validated against ConfigStore schema")


class LoadedPlugin(NamedTuple):
    """Hold a file's module and its sources: its own, then those of modules that it imports."""

    module: ModuleType
    sources: ModuleSources


LIMITS = "limits"
"""The key of a space for limits such as `above 0, below layers`.

Other values would make the method another one.
"""
SPACES: dict[str, Record] = {}
"""What `tune` searches of the methods that plugins add: Hydra's sweeps by key."""

_loaded_files: dict[Path, LoadedPlugin] = {}
_added_choices: list[tuple[Kind, str]] = []


def resolve_files(files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return absolute paths. Raises FedpflError for a single text, which is no list of files."""
    refuse_single_text(files, "plugins")
    return [str(Path(file).expanduser().absolute()) for file in files]


def load_plugins(files: Iterable[str]) -> list[str]:
    """Import files, make their choices those of this process, and return their absolute paths.

    What other files had added is no choice any more. `group=name` then stands for the values that
    the class or function has by default, where no YAML file says more. Files that this process has
    loaded are imported anew if a text has changed, theirs or that of a module in their folder.

    Raises:
        FedpflError: for a file that is absent, fails, or adds nothing or what there is already.
    """
    paths = [*map(Path, resolve_files(files))]
    # Before any import: a change in a shared module concerns all files, and half of them anew would
    # hold two versions of its classes.
    _forget_changed_files(paths)
    modules = [_import_module(path) for path in paths]
    _remove_choices()
    try:
        for path, module in zip(paths, modules, strict=True):
            _add_choices(path, module)
    except BaseException:  # all of them or none
        _remove_choices()
        raise
    return [str(path) for path in paths]


def _remove_choices() -> None:
    """Take back what files have added."""
    while _added_choices:
        kind, name = _added_choices.pop()
        del kind.registry[name]
        del ConfigStore.instance().repo[kind.group][f"{name}.yaml"]
    SPACES.clear()
    for name in [*PLUGIN_MEASURES]:
        del PLUGIN_MEASURES[name]
        for column in list_measure_columns(name):
            del METRICS[column]


def _forget_changed_files(paths: Sequence[Path]) -> None:
    """Have all of these files imported anew if a text has changed."""
    sources: list[tuple[str, tuple[Path, bytes]]] = []
    for path in paths:
        if path in _loaded_files:
            sources += _loaded_files[path].sources.items()
    if any(read_source(source_path) != text for _, (source_path, text) in sources):
        forget_modules(name for name, _ in sources)
        for path in paths:
            _loaded_files.pop(path, None)


def _add_choices(file: Path, module: ModuleType) -> None:
    """Register the choices of a module. Raises FedpflError if it has none."""
    choices = {name: getattr(module, name, None) or {} for name in PLUGIN_KINDS}
    measures = getattr(module, "METRICS", {})
    if not any(choices.values()) and not measures and not getattr(module, "CALLBACKS", ()):
        raise FedpflError(
            f"plugins: {file} adds nothing; it needs a dictionary {', '.join(PLUGIN_KINDS)},"
            " METRICS of names and values, or a list CALLBACKS"
        )
    for kind_name, dictionary in choices.items():
        for name, value in dictionary.items():
            _add_choice(file, PLUGIN_KINDS[kind_name], name, value)
    for name, space in getattr(module, "SPACES", {}).items():
        if name not in choices["METHODS"]:
            raise FedpflError(f"plugins: {file}: SPACES: {name!r} is no method of its METHODS")
        SPACES[name] = dict(space)
    for name, function in measures.items():
        _add_measure(file, name, function)


def _add_measure(file: Path, name: Any, function: Any) -> None:
    """Make a function a measure. Raises FedpflError."""
    columns = list_measure_columns(name)
    options = {metric.option for metric in METRICS.values()}
    is_taken = {*METRICS, *CLIENT_COLUMNS, *options} & {*columns}
    is_free = not is_taken and not str(name).startswith("label_")
    if not callable(function) or not str(name).isidentifier() or not is_free:
        raise FedpflError(
            f"plugins: {file}: metrics=[{name}]: it must be a function, and its name of letters,"
            " digits and _, and of no measure or column that there is"
        )
    PLUGIN_MEASURES[name] = function
    METRICS.update(columns)


def digest_plugins(files: Iterable[str]) -> dict[str, str]:
    """Return digests of files as they were loaded, by name.

    A digest covers the modules in the file's folder that it imports; files of one name share an
    entry.
    """
    digests: dict[str, list[str]] = {}
    for file in map(Path, files):
        # The file itself comes first, and without its path: a moved plugin is the same method.
        (_, file_text), *local_imports = _loaded_files[file].sources.values()
        digest = hashlib.blake2b(file_text, digest_size=8)
        for path, text in sorted(local_imports):
            relative_path = path.relative_to(file.parent.resolve()).as_posix()
            digest.update(f"{relative_path} {len(text)}\n".encode() + text)
        digests.setdefault(file.name, []).append(digest.hexdigest())
    return {name: " ".join(sorted(file_digests)) for name, file_digests in digests.items()}


def make_callbacks(files: Iterable[str]) -> list[Callback]:
    """Return one of each callback that loaded files have.

    Raises:
        FedpflError: where one cannot be made.
    """
    callbacks: list[Callback] = []
    for file in map(Path, files):
        for callback_class in getattr(_loaded_files[file].module, "CALLBACKS", ()):
            try:
                callbacks.append(callback_class())
            except Exception as error:
                reason = error_text(error, with_class=True)
                raise FedpflError(f"plugins: {file}: CALLBACKS: {reason}") from error
            if not isinstance(callbacks[-1], Callback):
                raise FedpflError(
                    f"plugins: {file}: CALLBACKS must be a list of subclasses of fedpfl.Callback,"
                    f" got {callback_class!r}"
                )
    return callbacks


def _import_module(file: Path) -> ModuleType:
    if file not in _loaded_files:
        try:
            text = file.read_bytes()
        except OSError as error:
            raise FedpflError(
                f"plugins: {file}: {error.strerror}; name a Python file that there is"
            ) from None
        name = f"fedpfl_plugin_{file.stem}_{hashlib.blake2b(text, digest_size=8).hexdigest()}"
        module = execute_file(file, name, text)
        sources = {name: (file, text), **find_local_imports(file, text)}
        _loaded_files[file] = LoadedPlugin(module, sources)
    return _loaded_files[file].module


def is_from_plugin(group: str, name: str) -> bool:
    """Return True if a loaded file has added the choice."""
    return any(kind.group == group and name == added_name for kind, added_name in _added_choices)


def execute_file(file: Path, name: str, text: bytes) -> ModuleType:
    """Run the text of a file as a module of this name. Raises FedpflError where it fails."""
    module = sys.modules[name] = ModuleType(name)  # dataclasses and pickles look there
    module.__file__ = str(file)
    try:
        # Draws of its import are the same in each process.
        with seeded_by_key("plugins"):
            exec(compile(text, str(file), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        # A half-run import would be found by the next try, and tell of another fault.
        forget_modules([name, *find_local_imports(file, text)])
        location = f"{file}{_error_line(error, file)}"
        reason = error_text(error, with_class=not isinstance(error, FedpflError))
        raise FedpflError(f"plugins: {location}: {reason}") from error
    return module


def forget_modules(names: Iterable[str]) -> None:
    """Have modules imported anew when they are next asked for."""
    for name in names:
        parent, _, attribute = name.rpartition(".")
        sys.modules.pop(name, None)
        if parent in sys.modules:
            # `from parent import module` would find the old one there.
            vars(sys.modules[parent]).pop(attribute, None)
    importlib.invalidate_caches()


def _error_line(error: BaseException, file: Path) -> str:
    """Say where in the file it failed, as `:12`."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        frames.append((str(error.filename), error.lineno))
    lines = [line for name, line in frames if name == str(file)]
    return f":{lines[-1]}" if lines else ""


def _add_choice(file: Path, kind: Kind, name: Any, value: Any) -> None:
    """Make a class or function a choice. Raises FedpflError."""
    try:
        if not isinstance(name, str) or not name.isidentifier():
            raise FedpflError("its name must be of letters, digits and _")
        if name in kind.registry:
            raise FedpflError("it exists already; choose another name")
        # Of methods alone: the engine calls all hooks of `Method`, other choices are just called.
        if kind.group == "method" and not (inspect.isclass(value) and issubclass(value, Method)):
            raise FedpflError("it must be a subclass of fedpfl.methods.Method")
        if not callable(value) or isinstance(value, nn.Module):
            raise FedpflError(f"it must be a class or a function, got {value!r}")
        defaults = read_defaults(value, kind.supplied, kind.reserved)
    # Some builtin functions do not tell their arguments.
    except (FedpflError, ValueError) as error:
        raise FedpflError(f"plugins: {file}: {kind.group}={name}: {error}") from None
    kind.registry[name] = value
    ConfigStore.instance().store(name, {"name": name, **kind.common, **defaults}, kind.group)
    _added_choices.append((kind, name))
