"""Plugins: a user's Python files, whose methods, models, data sets and partitions become choices."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

import fedpfl
from fedpfl.config.beside import ModuleSources, find_local_imports, read_source
from fedpfl.data import datasets, partition
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.ranges import COMPARISONS
from fedpfl.methods import METHODS, Method
from fedpfl.models import MODELS
from fedpfl.record.callbacks import Callback


class Kind(NamedTuple):
    """Say what a plugin may add: where it is chosen, where it is kept, and arguments that are not
    chosen with it.

    common: keys that every choice of the group has beside its own.
    """

    group: str
    registry: dict[str, Any]
    given: tuple[str, ...] = ()
    common: Mapping[str, Any] = {}


PLUGIN_KINDS = {
    "METHODS": Kind("method", METHODS),
    "MODELS": Kind("model", MODELS, ("shape", "classes"), {"weights": None}),
    "DATASETS": Kind("dataset", datasets.DATA_SETS, ("source",)),
    "PARTITIONS": Kind("partition", partition.SCHEMES, partition.SUPPLIED_ARGUMENTS),
}
"""By the name that a plugin gives its dictionary of names and classes or functions."""

# YAML of the same name says what differs from the file's defaults; that is what Hydra warns of.
warnings.filterwarnings("ignore", r"\s*'.*' is validated against ConfigStore schema")


class Loaded(NamedTuple):
    """Hold what a file became, and the texts that made it: its own, then those of modules that it
    imports.
    """

    module: ModuleType
    texts: ModuleSources


LIMITS = "limits"
"""The key of a space for what values must be, `above 0, below layers`: others make the method
another one.
"""
SPACES: dict[str, dict[str, Any]] = {}
"""What `tune` searches of the methods that plugins add: values by key, in the words of Hydra's
sweeps.
"""

_loaded_files: dict[Path, Loaded] = {}
_added_choices: list[tuple[Kind, str]] = []


def load_plugins(files: Iterable[str]) -> list[str]:
    """Import files and make what they hold choices, and nothing that other files held; return their
    whole paths.

    `group=name` then stands for the values that the class or function has by default, where no YAML
    file says more. Files that this process knows are imported anew if a text has changed, theirs or
    that of a module in their folder that they import. Raises FedpflError for one that is absent,
    fails, or adds nothing or what there is already.
    """
    paths = [Path(file).expanduser().absolute() for file in files]
    texts = [
        item
        for path in paths
        if path in _loaded_files
        for item in _loaded_files[path].texts.items()
    ]
    if any(read_source(place) != text for _, (place, text) in texts):
        _forget_modules(name for name, _ in texts)
        for path in paths:
            _loaded_files.pop(path, None)
    modules = [_import_module(path) for path in paths]
    while _added_choices:
        kind, key = _added_choices.pop()
        del kind.registry[key], ConfigStore.instance().repo[kind.group][f"{key}.yaml"]
    SPACES.clear()
    for path, module in zip(paths, modules, strict=True):
        added = {
            name: value
            for name in PLUGIN_KINDS
            if isinstance(value := getattr(module, name, None), Mapping)
        }
        if not any(added.values()) and not _callbacks(path):
            known = ", ".join(PLUGIN_KINDS)
            raise FedpflError(
                f"plugins: {path} adds nothing; it needs a dictionary {known} of names and values,"
                " or a list CALLBACKS"
            )
        for name, choices in added.items():
            for key, value in choices.items():
                _add_choice(path, PLUGIN_KINDS[name], key, value)
        _add_spaces(path, getattr(module, "SPACES", {}), added.get("METHODS", {}))
    return [str(path) for path in paths]


def digest_plugins(files: Iterable[str]) -> dict[str, str]:
    """Return a digest of each file's text as it was loaded, by the file's name; files of one name
    share an entry.

    With the texts of the modules in its folder that it imports.
    """
    digests: dict[str, list[str]] = {}
    for file in map(Path, files):
        (_, file_text), *local_imports = _loaded_files[file].texts.values()
        digest = hashlib.blake2b(file_text, digest_size=8)
        for place, text in sorted(local_imports):
            digest.update(
                f"{place.relative_to(file.parent.resolve()).as_posix()} {len(text)}\n".encode()
                + text
            )
        digests.setdefault(file.name, []).append(digest.hexdigest())
    return {name: " ".join(sorted(file_text)) for name, file_text in digests.items()}


def make_callbacks(files: Iterable[str]) -> list[Callback]:
    """Return one of each callback that loaded files have. Raises FedpflError where one cannot be
    made.
    """
    return [_make_callback(Path(file), kind) for file in files for kind in _callbacks(Path(file))]


def _callbacks(file: Path) -> Sequence[type[Callback]]:
    kinds = getattr(_loaded_files[file].module, "CALLBACKS", ())
    if not isinstance(kinds, list | tuple) or not all(inspect.isclass(kind) for kind in kinds):
        raise FedpflError(f"plugins: {file}: CALLBACKS must be a list of classes, got {kinds!r}")
    if wrong := [kind.__name__ for kind in kinds if not issubclass(kind, Callback)]:
        raise FedpflError(
            f"plugins: {file}: CALLBACKS: {wrong[0]} must be a subclass of fedpfl.Callback"
        )
    return kinds


def _make_callback(file: Path, kind: type[Callback]) -> Callback:
    try:
        return kind()
    except Exception as error:
        place, why = f"{file}{_error_line(error, file)}", error_text(error, with_class=True)
        raise FedpflError(f"plugins: {place}: CALLBACKS: {kind.__name__}() raised {why}") from error


def _import_module(file: Path) -> ModuleType:
    if file not in _loaded_files:
        try:
            text = file.read_bytes()
        except OSError as error:
            raise FedpflError(
                f"plugins: {file}: {error.strerror}; name a Python file that there is"
            ) from None
        name = f"fedpfl_plugin_{file.stem}_{hashlib.blake2b(text, digest_size=8).hexdigest()}"
        _loaded_files[file] = Loaded(
            _execute_file(file, name, text), {name: (file, text), **find_local_imports(file, text)}
        )
    return _loaded_files[file].module


def _execute_file(file: Path, name: str, text: bytes) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)  # dataclasses and pickles look there
    module.__file__ = str(file)
    try:
        exec(compile(text, file, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        _forget_modules([name, *find_local_imports(file, text)])
        said = error_text(error, with_class=not isinstance(error, FedpflError)) + _describe_move(
            error
        )
        raise FedpflError(f"plugins: {file}{_error_line(error, file)}: {said}") from error
    return module


def _forget_modules(names: Iterable[str]) -> None:
    """Have modules imported anew when they are next asked for."""
    for name in names:
        parent, _, last = name.rpartition(".")
        sys.modules.pop(name, None)
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(last, None)
    importlib.invalidate_caches()


def _describe_move(error: BaseException) -> str:
    """Say where what a file imports from fedpfl stands now, if it has moved."""
    missing_import = re.match(
        r"No module named '(fedpfl[\w.]*)\.(\w+)'|cannot import name '(\w+)' from '(fedpfl[\w.]*)'",
        str(error),
    )
    if not missing_import or not isinstance(error, ImportError):
        return ""
    name, package = missing_import[2] or missing_import[3], Path(fedpfl.__file__).parent
    defines = re.compile(rf"^(class|def) {name}\b", re.MULTILINE)
    files = sorted(package.rglob("*.py"))
    defining_files = [path for path in files if path.stem == name] or [
        path for path in files if defines.search(path.read_text())
    ]
    module_names = [
        ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in defining_files
    ]
    new_place = (
        f"it is {' or '.join(module_names)}"
        if missing_import[2]
        else f"{name} is in {' or '.join(module_names)}"
    )
    return f"; {new_place} now" if module_names else "; it is no more (docs/extend.md)"


def _error_line(error: BaseException, file: Path) -> str:
    """Say where in the file it failed, as `:12`."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f":{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    return f":{lines[-1]}" if lines else ""


def _add_choice(file: Path, kind: Kind, name: Any, value: Any) -> None:
    """Make a class or function a choice. Raises FedpflError."""
    if not isinstance(name, str) or not name.isidentifier():
        raise FedpflError(
            f"plugins: {file}: {kind.group} {name!r} must be a name of letters, digits and _"
        )
    if name in kind.registry:
        raise FedpflError(
            f"plugins: {file}: {kind.group}={name} exists already; choose another name"
        )
    if kind.group == "method" and not (inspect.isclass(value) and issubclass(value, Method)):
        raise FedpflError(
            f"plugins: {file}: method={name} must be a subclass of fedpfl.methods.Method"
        )
    try:
        inspect.signature(value)
    except (TypeError, ValueError):  # no function, or one that does not tell its arguments
        raise FedpflError(
            f"plugins: {file}: {kind.group}={name} must be a class or a function, got {value!r}"
        ) from None
    kind.registry[name] = value
    values = {"name": name, **kind.common, **_default_values(kind, value)}
    ConfigStore.instance().store(name, values, kind.group)
    _added_choices.append((kind, name))


def check_search_space(space: Any) -> dict[str, Any]:
    """Return a search space as it is. Raises FedpflError for what is none, in the words of who
    wrote it.
    """
    if not isinstance(space, Mapping):
        raise FedpflError(
            "a search space must be of keys and values such as method.mu: choice(0.1, 1), got"
            f" {space!r}"
        )
    for key, text in space.items():
        if key == LIMITS:
            _require_limits(text)
            continue
        if not isinstance(key, str) or not isinstance(text, str | int | float):
            raise FedpflError(f"{key}: must be a text such as 'choice(0.1, 1)', got {text!r}")
        try:
            OverridesParser.create().parse_override(f"{key}={text}")
        except HydraException:
            raise FedpflError(
                f"{key}: {text!r} is no choice(...), range(...) or interval(...)"
            ) from None
    return dict(space)


def _require_limits(limits: Any) -> None:
    """Raise FedpflError for limits that nobody can read."""
    if not isinstance(limits, Mapping):
        raise FedpflError(
            f"{LIMITS}: must be of keys and limits such as 'above 0, below layers', got {limits!r}"
        )
    bounds = [part.rpartition(" ") for text in limits.values() for part in str(text).split(", ")]
    for kind, _, bound in bounds:
        if kind not in COMPARISONS or not (bound in ("layers", "epochs") or bound.isdecimal()):
            raise FedpflError(
                f"{LIMITS}: must be such as 'above 0, below layers', got"
                f" {f'{kind} {bound}'.strip()!r}"
            )


def _add_spaces(file: Path, spaces: Any, methods: Mapping[str, Any]) -> None:
    """Let `tune` search the keys that a plugin names of its methods. Raises FedpflError."""
    if not isinstance(spaces, Mapping):
        raise FedpflError(
            f"plugins: {file}: SPACES must be a dictionary of methods' names and spaces, got"
            f" {spaces!r}"
        )
    for name, space in spaces.items():
        if name not in methods:
            raise FedpflError(
                f"plugins: {file}: SPACES: {name!r} is no method of this file's METHODS"
            )
        try:
            SPACES[name] = check_search_space(space)
        except FedpflError as error:
            raise FedpflError(f"plugins: {file}: SPACES: {name}: {error}") from None


def _default_values(kind: Kind, value: Any) -> dict[str, Any]:
    """Return what it takes if nothing is chosen; `???` is Hydra's word for what has to be."""
    return {
        key: (
            "???"
            if one.default is one.empty
            else list(one.default)
            if isinstance(one.default, tuple)
            else one.default
        )
        for key, one in inspect.signature(value).parameters.items()
        if key not in kind.given and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
