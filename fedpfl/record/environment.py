"""With what a run was made: versions, hardware and the source's commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fedpfl


def describe() -> dict[str, Any]:
    """Versions, hardware and git commit as plain values; what does not apply is None. Names neither host nor user.

    commit, dirty: of the checkout the running source is in, and whether its tracked files were changed.
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
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "commit": commit,
        "dirty": dirty,
    }


def _cpu() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or None


def _git(package: Path) -> tuple[str | None, bool | None]:
    # An installed package may lie inside someone else's checkout (.venv): only tracked source has a commit.
    if _ask_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _ask_git(package, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None, None  # a checkout without a commit yet
    changes = _ask_git(package, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _ask_git(folder: Path, *arguments: str) -> str | None:
    # Inside a git hook the variables point at another repository.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    # No optional locks: reading the status must not get in the way of the user's own git.
    environ["GIT_OPTIONAL_LOCKS"] = "0"
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, env=environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
