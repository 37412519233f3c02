"""Describe how a run was made: versions, hardware and the source's commit."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

import fedpfl
from fedpfl.ground.records import Record

_METHODS = "fedpfl.methods."


def describe_environment() -> Record:
    """Return versions, hardware and git commit as plain values, without host or user.

    `commit` is that of the checkout that the running source is in, `dirty` is whether its tracked
    files were changed. A value that does not apply is None.
    """
    commit, dirty = _git(Path(fedpfl.__file__).parent)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "fedpfl": fedpfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": ", ".join(gpus) or None,
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "commit": commit,
        "dirty": dirty,
    }


def source_fingerprint(method: type) -> dict[str, str]:
    """Return the version of fedpfl, and a digest of a method's source files.

    They are those of its class and bases, and what these import of fedpfl.methods; other methods
    may change without a trace.
    """
    names = {
        kind.__module__
        for kind in method.__mro__
        if kind.__module__.split(".")[0] not in sys.stdlib_module_names
    }
    waiting = sorted(names)
    codes: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        if name in codes or name not in sys.modules:
            continue
        codes[name] = _code(name)
        waiting += [
            module for module in imported_modules(codes[name]) if module.startswith(_METHODS)
        ]
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(codes):
        # Name and length stand before each file, so that none can run over into the next.
        digest.update(f"{name} {len(codes[name])}\n".encode() + codes[name])
    return {"fedpfl": fedpfl.__version__, "method": digest.hexdigest()}


# All jobs of a sweep run the code that was loaded first, even if the file changes later
@functools.cache
def _code(module: str) -> bytes:
    try:
        return Path(sys.modules[module].__file__ or "").read_bytes()
    except OSError:
        return b""  # an archive of compiled modules


@functools.cache
def imported_modules(code: bytes, package: str = "") -> tuple[str, ...]:
    """Return modules that a file may import: `from a import b` may mean a or a.b.

    Args:
        code: the file's content.
        package: the package that it is part of.
    """
    modules: list[str] = []
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):  # no Python
        return ()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            # One dot is the package itself, two its parent.
            around = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join(filter(None, [*around, node.module]))
            modules += [name for one in node.names for name in (base, f"{base}.{one.name}")]
        elif isinstance(node, ast.Import):
            modules += [one.name for one in node.names]
    return tuple(modules)


def _cpu() -> str | None:
    with contextlib.suppress(OSError):
        if model := re.search(
            r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        ):
            return model[1].strip()
    return platform.processor() or platform.machine() or None


@functools.cache
def _git(package: Path) -> tuple[str | None, bool | None]:
    # An installed package may lie inside someone else's checkout (.venv): only tracked source has a
    # commit.
    if _ask_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    described = _ask_git(package, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")
    if described is None:
        return None, None  # a checkout without a commit yet
    commit, _, changes = described.partition("-")
    return commit, bool(changes)


def _ask_git(folder: Path, *arguments: str) -> str | None:
    # Inside a git hook the variables point at another repository.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # No optional locks: reading the status must not get in the way of the user's own git.
    environ["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-C", str(folder), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5, env=environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
