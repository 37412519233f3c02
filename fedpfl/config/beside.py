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
    found: ModuleSources = {}
    waiting = [(text, "")]  # with the package that relative imports start from
    while waiting:
        for name in [part for whole in imported_modules(*waiting.pop()) for part in _path(whole)]:
            place = _place(name)
            if (
                name in found
                or not place
                or not _own(place, file.parent)
                or (read := read_source(place)) is None
            ):
                continue
            found[name] = place, read
            waiting.append((read, name if place.stem == "__init__" else name.rpartition(".")[0]))
    return found


def read_source(place: Path) -> bytes | None:
    """Return a file's text, None where it cannot be read."""
    with contextlib.suppress(OSError):
        return place.read_bytes()
    return None


def _path(name: str) -> list[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`: an import runs all three."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _place(name: str) -> Path | None:
    """Where a module's text is, be it imported yet or not."""
    place = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules:
        folders = None
        for part in _path(name):
            spec = PathFinder.find_spec(part, folders)
            place, folders = (
                (spec.origin, spec.submodule_search_locations or []) if spec else (None, [])
            )
    return Path(place).resolve() if place else None


def _own(place: Path, folder: Path) -> bool:
    """Whether a module lies in a plugin's folder and is neither installed there nor fedpfl's."""
    others = [Path(str(package.__file__)).resolve().parent for package in (fedpfl, os)]
    installed = {"site-packages", "dist-packages"} & {*place.parts} or any(
        map(place.is_relative_to, others)
    )
    return place.is_relative_to(folder.resolve()) and not installed
