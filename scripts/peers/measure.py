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


class Measurement(NamedTuple):
    """Hold what a program's output says.

    Attributes:
        seconds: of a round.
        accuracy: in percent.
        first: seconds from the start to the end of the first round.
    """

    seconds: float
    accuracy: float
    first: float


class Program(NamedTuple):
    """Say what is started, and how its output is read.

    Attributes:
        command: words.
        cwd: the folder that it is started in.
        read_output: reads what it printed.
        lines: of code that a user writes.
    """

    command: list[str]
    cwd: Path
    read_output: Callable[[Lines], Measurement]
    lines: int = 1


def find_groups(pattern: str, lines: Lines) -> list[str]:
    """Return a pattern's group in each line that has it."""
    matches = [re.search(pattern, line) for _, line in lines]
    return [match[1] for match in matches if match]


def find_last_number(pattern: str, lines: Lines) -> float:
    """Return a pattern's group in the last line that has it. Raises Failed without one."""
    groups = find_groups(pattern, lines)
    if not groups:
        raise Failed("it did not say what was to be read from it")
    return float(groups[-1])


def find_times(pattern: str, lines: Lines) -> list[float]:
    """Return the times of lines that have a pattern. Raises Failed where there is none."""
    times = [seconds for seconds, line in lines if re.search(pattern, line)]
    if not times:
        raise Failed("it did not say when its first round was done")
    return times


def mean(values: Iterable[str | float]) -> float:
    """Return the mean of numbers as they were said. Raises Failed where there are none."""
    numbers = [float(value) for value in values]
    if not numbers:
        raise Failed("it told of no round")
    return sum(numbers) / len(numbers)


def count_code_lines(path: Path) -> int:
    """Count a program's lines as Python lays them out, without docstrings and comments."""
    module = ast.parse(path.read_text())
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return len([line for line in ast.unparse(module).splitlines() if line.strip()])


def find_interpreter(name: str) -> str:
    """Return the path of a Python such as `python3.13`. Raises Failed where none of it starts."""
    path = shutil.which(name)
    # What stands on the PATH may only say which versions there are.
    if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
        return path
    raise Failed(f"it needs {name}, which is not on the PATH")


def install_packages(home: Path, packages: str, interpreter: str = sys.executable) -> None:
    """Make an environment of these packages, once. Raises Failed."""
    packages_file = home / "packages.txt"
    if packages_file.is_file() and packages_file.read_text() == packages:
        return
    print(f"installing into {home}", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", *packages.split()]
    for command in ([interpreter, "-m", "venv", str(home)], pip):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise Failed(f"cannot be installed: {find_error_line(result.stderr or result.stdout)}")
    packages_file.write_text(packages)


def find_error_line(output: str) -> str:
    """Return the last line that tells of an error, else the last line, cut."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|exception", line, re.IGNORECASE)]
    return (errors or lines or ["without a word"])[-1][:200]


def measure_program(
    program: Program, environment: dict[str, str], limit: float
) -> dict[str, float]:
    """Run a program to its end; return what it says and its peak memory.

    Args:
        program: what is run.
        environment: variables beside those of this process.
        limit: seconds that it may take.

    Raises:
        Failed: where it fails, takes too long, or does not say enough.
    """
    # ---- Step 1: start it, in a session of its own.
    start_time = time.monotonic()
    lines = Lines()
    peak = 0.0
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

    # ---- Step 2: read what it prints, and look at its memory meanwhile.
    def read_lines(stream: Iterable[str]) -> None:
        lines.extend((time.monotonic() - start_time, line.rstrip()) for line in stream)

    reader = threading.Thread(target=read_lines, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        while process.poll() is None:
            peak = max(peak, measure_memory(process.pid))
            if time.monotonic() - start_time > limit:
                raise Failed(f"was not done after {limit:.0f} s")
            time.sleep(0.3)
    finally:  # what it has started and left running, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    reader.join(5)
    if process.returncode:
        output = "\n".join(line for _, line in lines)
        raise Failed(f"ended with status {process.returncode}: {find_error_line(output)}")
    return {**program.read_output(lines)._asdict(), "peak_mib": peak}


def measure_memory(root: int) -> float:
    """Return the MiB that a process and those it has started hold (Linux).

    What several share is divided among them.
    """
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {root}
    while new_members := {child for child in parents if parents[child] in family} - family:
        family |= new_members
    total = 0
    for member in family:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE)))
    return total / 1024
