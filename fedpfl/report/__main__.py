"""Tables and figures from run directories: `python -m fedpfl.report [COMMAND] [ROOT ...]`; see `--help`."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedpfl.errors import FedpflError
from fedpfl.report import cleaning, listing, state
from fedpfl.report.compare import LEAST, compare, side
from fedpfl.report.load import Group, Run, directories, groups, runs, to_stderr
from fedpfl.report.table import FORMATS, Table, render, screen
from fedpfl.report.tables import ACCURACIES, METRICS, SELECTIONS, accuracy_table, curve_table

EVERY = "all_methods"
"""The paper's table that it lacks: every method before and after fine-tuning, with its cost."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a mistake of the user's, or 1 where `clean` left something."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in COMMANDS else ""
    act, text, own = COMMANDS[name]
    parser = argparse.ArgumentParser(
        prog=f"python -m fedpfl.report {name}".strip(),
        description=text,
        epilog="" if name else f"Other commands, each with its own --help: {', '.join(filter(None, COMMANDS))}.",
    )
    for option in own:
        names, settings = option if isinstance(option, tuple) else ([f"--{option}"], OPTIONS[option])
        parser.add_argument(*names, **settings)
    options = parser.parse_args(words)
    try:
        return act(options) or 0
    except FedpflError as error:
        to_stderr(f"error: {error}")
        return 2


def _both(options: Namespace) -> None:
    found = _found(options)
    _tables(options, found)
    _figures(options, found)
    _also_paper(options, found)


def _only_tables(options: Namespace) -> None:
    found = _found(options)
    _tables(options, found)
    _also_paper(options, found, "tables")


def _only_figures(options: Namespace) -> None:
    found = _found(options)
    _figures(options, found)
    _also_paper(options, found, "figures")


def _tables(options: Namespace, found: list[Run]) -> None:
    _write("accuracy", accuracy_table(found, options.select, options.every or 1), options)
    if options.reference:
        _write("curves", curve_table(found, options.reference), options)


def _figures(options: Namespace, found: list[Run]) -> None:
    from fedpfl.report.figures import accuracy_figure, curves  # matplotlib is slow to load

    folder = options.out or options.roots[0] / "figures"
    settings: dict[str, list[Run]] = {}
    for run in found:
        settings.setdefault(_slug(f"{run.dataset}_{run.partition}"), []).append(run)
    for name, members in settings.items():
        written = accuracy_figure(members, folder / f"accuracy_{name}")
        if options.reference:
            written += curves(members, options.reference, folder / f"curves_{name}")
        for target in written:
            to_stderr(f"wrote {target}")


def _paper(options: Namespace) -> None:
    from fedpfl.report.paper_figures import FIGURES
    from fedpfl.report.paper_tables import PLANS

    known = (*PLANS, EVERY, *FIGURES)
    roots = [Path(word) for word in options.words if word not in known] or [Path("outputs")]
    if absent := [root for root in roots if not root.is_dir()]:
        raise FedpflError(f"{absent[0]} is neither a folder nor a table or figure; there are {', '.join(known)}")
    _show_paper(options, [word for word in options.words if word in known], roots, runs(*roots))


def _also_paper(options: Namespace, found: list[Run], only: str = "") -> None:
    if options.paper:
        more = {"only": only, "dataset": [], "accuracy": "accuracy", "test": ""}
        _show_paper(Namespace(**vars(options) | more), [], options.roots, found)


