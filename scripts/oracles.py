"""Compare methods with public code, and make docs/oracles.md from the results.

    python scripts/oracles.py [METHOD ...] [--engine batched]   # clones the peers, and plays them
    python scripts/oracles.py --checkouts DIR                   # has git repositories as OWNER/NAME

Each peer's own classes play some rounds of a tiny federation (scripts/outside/problem.py) beside
fedpfl: the same samples, minibatches and initial parameters. Peers' code is cloned from GitHub at
pinned commits into outputs/oracles/, without its data; none of it is part of this project. A
comparison is a process, as drivers change what they import; one that cannot be played is a row that
says why. Rows are kept in docs/results/oracles.csv, of which the page is made.
"""

from __future__ import annotations

import argparse
import csv
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
RESULTS = ROOT / "docs" / "results" / "oracles.csv"
WORK = ROOT / "outputs" / "oracles"
DRIVERS = (
    "with_pfllib",
    "with_htfllib",
    "with_flbench",
    "with_fling",
    "with_authors",
    "with_submodels",
    "with_statistics",
    "with_adapters",
)
LARGEST_ROUNDING = 2e-6
"""Differences up to this are of the order in which float32 numbers are added."""
FAILURE = "not played"
ENGINES = ("loop", "batched")
COLUMNS = ("method", "setting", "repository", "commit", "undone", *ENGINES)
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


def measure_difference(comparison: Comparison, engine: str) -> str:
    """Return the largest difference, or why there is none, from a process of its own."""
    number = list_comparisons().index(comparison)
    # A fork has torch and fedpfl already; what a peer's driver changes in them ends with it.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return str(pool.apply(play_comparison, (number, engine)))
        except Exception as error:  # a peer may fail in any way
            lines = str(error).splitlines() or [type(error).__name__]
            return f"{FAILURE}: {lines[0][:100]}"


def run_comparisons(comparisons: Sequence[Comparison], engine: str, checkouts: Path | None) -> None:
    """Play comparisons; print each when it is over, and keep its row."""
    failures: dict[str, str] = {}
    for repository in sorted({comparison.repository for comparison in comparisons}):
        try:
            bring_checkout(repository, checkouts, WORK)
        except BringingError as error:
            failures[repository] = f"{FAILURE}: {error}"
    for comparison in comparisons:
        result = failures.get(comparison.repository) or measure_difference(comparison, engine)
        print(comparison.name, format_result(result), sep=" | ", flush=True)
        keep_result(comparison, engine, result)


def keep_result(comparison: Comparison, engine: str, result: str) -> None:
    """Put a result into the file of results, in whose order comparisons are listed."""
    rows = {}
    for row in read_results():
        rows[(row["method"], row["setting"], row["repository"])] = row
    key = (comparison.method, comparison.detail, comparison.repository)
    row = rows.setdefault(key, dict.fromkeys(COLUMNS, ""))
    row.update(zip(COLUMNS[:3], key, strict=True))
    row.update({"commit": COMMITS[comparison.repository], "undone": comparison.undone})
    # What cannot be played here may have been elsewhere.
    if not (row[engine] and result.startswith(FAILURE)):
        row[engine] = result
    order = [(one.method, one.detail, one.repository) for one in list_comparisons()]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in order if key in rows)


def read_results() -> list[dict[str, str]]:
    """Return the rows of results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def format_result(result: str) -> str:
    """Return a difference in one digit, marked where it is more than rounding."""
    try:
        difference = float(result)
    except ValueError:
        return result
    if not difference:
        return "0"
    return f"{difference:.0e}" if difference <= LARGEST_ROUNDING else f"**{difference:.0e}**"


def make_table() -> str:
    """Return a table with a row for each peer: methods, and the largest difference."""
    table = []
    for repository, commit in COMMITS.items():
        rows = [row for row in read_results() if row["repository"] == repository]
        differences = [
            float(row[engine]) for row in rows for engine in ENGINES if row[engine][:1].isdigit()
        ]
        link = f"[{repository}](https://github.com/{repository}/tree/{commit})"
        methods = ", ".join(dict.fromkeys(row["method"] for row in rows))
        largest = format_result(str(max(differences))) if differences else ""
        table.append((link, methods, largest))
    return markdown(("public code, at its commit", "methods", "largest difference"), table)


def write_page() -> None:
    """Put the table between its marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{make_table()}\n\n{END}{after}")


def main() -> None:
    """Play what the command line asks for, and make the page anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", help="all by default")
    parser.add_argument("--checkouts", type=Path, help="git repositories as OWNER/NAME")
    parser.add_argument("--engine", default="loop", choices=ENGINES)
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    parser.add_argument("--list", action="store_true", help="name the comparisons, and end")
    arguments = parser.parse_args()
    comparisons = choose_comparisons(arguments.methods)
    if arguments.list:
        print("\n".join(comparison.name for comparison in comparisons))
        return
    if not arguments.page:
        run_comparisons(comparisons, arguments.engine, arguments.checkouts)
    write_page()


if __name__ == "__main__":
    main()
