"""How much memory the machine and its devices have."""

from __future__ import annotations

import math
import os

import torch


def total_memory() -> float:
    """Return the machine's memory in bytes; infinity where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def device_memory(device: torch.device) -> tuple[float, float]:
    """Return the free and the total memory of a device in bytes.

    The host's free memory includes what its caches would give back. Both are infinity where the
    system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":") for line in file)
        available_kib = int(sizes["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return total_memory(), total_memory()
    return 1024 * available_kib, total_memory()