def _show_paper(options: Namespace, names: Sequence[str], roots: Sequence[Path], found: Sequence[Run]) -> None:
    from fedpfl.report.paper_figures import FIGURES
    from fedpfl.report.paper_tables import LARGE, PLANS, SMALL, Rule, fill, one_each

    def dataset(group: Group) -> str:
        return str(group.runs[0].config["dataset"]["name"])

    gathered = [group for group in groups(found) if not options.dataset or dataset(group) in options.dataset]
    own = [group for group in gathered if dataset(group) in (*LARGE, *SMALL)]

    def has_runs(name: str) -> bool:
        """Whether there is something to show of what was not asked for by name."""
        if name in PLANS:
            return bool(own) and bool(fill(name, own).frame["seeds"].any())
        return bool(FIGURES[name].of(own) if name in FIGURES else own)

    chosen = names or [name for name in (*PLANS, EVERY, *FIGURES) if has_runs(name)]
    if options.only:
        chosen = [name for name in chosen if (name in FIGURES) == (options.only == "figures")]
    if not chosen:
        to_stderr(
            f"nothing of the paper's can be filled from the runs below {', '.join(map(str, roots))}; name a table "
            f"({', '.join(PLANS)}) to see the commands that fill it"
        )
    rule = Rule(options.accuracy, options.select, options.every or 100)
    for name in chosen:
        if name in FIGURES:
            for target in FIGURES[name].draw(gathered, (options.out or roots[0] / "figures") / name, rule):
                to_stderr(f"wrote {target}")
        elif name == EVERY:
            members = [run for group in one_each(gathered) for run in group.runs]
            _write(name, accuracy_table(members, rule.select, rule.every), options)
        else:
            _write(name, fill(name, gathered, rule, options.dataset, options.test or ""), options)


def _html(options: Namespace) -> None:
    from fedpfl.report.html import write

    for target in write(options.roots, options.out or options.roots[0] / "report", options.select, options.every or 1):
        to_stderr(f"wrote {target}")


def _list(options: Namespace) -> None:
    listed = listing.entries(map(state.read, directories(*options.roots)))
    if not listed:
        raise _nothing(options.roots)
    listed = listing.select(listed, options.status, options.method, options.dataset)
    listed = listing.ordered(listed, options.sort, options.reverse)
    text = listing.as_json(listed) if options.format == "json" else _text(listing.table(listed), options.format)
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # `ls | head` has seen enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _compare(options: Namespace) -> None:
    if options.out and options.out.suffix not in (".png", ".pdf"):
        raise FedpflError(f"--out {options.out}: must end in .png or .pdf")
    a, b = side(options.a), side(options.b)
    print(_text(compare(a, b, options.test, options.metric), options.format), end="")
    if options.out:
        from fedpfl.report.figures import comparison

        for target in comparison(a, b, options.metric, options.out):
            to_stderr(f"wrote {target}")


def _clean(options: Namespace) -> int:
    return cleaning.clean(cleaning.found(options.roots, options.status), options.roots, options.yes)


def _found(options: Namespace) -> list[Run]:
    found = runs(*options.roots)
    if not found:
        raise _nothing(options.roots)
    return found


def _nothing(roots: Sequence[Path]) -> FedpflError:
    below = ", ".join(map(str, roots))
    return FedpflError(f"no runs found below {below}; run `python -m fedpfl.train` first or name another folder")


def _text(tables: Table | Sequence[Table], form: str | None) -> str:
    return render(tables, form or "terminal", screen())


def _write(name: str, table: Table, options: Namespace) -> None:
    """Print a table, or write it below `options.out` in `options.format`, by default in all but the terminal's."""
    if options.format in (None, "terminal") or not options.out:
        print(_text(table, options.format), end="")
    if not options.out:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for form in [options.format] if options.format else [form for form in FORMATS if form != "terminal"]:
        target = options.out / f"{name}{FORMATS[form]}"
        target.write_text(render(table, form), encoding="utf-8")
        to_stderr(f"wrote {target}")


def _slug(text: str) -> str:
    name = re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")
    return name if len(name) <= 100 else f"{name[:90]}_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


