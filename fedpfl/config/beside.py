"""The modules that lie beside a plugin: they are part of its code."""

from __future__ import annotations

import contextlib
import sys
from itertools import accumulate
from pathlib import Path

from fedpfl.record.environment import imported_modules

ModuleSources = dict[str, tuple[Path, bytes]]
"""Where a module's text is, and the text, by the module's name."""

FOREIGN_NAMES = {"fedpfl", *sys.stdlib_module_names}
"""Packages that belong to no plugin, although one may lie in a folder above them."""


def find_local_imports(file: Path, text: bytes) -> ModuleSources:
    """Return the modules below a file's folder that it imports, and these in turn.

    Imports count wherever they stand in a text.
    """
    sources: ModuleSources = {}
    pending = [(text, "")]  # with the package that relative imports start from
    while pending:
        source_text, package = pending.pop()
        for import_name in imported_modules(source_text, package):
            # `a`, `a.b` and `a.b.c` of `a.b.c`: an import runs all three.
            for name in accumulate(import_name.split("."), "{}.{}".format):
                path = None if name in sources else _find_path(name, file.parent.resolve())
                imported_text = read_source(path) if path else None
                if path is None or imported_text is None:
                    continue
                sources[name] = path, imported_text
                # A package is where its own relative imports start from; a module's start from the
                # package that holds it.
                is_package = path.stem == "__init__"
                pending.append((imported_text, name if is_package else name.rpartition(".")[0]))
    return sources


def read_source(path: Path) -> bytes | None:
    """Return a file's text, None where it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


def _find_path(name: str, folder: Path) -> Path | None:
    """Return the file of a module below a plugin's folder; None for any other module."""
    # Without an import: a hook may import a module later.
    parts = name.split(".")
    if parts[0] in FOREIGN_NAMES:
        return None
    for root in sys.path:
        base = Path(root, *parts)
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if path.is_file():
                path = path.resolve()
                is_installed = {"site-packages", "dist-packages"} & {*path.parts}
                return path if path.is_relative_to(folder) and not is_installed else None
    return None
