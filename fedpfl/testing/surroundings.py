"""What differs from machine to machine around a reader or a partition, for trials of both."""

from __future__ import annotations

import locale
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


class _Listing:
    """The entries of a folder in another order, as os.scandir gives them."""

    def __init__(self, entries: list[Any]):
        self._entries = iter(entries)

    def __iter__(self) -> _Listing:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        """Do nothing: the folder is read already."""


@contextmanager
def other_folder() -> Iterator[None]:
    """Work in an empty folder."""
    original_folder = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(original_folder)


@contextmanager
def other_listing() -> Iterator[None]:
    """List folders in reverse: file systems differ in their order, and promise none."""
    listdir = os.listdir
    scandir = os.scandir

    def listdir_reversed(path: Any = None) -> list[Any]:
        return listdir(path)[::-1]

    def scandir_reversed(path: Any = None) -> _Listing:
        with scandir(path) as entries:
            return _Listing(list(entries)[::-1])

    os.listdir = listdir_reversed
    os.scandir = scandir_reversed  # type: ignore[assignment]
    try:
        yield
    finally:
        os.listdir, os.scandir = listdir, scandir


@contextmanager
def other_locale() -> Iterator[None]:
    """Have the plain locale, in which text files are ASCII unless `open` is told otherwise."""
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C")
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@contextmanager
def other_threads() -> Iterator[None]:
    """Compute on another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "in another working directory": other_folder,
    "with folders listed in another order": other_listing,
    "in another locale": other_locale,
    "on more threads": other_threads,
}


def find_influence(compare: Callable[[], str]) -> str:
    """Return which surroundings change an answer, and how; "" if none does.

    Args:
        compare: answers anew, and says what differs from the usual answer.
    """
    # ---- All at once first, as an answer may take long.
    with ExitStack() as stack:
        for change in SURROUNDINGS.values():
            stack.enter_context(change())
        together = compare()
    if not together:
        return ""
    for title, change in SURROUNDINGS.items():
        with change():
            difference = compare()
        if difference:
            return f"{title}: {difference}"
    return f"in other surroundings: {together}"