OPTIONS: dict[str, dict[str, Any]] = {
    "format": {"choices": FORMATS, "help": "of tables; default: terminal, with --out all others"},
    "select": {
        "choices": SELECTIONS,
        "default": "last",
        "help": "which evaluation is judged; best-checkpoint looks at test data, as the published tables do",
    },
    "every": {
        "type": _positive,
        "metavar": "N",
        "help": "best-checkpoint: of every N rounds only (published: 100, which is the default of the paper's)",
    },
    "reference": {
        "type": Path,
        "metavar": "CSV",
        "help": "published curves (method,round,accuracy_before,accuracy_after)",
    },
    "paper": {"action": "store_true", "help": "also the FedOBP paper's, as far as there are runs"},
    "out": {
        "type": Path,
        "metavar": "DIR",
        "help": "write there; default of figures: ROOT/figures, of pages: ROOT/report",
    },
    "only": {"choices": ("tables", "figures"), "help": "of what there are runs"},
    "accuracy": {"choices": ACCURACIES, "default": "accuracy", "help": "which; default: mean over clients"},
    "dataset": {"type": _words, "default": [], "metavar": "A,B", "help": "only these, such as fmnist"},
    "method": {"type": _words, "default": [], "metavar": "A,B", "help": "only these, such as fedobp,fedavg"},
    "reverse": {"action": "store_true", "help": "the other way round"},
    "yes": {"action": "store_true", "help": "do not ask"},
}
Option = str | tuple[list[str], dict[str, Any]]
ROOTS: Option = (
    ["roots"],
    {"nargs": "*", "metavar": "ROOT", "type": Path, "default": [Path("outputs")], "help": "default: outputs"},
)
USUAL: tuple[Option, ...] = (ROOTS, "format", "select", "every", "reference", "paper", "out")


def _choice(name: str, choices: Sequence[str], default: str | None, text: str) -> Option:
    return [f"--{name}"], {"choices": choices, "default": default, "help": text}


def _statuses(choices: Sequence[str], default: Sequence[str]) -> Option:
    text = f"of {', '.join(choices)}; default: {','.join(default) or 'all'}"
    return ["--status"], {"type": _words, "default": list(default), "metavar": "A,B", "help": text}


COMMANDS: dict[str, tuple[Callable[[Namespace], int | None], str, tuple[Option, ...]]] = {
    "": (_both, "Print the table of all runs and draw their figures.", USUAL),
    "tables": (_only_tables, "Print the table of all runs.", USUAL),
    "figures": (_only_figures, "Draw accuracy over rounds.", USUAL),
    "paper": (
        _paper,
        "The FedOBP paper's tables and figures from own runs; without a NAME, all of which there are runs.",
        (
            (["words"], {"nargs": "*", "metavar": "NAME|ROOT", "help": "table2 to table5, figure2 to figure7, ..."}),
            *("only", "dataset", "accuracy", "select", "every"),
            _choice("test", tuple(LEAST), None, "mark what differs from FedOBP, paired over seeds"),
            *("format", "out"),
        ),
    ),
    "html": (
        _html,
        "Write an HTML page per experiment, which loads nothing from anywhere: send it, open it.",
        (ROOTS, "out", "select", "every"),
    ),
    "ls": (
        _list,
        "List runs, one line each: status, what, accuracy, cost, age and path. Broken ones too.",
        (
            ROOTS,
            _statuses(state.STATUSES, ()),
            *("method", "dataset"),
            _choice("sort", tuple(listing.SORTS), "run", "default: run, as in tables"),
            "reverse",
            _choice("format", (*FORMATS, "json"), "terminal", "default: terminal"),
        ),
    ),
    "compare": (
        _compare,
        "Compare two configurations: settings, final numbers over seeds, curves, clients.",
        (
            (["a"], {"metavar": "A", "type": Path, "help": "a run directory, or a folder with the seeds of one"}),
            (["b"], {"metavar": "B", "type": Path, "help": "the same"}),
            _choice("test", (*LEAST, "none"), "t", "paired over seeds, two-sided; default: t"),
            _choice("metric", tuple(METRICS), "accuracy", "of the curves; default: accuracy"),
            _choice("format", tuple(FORMATS), "terminal", "default: terminal"),
            (["--out"], {"type": Path, "metavar": "FILE", "help": "draw the curves into this .png or .pdf"}),
        ),
    ),
    "clean": (
        _clean,
        "Remove runs that came to nothing, after asking. Never a finished one, nor one being written.",
        (ROOTS, "yes", _statuses(cleaning.REMOVABLE, cleaning.USUAL)),
    ),
}


if __name__ == "__main__":
    raise SystemExit(main())
