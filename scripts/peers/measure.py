"""How a peer is installed, and one of its processes measured."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

Lines = list[tuple[float, str]]  # what a process says, with the seconds since its start


class Failed(Exception):
    """What keeps a row from being measured, in one line."""


class Program(NamedTuple):
    """What is started, and how its words are read.

    read: gives seconds a round, accuracy in per cent, and when the first round was done. lines:
    what a user writes.
    """

    command: list[str]
    cwd: Path
    read: Callable[[Lines], tuple[float, float, float]]
    lines: int = 1


def matched(pattern: str, lines: Lines) -> list[str]:
    """Return what a pattern's group is in each line that has it."""
    return [found[1] for _, line in lines if (found := re.search(pattern, line))]


def last(pattern: str, lines: Lines) -> float:
    """Return the last of `matched` as a number. Raises Failed where there is none."""
    found = matched(pattern, lines)
    if not found:
        raise Failed("it did not say what was to be read from it")
    return float(found[-1])


def moments(pattern: str, lines: Lines) -> list[float]:
    """Return when each line was said that has a pattern. Raises Failed where there is none."""
    found = [at for at, line in lines if re.search(pattern, line)]
    if not found:
        raise Failed("it did not say when its first round was done")
    return found


def mean(values: Iterable[str | float]) -> float:
    """Return the mean of numbers as they were said. Raises Failed where there are none."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise Failed("it told of no round")
    return sum(numbers) / len(numbers)


def written(path: Path) -> int:
    """Count the lines of a program that have code, as Python would lay them out: no docstrings or
    comments.
    """
    module = ast.parse(path.read_text())
    for node in ast.walk(module):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return len([line for line in ast.unparse(module).splitlines() if line.strip()])


def installed(home: Path, packages: str) -> None:
    """Make an environment of these packages, once. Raises Failed."""
    made = home / "packages.txt"
    if made.is_file() and made.read_text() == packages:
        return
    print(f"installing into {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    pip = [
        str(home / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    for command in ([sys.executable, "-m", "venv", str(home)], [*pip, *packages.split()]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"cannot be installed: {complaint(done.stderr or done.stdout)}")
    made.write_text(packages)


def complaint(said: str) -> str:
    """Return the last line that tells of an error, else the last line, cut."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|exception", line, re.IGNORECASE)]
    return (errors or lines or ["without a word"])[-1][:200]


def measured(program: Program, environment: dict[str, str], limit: float) -> dict[str, float]:
    """Run a program to its end: what it tells, and the peak of its processes' memory.

    Raises Failed.
    """
    began, lines, peak = time.monotonic(), Lines(), 0.0
    process = subprocess.Popen(
        program.command,
        cwd=program.cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout

    def listen(stream: Iterable[str]) -> None:
        lines.extend((time.monotonic() - began, line.rstrip()) for line in stream)

    ears = threading.Thread(target=listen, args=(process.stdout,), daemon=True)
    ears.start()
    try:
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            if time.monotonic() - began > limit:
                raise Failed(f"was not done after {limit:.0f} s")
            time.sleep(0.3)
    finally:  # what it has started and left running, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    ears.join(5)
    if process.returncode:
        raise Failed(
            f"ended with status {process.returncode}:"
            f" {complaint(chr(10).join(line for _, line in lines))}"
        )
    seconds, accuracy, first = program.read(lines)
    return {"seconds": seconds, "accuracy": accuracy, "first": first, "peak_mib": peak}


def resident(parent: int) -> float:
    """Return the MiB that a process and those it has started hold, what they share divided among
    them (Linux).
    """
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {parent}
    while more := {child for child, its in parents.items() if its in family} - family:
        family |= more
    total = 0
    for member in family:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)))
    return total / 1024
