"""Measure how the code of a room reads: `python scripts/language.py [ROOM ...]`.

Prints one row for the package and one for each room of fedpfl/. `tests/test_language.py` holds the
figures, which may only fall; after they have fallen, `--write` notes the new ones.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fedpfl"
CEILINGS = ROOT / "tests" / "language.json"
LONGEST_LINE = 100
LONGEST_SENTENCE = 15
LONGEST_FUNCTION = 50
MOST_ARGUMENTS = 7

FILLERS = frozenset(
    re.findall(
        r"\w+",
        """
        about added again alike already also answers apart aside asked asks began begun beside
        called chosen clipped come comes completed contained counted dealt done drawn each end
        ended ends every extended few finds fine finished first foreseen found gathered gave
        given gives goes gone got grown held here how introduced joined judged kept known knows
        laid last least left listed looked made many marks masked meant measured mended met
        misplaced mixed more most moved moving named now numbered once opened other others over
        own packed padded parked parted place placed places plain put reached read reading real
        recorded resolved rest said same says seen sent shown spaced spent spread stepped swept
        taken takes tells there told unmet unpacked unseen used wanted watched way what where
        who whole why words written
        """,
    )
)
"""Participles, pronouns, determiners and adverbs, which name nothing when they stand alone."""


@dataclass
class Figures:
    """Figures of a room.

    Attributes:
        filler_names: Share of variables, arguments and attributes named by a filler, in percent.
        filler_definitions: The same of functions and classes.
        one_word_functions: Share of functions whose name is one word, in percent.
        shared_names: Module-level names that stand in three files or more.
        nodes_per_line: Syntax nodes per line of code.
        wide_lines: Share of code lines over 100 characters, in percent.
        comment_lines: Share of lines that are comments, in percent; the one figure to rise.
        wide_signatures: Functions of more than seven arguments.
        long_functions: Functions of more than 50 lines beside their docstring.
        starred_names: Local names that are starred into a call.
        long_sentences: Docstrings whose first sentence has more than 15 words.
    """

    filler_names: float
    filler_definitions: float
    one_word_functions: float
    shared_names: int
    nodes_per_line: float
    wide_lines: float
    comment_lines: float
    wide_signatures: int
    long_functions: int
    starred_names: int
    long_sentences: int


def measure_files(paths: Iterable[Path]) -> Figures:
    """Measure the code of some files."""
    counts: Counter[str] = Counter()
    files_of_names: Counter[str] = Counter()
    for path in paths:
        file_counts, defined_names = _count_file(path)
        counts.update(file_counts)
        files_of_names.update(defined_names)
    return Figures(
        filler_names=_percent(counts["filler names"], counts["names"]),
        filler_definitions=_percent(counts["filler definitions"], counts["definitions"]),
        one_word_functions=_percent(counts["one-word functions"], counts["functions"]),
        shared_names=sum(files >= 3 for files in files_of_names.values()),
        nodes_per_line=round(counts["nodes"] / max(1, counts["code lines"]), 2),
        wide_lines=_percent(counts["wide lines"], counts["code lines"]),
        comment_lines=_percent(counts["comment lines"], counts["lines"]),
        wide_signatures=counts["wide signatures"],
        long_functions=counts["long functions"],
        starred_names=counts["starred names"],
        long_sentences=counts["long sentences"],
    )


@functools.cache
def _count_file(path: Path) -> tuple[Counter[str], frozenset[str]]:
    """Count what a file has, once: the package has each file that a room has.

    Returns:
        The counts, and the names of the file's functions and classes.
    """
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    kinds, documented = list[str](), set[int]()
    for node in ast.walk(module):
        kinds.append("nodes")
        if isinstance(node, _BINDINGS):
            kinds.extend(_count_names(node))
        elif isinstance(node, _DOCUMENTED):
            kinds.extend(_count_definition(node))
            documented.update(_docstring_lines(node))
    kinds.extend(_count_lines(source, documented))
    return Counter(kinds), _module_names(module)


_BINDINGS = (ast.arg, ast.Name, ast.Attribute, ast.Call)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _module_names(module: ast.Module) -> frozenset[str]:
    """Return the names of a file's functions and classes."""
    definitions = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "main"
    ]
    return frozenset(node.name.strip("_") for node in definitions)


def _percent(part: int, total: int) -> float:
    return round(100 * part / max(1, total), 2)


def _count_names(node: ast.AST) -> Iterator[str]:
    """Yield what a binding of a name counts as, and a star in a call."""
    name = None
    if isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
        name = node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = node.attr
    if name is not None:
        yield "names"
        if name.strip("_") in FILLERS:
            yield "filler names"
    if isinstance(node, ast.Call):
        for argument in node.args:
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
                yield "starred names"


def _count_definition(node: ast.AST) -> Iterator[str]:
    """Yield what a function or a class counts as."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    yield "definitions"
    if node.name.strip("_") in FILLERS:
        yield "filler definitions"
    docstring = ast.get_docstring(node)
    if docstring:
        first_sentence = re.split(r"(?<=[.:])\s", docstring.strip(), maxsplit=1)[0]
        if len(first_sentence.split()) > LONGEST_SENTENCE:
            yield "long sentences"
    if isinstance(node, ast.ClassDef) or node.name.startswith("__"):
        return
    yield "functions"
    if "_" not in node.name.strip("_"):
        yield "one-word functions"
    signature = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if len([one for one in signature if one.arg not in ("self", "cls")]) > MOST_ARGUMENTS:
        yield "wide signatures"
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length - len(_docstring_lines(node)) > LONGEST_FUNCTION:
        yield "long functions"


def _count_lines(source: str, documented: set[int]) -> Iterator[str]:
    """Yield what each line counts as."""
    for number, line in enumerate(source.splitlines(), 1):
        yield "lines"
        if line.strip().startswith("#"):
            yield "comment lines"
        elif line.strip() and number not in documented:
            yield "code lines"
            if len(line) > LONGEST_LINE:
                yield "wide lines"


def _docstring_lines(node: ast.AST) -> set[int]:
    """Return the lines that a definition's docstring covers."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        return set()
    if not node.body or ast.get_docstring(node) is None:
        return set()
    docstring = node.body[0]
    return set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))


def measure_rooms() -> dict[str, Figures]:
    """Measure the package, "fedpfl", and each of its rooms; "commands" are its own modules."""
    files_by_room: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts[0] == "conf":
            continue
        files_by_room["fedpfl"].append(path)
        files_by_room[parts[0] if len(parts) > 1 else "commands"].append(path)
    return {room: measure_files(paths) for room, paths in files_by_room.items()}


def _lower_ceilings(figures: dict[str, Figures]) -> None:
    """Write the ceilings, none above what it was; of comments the least, none below."""
    old_ceilings = json.loads(CEILINGS.read_text())
    ceilings = {room: asdict(figures[room]) for room in sorted(figures)}
    for room, ceiling in ceilings.items():
        for name, old_value in old_ceilings.get(room, {}).items():
            strictest = max if name == "comment_lines" else min
            ceiling[name] = strictest(ceiling[name], old_value)
    CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Print the figures, or note them as ceilings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", help="the rooms to print; all unless said")
    parser.add_argument(
        "--write", action="store_true", help=f"lower those in {CEILINGS.relative_to(ROOT)}"
    )
    options = parser.parse_args(arguments)
    figures = measure_rooms()
    if options.write:
        _lower_ceilings(figures)
    for room in options.rooms or figures:
        print(
            f"{room}: {', '.join(f'{key} {value}' for key, value in asdict(figures[room]).items())}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
