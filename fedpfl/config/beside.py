"""The modules that lie beside a plugin: they are part of its code."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path

import fedpfl
from fedpfl.record.environment import imported_modules

ModuleSources = dict[str, tuple[Path, bytes]]
"""Where a module's text is, and the text, by the module's name."""


def find_local_imports(file: Path, text: bytes) -> ModuleSources:
    """Return the modules in or below a file's folder that it imports, wherever in its text, and
    these in turn.
    """
    sources: ModuleSources = {}
    pending = [(text, "")]  # with the package that relative imports start from
    while pending:
        for name in [
            part
            for import_name in imported_modules(*pending.pop())
            for part in _list_parents(import_name)
        ]:
            path = _find_path(name)
            if (
                name in sources
                or not path
                or not _is_in_folder(path, file.parent)
                or (source := read_source(path)) is None
            ):
                continue
            sources[name] = path, source
            pending.append((source, name if path.stem == "__init__" else name.rpartition(".")[0]))
    return sources


def read_source(path: Path) -> bytes | None:
    """Return a file's text, None where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _list_parents(name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`: an import runs all three."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _find_path(name: str) -> Path | None:
    """Where a module's text is, be it imported yet or not."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules:
        folders = None
        for part in _list_parents(name):
            spec = PathFinder.find_spec(part, folders)
            path, folders = (
                (spec.origin, spec.submodule_search_locations or []) if spec else (None, [])
            )
    return Path(path).resolve() if path else None


def _is_in_folder(path: Path, folder: Path) -> bool:
    """Whether a module lies in a plugin's folder and is neither installed there nor fedpfl's."""
    package_folders = [Path(str(package.__file__)).resolve().parent for package in (fedpfl, os)]
    is_installed = {"site-packages", "dist-packages"} & {*path.parts} or any(
        map(path.is_relative_to, package_folders)
    )
    return path.is_relative_to(folder.resolve()) and not is_installed
