"""Measure how the code of a room reads and what it weighs: `python scripts/language.py [ROOM ...]`.

Prints one row for the package and one for each room of fedpfl/. `tests/test_language.py` compares
the figures with their ceilings, which may only fall; after figures have fallen, `--write` lowers the
ceilings. `--where FIGURE` lists the words behind a figure, with file and line.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

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

PHRASE = re.compile(
    r"\b(nobody|somebody|anybody|whoever|whatever|otherwise|others|another one|be it|of its own"
    r"|of theirs|as of|is none|are none|of ours|at once|that there (?:is|are)"
    r"|what (?:it|they|a|an|the|was|is|are)|by which|of which|in whose|whose)\b",
    re.IGNORECASE,
)
"""Pronoun phrases, which make a reader look for what they stand for."""

OPENING = re.compile(
    r"(Return|Give|Hold|Say|Tell|Yield|Keep|Show|Find)\w* (what|which|who|how|whether|whose)\b"
)
"""A docstring that begins with a question instead of an object."""


class Sighting(NamedTuple):
    """Something that counts, the line where it stands, and its words."""

    kind: str
    line: int = 0
    words: str = ""


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
        long_sentences: Docstrings with a first sentence of more than 15 words.
        phrases: Pronoun phrases per 1,000 words of docstrings and comments.
        openings: Share of docstrings that begin "Return what", in percent.
        code_lines: Lines without blanks, comments and docstrings.
        nodes: Syntax nodes.
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
    phrases: float
    openings: float
    code_lines: int
    nodes: int


KINDS = {
    "filler_names": "filler names",
    "filler_definitions": "filler definitions",
    "one_word_functions": "one-word functions",
    "wide_lines": "wide lines",
    "wide_signatures": "wide signatures",
    "long_functions": "long functions",
    "starred_names": "starred names",
    "long_sentences": "long sentences",
    "phrases": "phrases",
    "openings": "openings",
}
"""Figures with words that can be shown, and the kind of sighting that each counts."""


def measure_files(paths: Iterable[Path]) -> Figures:
    """Measure the code of some files."""
    counts: Counter[str] = Counter()
    files_of_names: Counter[str] = Counter()
    for path in paths:
        sightings, defined_names = _read_file(path)
        counts.update(sighting.kind for sighting in sightings)
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
        phrases=round(1000 * counts["phrases"] / max(1, counts["words"]), 2),
        openings=_percent(counts["openings"], counts["docstrings"]),
        code_lines=counts["code lines"],
        nodes=counts["nodes"],
    )


@functools.cache
def _read_file(path: Path) -> tuple[list[Sighting], frozenset[str]]:
    """Read a file once: the package and its room both count it.

    Returns:
        All that counts, and the names of the file's functions and classes.
    """
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    sightings, documented = list[Sighting](), set[int]()
    for node in ast.walk(module):
        sightings.append(Sighting("nodes"))
        if isinstance(node, _BINDINGS):
            sightings.extend(_see_names(node))
        elif _is_text(node):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, _DOCUMENTED):
            sightings.extend(_see_definition(node))
    sightings.extend(_see_lines(source, documented))
    return sightings, _module_names(module)


def _is_text(node: ast.AST) -> bool:
    """Return whether a statement is a docstring, of a definition or an attribute."""
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


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


def _see_names(node: ast.AST) -> Iterator[Sighting]:
    """Yield a binding of a name, and a star in a call."""
    name = None
    if isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
        name = node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name = node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        name = node.attr
    if name is not None:
        yield Sighting("names")
        if name.strip("_") in FILLERS:
            yield Sighting("filler names", node.lineno, name)
    if isinstance(node, ast.Call):
        for argument in node.args:
            if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name):
                yield Sighting("starred names", node.lineno, argument.value.id)


def _see_definition(node: ast.AST) -> Iterator[Sighting]:
    """Yield what counts of a module, a function or a class."""
    line = getattr(node, "lineno", 1)
    docstring = ast.get_docstring(node)
    if docstring:
        yield Sighting("docstrings")
        yield from _see_words(docstring, line)
        opening = OPENING.match(docstring)
        if opening:
            yield Sighting("openings", line, opening[0])
    if isinstance(node, ast.Module):
        return
    yield Sighting("definitions")
    if node.name.strip("_") in FILLERS:
        yield Sighting("filler definitions", line, node.name)
    if docstring:
        first_sentence = re.split(r"(?<=[.:])\s", docstring.strip(), maxsplit=1)[0]
        if len(first_sentence.split()) > LONGEST_SENTENCE:
            yield Sighting("long sentences", line, first_sentence)
    if isinstance(node, ast.ClassDef) or node.name.startswith("__"):
        return
    yield Sighting("functions")
    if "_" not in node.name.strip("_"):
        yield Sighting("one-word functions", line, node.name)
    signature = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if len([one for one in signature if one.arg not in ("self", "cls")]) > MOST_ARGUMENTS:
        yield Sighting("wide signatures", line, node.name)
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if length - len(_docstring_lines(node)) > LONGEST_FUNCTION:
        yield Sighting("long functions", line, node.name)


def _see_words(text: str, line: int) -> Iterator[Sighting]:
    """Yield the words of a docstring or comment, and the phrases among them."""
    for _ in text.split():
        yield Sighting("words")
    for phrase in PHRASE.finditer(text):
        yield Sighting("phrases", line, phrase[0])


def _see_lines(source: str, documented: set[int]) -> Iterator[Sighting]:
    """Yield the lines of a file by kind, and the words of its comments."""
    lines = source.splitlines()
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _see_words(token.string.lstrip("# "), token.start[0])
            if lines[token.start[0] - 1].strip().startswith("#"):
                yield Sighting("comment lines")
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for number in range(1, len(lines) + 1):
        yield Sighting("lines")
        if number in code - documented:
            yield Sighting("code lines")
            if len(lines[number - 1]) > LONGEST_LINE:
                yield Sighting("wide lines", number, lines[number - 1].strip())


_LAYOUT = (
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _docstring_lines(node: ast.AST) -> set[int]:
    """Return the lines that a definition's docstring covers."""
    if not node.body or ast.get_docstring(node) is None:
        return set()
    docstring = node.body[0]
    return set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))


