"""Who runs Python while several threads train small networks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_STEP = 1e-3
"""Seconds of a step up to which threads take turns."""


class Turn:
    """Let one thread at a time run Python, while the others run scripts.

    Each operation of PyTorch gives the interpreter's lock away and asks for it again. Where
    operations are short, threads that contend for it so are slower than one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._shortest_step = math.inf

    def note_step(self, seconds: float) -> None:
        """Note how long a step of a script took."""
        self._shortest_step = min(self._shortest_step, seconds)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait for the turn, unless steps are long."""
        if self._shortest_step > LONGEST_STEP:
            yield
            return
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    @contextmanager
    def give_away(self) -> Iterator[None]:
        """Let another thread have the turn meanwhile, if this one has it."""
        if self._holder != threading.get_ident():
            yield
            return
        self._holder = None
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._holder = threading.get_ident()
