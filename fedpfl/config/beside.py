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
    """Return the modules below a file's folder that it imports, and these in turn.

    Imports count wherever they stand in a text.
    """
    sources: ModuleSources = {}
    pending = [(text, "")]  # with the package that relative imports start from
    while pending:
        source_text, package = pending.pop()
        names = [
            name
            for import_name in imported_modules(source_text, package)
            for name in _list_parents(import_name)
        ]
        for name in names:
            path = _find_path(name)
            if name in sources or not path or not _is_in_folder(path, file.parent):
                continue
            imported_text = read_source(path)
            if imported_text is None:
                continue
            sources[name] = path, imported_text
            is_package = path.stem == "__init__"
            # A package is where its own relative imports start from; a module's start from the
            # package that holds it.
            pending.append((imported_text, name if is_package else name.rpartition(".")[0]))
    return sources


def read_source(path: Path) -> bytes | None:
    """Return a file's text, None where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _list_parents(name: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` of `a.b.c`: an import runs all three."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _find_path(name: str) -> Path | None:
    """Return the file of a module, imported or not; None without one."""
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
        return Path(path).resolve() if path else None
    # `find_spec` of importlib would import the parents; the path finder only looks.
    folders = None
    spec = None
    for part in _list_parents(name):
        spec = PathFinder.find_spec(part, folders)
        # Below a module that is not found, nothing is.
        folders = (spec.submodule_search_locations or []) if spec else []
    return Path(spec.origin).resolve() if spec and spec.origin else None


def _is_in_folder(path: Path, folder: Path) -> bool:
    """Return True if a module lies in a plugin's folder and belongs to the plugin.

    Installed packages, and fedpfl itself, do not.
    """
    if not path.is_relative_to(folder.resolve()):
        return False
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    # `os` stands for the standard library: a plugin may lie in a folder above both.
    package_folders = [Path(str(package.__file__)).resolve().parent for package in (fedpfl, os)]
    return not any(map(path.is_relative_to, package_folders))
