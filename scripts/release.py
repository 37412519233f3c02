"""Build a release and try it: `python scripts/release.py 0.3.0`, or `--try` for this version.

Writes the version, builds the source archive and the wheel into dist/, installs the wheel into an
empty environment and trains the demo from it. With a version it then commits and tags.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONED = {
    "fedpfl/__init__.py": r'(?<=^__version__ = ")[^"]+',
    "CITATION.cff": r"(?<=^version: ).+",
}
"""The files that hold the version, and where in them."""


class ReleaseError(Exception):
    """Say in one line what keeps the release from being made."""


def read_version(root: Path = ROOT) -> str:
    """Return the version of a checkout."""
    (version,) = {
        re.search(pattern, (root / name).read_text(), re.MULTILINE).group()
        for name, pattern in VERSIONED.items()
    }
    return version


def require_ready(version: str, changelog: str, changes: str) -> None:
    """Refuse a version that cannot be released.

    Args:
        version: of the release.
        changelog: the text of CHANGELOG.md.
        changes: what `git status --porcelain` prints.

    Raises:
        ReleaseError: in one line.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"a version is three numbers, such as 0.3.0; got {version!r}")
    if f"## {version}" not in changelog.splitlines():
        raise ReleaseError(f"CHANGELOG.md has no section `## {version}`; write it first")
    if changes.strip():
        raise ReleaseError("the checkout has changes; commit them first")


def write_version(version: str, root: Path = ROOT) -> None:
    """Write the version into each file that holds it."""
    for name, pattern in VERSIONED.items():
        text = (root / name).read_text()
        (root / name).write_text(re.sub(pattern, version, text, count=1, flags=re.MULTILINE))


def run_program(*line: object, folder: Path = ROOT) -> str:
    """Run a program outside of this environment's variables; return what it prints.

    Raises:
        ReleaseError: where it fails.
    """
    leading = ("PYTHON", "FEDPFL", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(leading)}
    arguments = [str(part) for part in line]
    print("$", " ".join(arguments), flush=True)
    done = subprocess.run(
        arguments, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise ReleaseError(f"{arguments[0]} ended with status {done.returncode}\n{done.stdout}")
    return done.stdout


def build_archives(folder: Path) -> list[Path]:
    """Build the source archive, and the wheel from it, in an environment of their own.

    Args:
        folder: scratch.

    Returns:
        The files in dist/.
    """
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    python = make_environment(folder / "builder")
    run_program(python, "-m", "pip", "install", "--quiet", "build")
    run_program(python, "-m", "build", "--outdir", ROOT / "dist", ROOT)
    archives = sorted((ROOT / "dist").iterdir())
    if find_spec("twine"):
        run_program(sys.executable, "-m", "twine", "check", "--strict", *archives)
    else:
        print("twine is absent: how the archives describe themselves was not checked")
    return archives


def make_environment(folder: Path) -> Path:
    """Make an empty environment; return its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin/python"


def try_wheel(wheel: Path, version: str, folder: Path) -> None:
    """Install a wheel into an empty environment, and train the demo from it.

    Raises:
        ReleaseError: where it says another version, or fails.
    """
    python = make_environment(folder / "empty")
    scratch = folder / "scratch"
    scratch.mkdir()
    constraints = ROOT / "constraints.txt"
    run_program(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel)
    program = python.with_name("fedpfl")
    shown = run_program(program, "--version", folder=scratch).strip()
    if shown != f"fedpfl {version}":
        raise ReleaseError(f"the wheel says {shown!r}, and should say fedpfl {version}")
    print(run_program(program, "train", "experiment=demo", folder=scratch))


def main(arguments: list[str]) -> int:
    """Release, or try to; return the exit status."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        is_trial = arguments[0] == "--try"
        version = read_version() if is_trial else arguments[0]
        if not is_trial:
            changes = run_program("git", "status", "--porcelain")
            require_ready(version, (ROOT / "CHANGELOG.md").read_text(), changes)
            write_version(version)
        with tempfile.TemporaryDirectory() as scratch:
            archives = build_archives(Path(scratch))
            (wheel,) = (path for path in archives if path.suffix == ".whl")
            try_wheel(wheel, version, Path(scratch))
        if not is_trial:
            if run_program("git", "status", "--porcelain", "--untracked-files=no").strip():
                run_program("git", "commit", "--quiet", "--all", "--message", f"Version {version}")
            run_program("git", "tag", f"v{version}")
        print(f"{version} is built and tried:", *archives, sep="\n  ")
        if not is_trial:
            print(f"To publish it: git push origin HEAD v{version}")
        return 0
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
