"""Seal a process: Linux's Landlock lets it write below one folder alone, and use no TCP."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

CREATE_RULES, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls, which have one number on all machines."""
OLDEST_VERSION = 4
"""Of Landlock (Linux 6.7); earlier ones know no TCP."""
SET_NO_NEW_PRIVILEGES = 38
NEW_USER_AND_NETWORK = 0x50000000
WRITE_FILE = 1 << 1 | 1 << 14
WRITE_FOLDER = WRITE_FILE | 0b11_1111_1111 << 4
"""Also to make, move and remove files and folders."""
USE_TCP = 0b11


def is_sealable() -> bool:
    """Ask the system for a Landlock that is new enough."""
    return os.name == "posix" and _call_kernel(CREATE_RULES, None, 0, 1) >= OLDEST_VERSION


def seal_process(folder: Path) -> None:
    """Let this process, and those that it starts, write below a folder alone, for good.

    Threads that run already stay as they are, so this comes before any import of torch.
    """
    ctypes.CDLL(None).unshare(NEW_USER_AND_NETWORK)  # an empty network, where that is allowed
    handled = struct.pack("QQ", WRITE_FOLDER, USE_TCP)
    rules = _call_kernel(CREATE_RULES, handled, len(handled), 0)
    for path, rights in ((folder, WRITE_FOLDER), (Path(os.devnull), WRITE_FILE)):
        rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH))
        _call_kernel(ADD_RULE, rules, 1, rule, 0)
    ctypes.CDLL(None).prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if _call_kernel(RESTRICT_SELF, rules, 0):
        raise OSError("Landlock refuses to seal this process")


def _call_kernel(number: int, *arguments: int | bytes | None) -> int:
    numbers = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *numbers))