def list_files() -> dict[str, list[Path]]:
    """Return the files of the package, "fedpfl", and of each room; "commands" are modules."""
    files_by_room: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if parts[0] == "conf":
            continue
        files_by_room["fedpfl"].append(path)
        files_by_room[parts[0] if len(parts) > 1 else "commands"].append(path)
    return files_by_room


def measure_rooms() -> dict[str, Figures]:
    """Measure the package and each of its rooms."""
    return {room: measure_files(paths) for room, paths in list_files().items()}


def show_where(room: str, figure: str) -> list[str]:
    """Return lines with what stands behind a room's figure, "FILE:LINE: WORDS" where it has words.

    Of lines and nodes, the files that have grown since the ceilings were written.
    """
    shown = []
    for path in list_files()[room]:
        for sighting in _read_file(path)[0]:
            if sighting.kind == KINDS.get(figure):
                shown.append(f"{path.relative_to(ROOT)}:{sighting.line}: {sighting.words}")
    if figure not in KINDS:
        folder = "fedpfl" if room in ("fedpfl", "commands") else f"fedpfl/{room}"
        shown += _list_grown_files(folder)
    return shown


def _list_grown_files(folder: str) -> list[str]:
    """Return the files with more lines than when the ceilings were last written."""
    written = _ask_git("log", "-1", "--format=%h", "--", str(CEILINGS)).strip()
    grown = []
    for row in _ask_git("diff", "--numstat", written, "--", folder).splitlines():
        added, removed, path = row.split("\t", 2)
        if added.isdigit() and int(added) > int(removed):
            grown.append(f"{path}: {int(added) - int(removed)} lines more than at {written}")
    return grown


def _ask_git(*words: str) -> str:
    """Return what git prints; nothing without git or a repository."""
    try:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return ""


def _lower_ceilings(figures: dict[str, Figures]) -> None:
    """Lower the ceilings to the figures; raise that of comments, which is a floor."""
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
    parser.add_argument("--where", metavar="FIGURE", help="list the words behind a figure")
    options = parser.parse_args(arguments)
    if options.where:
        for room in options.rooms or ["fedpfl"]:
            print("\n".join(show_where(room, options.where)))
        return 0
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
