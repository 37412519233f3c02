"""What this machine's memory can hold."""

from __future__ import annotations

import math
import os


def total() -> float:
    """Return the machine's memory in bytes; infinity where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def check(size: int, what: str) -> None:
    """Raise MemoryError if `what` would take `size` bytes and the machine has fewer."""
    if size > total():
        raise MemoryError(f"{what} would take {size / 2**30:,.1f} GiB, this machine has {total() / 2**30:,.1f} GiB")
