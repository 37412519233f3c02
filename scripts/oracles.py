"""Hold methods beside the public code of others, and make docs/oracles.md from what was found.

    python scripts/oracles.py [METHOD ...] [--checkouts FOLDER] [--engine batched] [--write]

Each peer's own classes play some rounds of a tiny federation (scripts/outside/problem.py) beside
fedpfl: the same samples, minibatches and initial parameters. Peers' code is cloned from GitHub at
pinned commits into outputs/oracles/, or from FOLDER/OWNER/NAME without a network; none of it is part
of this project. A comparison is a process, as peers patch what they import; a peer whose packages
are missing is a row that says so. `--write` puts all rows into the page.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outside.peers import COMMITS, BringingError, Comparison, bring_checkout
from outside.problem import Problem, find_largest_difference
from reproduction import markdown

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "oracles.md"
WORK = ROOT / "outputs" / "oracles"
DRIVERS = ("with_pfllib", "with_flbench", "with_fling", "with_authors")
LARGEST_ROUNDING = 2e-6
"""Differences up to this are of the order in which float32 numbers are added."""
TITLES = ("method", "setting", "repository", "commit", "undone", "largest difference", "verdict")
BEGIN, END = "<!-- made by scripts/oracles.py -->", "<!-- to here -->"


@functools.cache
def list_comparisons() -> list[Comparison]:
    """Return all comparisons, by method."""
    comparisons: list[Comparison] = []
    for driver in DRIVERS:
        comparisons += importlib.import_module(f"outside.{driver}").list_comparisons()
    return sorted(comparisons, key=lambda one: (one.method, one.repository.lower()))


def choose_comparisons(methods: Sequence[str]) -> list[Comparison]:
    """Return the comparisons of these methods, or all. Ends the program at a wrong name."""
    comparisons = list_comparisons()
    names = {comparison.method for comparison in comparisons}
    wrong = sorted(set(methods) - names)
    if wrong:
        sys.exit(
            f"oracles: no comparison of {', '.join(wrong)}; there are {', '.join(sorted(names))}"
        )
    return [comparison for comparison in comparisons if comparison.method in (methods or names)]


def play_comparison(number: int, engine: str) -> float:
    """Return the largest difference between fedpfl and the peer in one of all comparisons."""
    comparison = list_comparisons()[number]
    with tempfile.TemporaryDirectory() as folder:
        problem = Problem(Path(folder), engine)
        pair = comparison.play(WORK / comparison.repository, problem)
        return find_largest_difference(*pair)


def judge_comparison(comparison: Comparison, engine: str) -> tuple[str, str]:
    """Return the largest difference and the verdict, from a process of its own."""
    number = list_comparisons().index(comparison)
    # A fork has torch and fedpfl already; what a peer's driver changes in them ends with it.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            difference = pool.apply(play_comparison, (number, engine))
        except Exception as error:  # a peer may fail in any way
            lines = str(error).splitlines() or [type(error).__name__]
            return "", f"not played: {lines[0][:120]}"
    return f"{difference:.0e}", "agrees" if difference <= LARGEST_ROUNDING else "**differs**"


def run_all(comparisons: Sequence[Comparison], engine: str, checkouts: Path | None) -> str:
    """Print a row for each comparison as it comes, and return them as a table."""
    failures: dict[str, str] = {}
    for repository in sorted({comparison.repository for comparison in comparisons}):
        try:
            bring_checkout(repository, checkouts, WORK)
        except BringingError as error:
            failures[repository] = f"not played: {error}"
    rows = []
    for comparison in comparisons:
        result = ("", failures.get(comparison.repository, ""))
        if comparison.repository not in failures:
            result = judge_comparison(comparison, engine)
        print(comparison.name, *result, sep=" | ", flush=True)
        link = f"[{comparison.repository}](https://github.com/{comparison.repository})"
        what = (f"`{comparison.method}`", comparison.detail, link)
        commit = COMMITS[comparison.repository][:8]
        rows.append((*what, commit, comparison.undone, *result))
    return markdown(TITLES, rows)


def write_page(table: str) -> None:
    """Put the table between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", help="all by default")
    parser.add_argument("--checkouts", type=Path, help="git repositories as OWNER/NAME")
    parser.add_argument("--engine", default="loop", choices=("loop", "batched"))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="name the comparisons")
    arguments = parser.parse_args()
    comparisons = choose_comparisons(arguments.methods)
    if arguments.list:
        print("\n".join(comparison.name for comparison in comparisons))
    else:
        table = run_all(comparisons, arguments.engine, arguments.checkouts)
        if arguments.write:
            write_page(table)


if __name__ == "__main__":
    main()
