"""What this machine's memory can hold."""

from __future__ import annotations

import math
import os

import torch


def total_memory() -> float:
    """Return the machine's memory in bytes; infinity where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def device_memory(device: torch.device) -> tuple[float, float]:
    """Return the free and the whole memory of a device in bytes; the host's free one with what its
    caches would give.

    Infinity where the system does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":") for line in file)
        return 1024 * int(sizes["MemAvailable"].split()[0]), total_memory()
    except (OSError, KeyError, ValueError):
        return total_memory(), total_memory()


def require_memory(size: int, what: str) -> None:
    """Raise MemoryError if `what` would take `size` bytes and the machine has fewer."""
    if size > total_memory():
        raise MemoryError(
            f"{what} would take {size / 2**30:,.1f} GiB, this machine has {total_memory() / 2**30:,.1f} GiB"
        )
