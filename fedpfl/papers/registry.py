"""The papers, by folder: each has `tables.py` with TABLES, and FIGURES there or in `figures.py`.

A table and a figure go by `paper/name`, such as `fedobp/table3`; where no other paper has the name,
by it alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec
from typing import Any

import fedpfl.papers
from fedpfl.ground.errors import FedpflError
from fedpfl.papers.drawing import Figure
from fedpfl.papers.layout import Layout, Listing

PAPERS = [module.name for module in pkgutil.iter_modules(fedpfl.papers.__path__) if module.ispkg]


def _all(kind: str) -> dict[str, Any]:
    """What the papers' modules call so, by `paper/key`."""
    found: dict[str, Any] = {}
    for paper in PAPERS:
        for module in filter(
            find_spec, (f"fedpfl.papers.{paper}.tables", f"fedpfl.papers.{paper}.figures")
        ):
            of_paper = getattr(importlib.import_module(module), kind, {})
            found |= {f"{paper}/{key}": value for key, value in of_paper.items()}
    return found


TABLES: dict[str, Layout | Listing] = _all("TABLES")
FIGURES: dict[str, Figure] = _all("FIGURES")
NAMES = (*TABLES, *FIGURES)


def datasets(paper: str = "") -> set[str]:
    """Return the data sets of a paper's tables, or of all."""
    layouts = [
        layout for name, layout in TABLES.items() if name.startswith(f"{paper}/" if paper else "")
    ]
    return {
        place.dataset
        for layout in layouts
        if isinstance(layout, Layout)
        for place in layout.places
        if place.dataset
    }


def full(word: str) -> str:
    """Return `paper/name` of a table or a figure; empty for a word that names none. Raises
    FedpflError for several.
    """
    found = [name for name in NAMES if word in (name, name.partition("/")[2])]
    if len(found) > 1:
        raise FedpflError(f"{word} is in several papers; name one of {', '.join(found)}")
    return found[0] if found else ""
