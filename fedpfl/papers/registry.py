"""Find the papers, by folder: each has `tables.py` with TABLES, and FIGURES there or in `figures.py`.

A table and a figure go by `paper/name`, such as `fedobp/table3`; where no other paper has the name,
by it alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.util import find_spec

import fedpfl.papers
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.papers.drawing import Figure
from fedpfl.papers.layout import Layout, Listing

PAPERS = [module.name for module in pkgutil.iter_modules(fedpfl.papers.__path__) if module.ispkg]


def _collect_from_papers(attribute: str) -> Record:
    """Return the entries of all papers' TABLES or FIGURES, by `paper/name`."""
    entries: Record = {}
    for paper in PAPERS:
        for module_name in (f"fedpfl.papers.{paper}.tables", f"fedpfl.papers.{paper}.figures"):
            if find_spec(module_name) is None:
                continue
            module = importlib.import_module(module_name)
            for name, entry in getattr(module, attribute, {}).items():
                entries[f"{paper}/{name}"] = entry
    return entries


TABLES: dict[str, Layout | Listing] = _collect_from_papers("TABLES")
FIGURES: dict[str, Figure] = _collect_from_papers("FIGURES")
NAMES = (*TABLES, *FIGURES)


def paper_datasets(paper: str = "") -> set[str]:
    """Return the data sets of a paper's tables, or of all papers'."""
    prefix = f"{paper}/" if paper else ""
    return {
        column.dataset
        for name, table in TABLES.items()
        if name.startswith(prefix) and isinstance(table, Layout)
        for column in table.columns
        if column.dataset
    }


def find_full_name(word: str) -> str:
    """Return `paper/name` of a table or a figure, "" for a word that names none.

    Raises:
        FedpflError: if several papers have the name.
    """
    full_names = [name for name in NAMES if word in (name, name.partition("/")[2])]
    if len(full_names) > 1:
        raise FedpflError(f"{word} is in several papers; name one of {', '.join(full_names)}")
    return full_names[0] if full_names else ""
