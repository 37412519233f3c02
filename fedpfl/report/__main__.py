"""Tables and figures from run directories: `python -m fedpfl.report [COMMAND] [ROOT ...]`; see
`--help`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.files import atomic_output
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.papers.curves import curve_table, draw_curves
from fedpfl.papers.fedobp.tables import published_beside
from fedpfl.papers.layout import Selection
from fedpfl.papers.registry import find_full_name
from fedpfl.papers.show import AS_PUBLISHED, NAMES, TABLES, make_tables_and_figures
from fedpfl.record.columns import METRICS
from fedpfl.report import cleaning, listing
from fedpfl.report.compare import MIN_PAIRS, compare_groups, find_sides
from fedpfl.report.fairness import fairness_table
from fedpfl.report.figures import accuracy_figure, comparison_figure
from fedpfl.report.filters import is_filter
from fedpfl.report.grouping import group_by, groups
from fedpfl.report.load import inspect_directories, no_runs_error, print_to_stderr, runs
from fedpfl.report.page.data import AXIS_TITLES
from fedpfl.report.ranking import draw_rank_diagram, rank_tables
from fedpfl.report.render import FORMATS, render, terminal_width
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Table
from fedpfl.report.tables import ACCURACIES, COLUMNS, CURVES, SELECTIONS, accuracy_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a mistake of the user's, or 1 where `clean`
    left something.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in COMMANDS else ""
    act, text, example, options = COMMANDS[name]
    others = "".join(
        f"  {one:8}  {re.split('[.:;]', about)[0]}\n"
        for one, (_, about, *_) in COMMANDS.items()
        if one
    )
    parser = Parser(
        prog=f"python -m fedpfl.report {name}".strip(),
        description=text,
        epilog=f"{FILTERS}\n\n{example}"
        + ("" if name else f"\n\nOther commands, each with its own --help:\n{others}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_repeats=True,
    )
    for names, settings in (*options, TRIALS):
        parser.add_argument(*names.split(), **settings)
    try:
        status = _status(act, parser.parse_intermixed_args(words))
        sys.stdout.flush()
    except BrokenPipeError:
        _mute()  # `| head` has seen enough
        return 0
    except OSError as error:
        if error.filename is None:
            _mute()
        print_notice(f"{error.filename or 'cannot write standard output'}: {error_text(error)}")
        return 2
    return status


def _status(act: Callable[[Namespace], int | None], chosen: Namespace) -> int:
    chosen.where = [word for word in chosen.words if is_filter(word)]
    chosen.words = [word for word in chosen.words if not is_filter(word)]
    chosen.roots = [*map(Path, chosen.words)] or [Path("outputs")]
    try:
        return act(chosen) or 0
    except FedpflError as error:
        print_notice(error)
        return 2


def _mute() -> None:
    """Let nothing be written to standard output any more, at exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(options: Namespace, only: str = "") -> None:
    """Show the table and the figures of all runs, or only one of both, and the paper's if asked
    for.
    """
    members = _found(options)
    fairness = only != "figures" and options.fairness
    if fairness and options.select != "last":
        raise FedpflError(
            "--fairness is of the last evaluation, which clients.csv holds; leave out --select"
        )
    if only != "figures":
        _of_one_table(options, bool(options.fairness or options.reference or options.paper))
        known = partial(published_beside, everywhere=options.published)
        made = accuracy_table(members, options.select, options.every or 1, known, options.columns)
        _write("accuracy", made, options)
        if options.reference:
            _write("curves", curve_table(members, options.reference), options)
    if fairness:
        _write("fairness", fairness_table(members), options)
    if only != "tables":
        _figures(options, members)
    if options.paper:
        _papers(
            members,
            options,
            Selection(select=options.select, every=options.every or 100),
            only=only,
        )


def _figures(options: Namespace, found: list[Run]) -> None:
    folder = _folder(options, "figures")
    for name, members in group_by(
        found, lambda run: _slug(f"{run.dataset}_{run.partition}")
    ).items():
        over = "" if options.over == "round" else f"_over_{options.over}"
        written = accuracy_figure(
            members, folder / f"{options.metric}{over}_{name}", options.metric, along=options.over
        )
        if options.reference:
            written += draw_curves(members, options.reference, folder / f"curves_{name}")
        _wrote(written)


def _paper(options: Namespace) -> None:
    names = {word: name for word in options.words if (name := find_full_name(word))}
    options.roots = [Path(word) for word in options.words if word not in names] or [Path("outputs")]
    if absent := [root for root in options.roots if not root.is_dir()]:
        raise FedpflError(
            f"{absent[0]} is neither a folder nor a table or figure; there are {', '.join(NAMES)}"
        )
    rule: Selection | None = Selection(options.accuracy, options.select, options.every or 100)
    if options.select == AS_PUBLISHED:
        if options.every or options.accuracy != "accuracy":
            raise FedpflError(
                f"--select {AS_PUBLISHED} has rounds and accuracy of its own; leave out --every and --accuracy"
            )
        rule = None
    members, asked = (
        runs(*options.roots, where=options.where, trials=options.trials),
        [*names.values()],
    )
    _of_one_table(options, len(asked) != 1)
    wishes = {"datasets": options.dataset, "test": options.test or ""}
    _papers(members, options, rule, names=asked, only=options.only or "", **wishes)


def _of_one_table(options: Namespace, several: bool) -> None:
    if options.caption and several:
        raise FedpflError("--caption is of one table; ask for one alone")


def _papers(
    members: Sequence[Run], options: Namespace, rule: Selection | None, **wishes: Any
) -> None:
    shown = False
    for name, made in make_tables_and_figures(
        groups(members), _folder(options, "figures"), rule, **wishes
    ):
        shown = True
        if isinstance(made, Table):
            _write(name, made, options)
        else:
            _wrote(made)
    if not shown:
        print_to_stderr(
            f"nothing of the papers' can be filled from the runs below {', '.join(map(str, options.roots))}; name a "
            f"table ({', '.join(TABLES)}) to see the commands that fill it"
        )


def _html(options: Namespace) -> None:
    from fedpfl.report.html import write_pages

    table = partial(accuracy_table, beside=published_beside)
    out = _folder(options, "report")
    _wrote(
        write_pages(
            options.roots,
            out,
            options.select,
            options.every or 1,
            options.where,
            table=table,
            trials=options.trials,
        )
    )


def _list(options: Namespace) -> None:
    listed = listing.list_entries(
        inspect_directories(*options.roots, where=options.where, trials=options.trials)
    )
    if not listed:
        raise no_runs_error(options.roots)
    listed = listing.select_statuses(listed, options.status)
    listed = listing.sort_entries(listed, options.sort, options.reverse)
    if options.format == "json":
        text = json.dumps([entry.record for entry in listed], indent=2) + "\n"
    else:
        text = render(
            listing.entries_table(listed), options.format, terminal_width() or 1 << 30
        )  # a pipe gets whole lines
    print(text, end="")


def _compare(options: Namespace) -> None:
    if options.out and options.out.suffix not in (".png", ".pdf"):
        raise FedpflError(f"--out {options.out}: must end in .png or .pdf")
    a, b = find_sides(options.roots, options.where, options.trials)
    print(
        _text(compare_groups(a, b, options.test, options.metric, options.select), options.format),
        end="",
    )
    if options.out:
        _wrote(comparison_figure(a, b, options.metric, options.out))


def _ranks(options: Namespace) -> None:
    tables, result = rank_tables(
        _found(options), options.accuracy, options.select, options.every or 1
    )
    print(_text(tables, options.format), end="")
    _wrote(draw_rank_diagram(result, _folder(options, "figures") / "ranks"))


def _clean(options: Namespace) -> int:
    return cleaning.clean_runs(
        options.roots, options.status, options.where, options.yes, options.trials
    )


def _found(options: Namespace) -> list[Run]:
    if found := runs(*options.roots, where=options.where, trials=options.trials):
        return found
    raise no_runs_error(options.roots)


def _folder(options: Namespace, name: str) -> Path:
    """Where files go."""
    return options.out or options.roots[0] / name


def _wrote(targets: Iterable[Path]) -> None:
    for target in targets:
        print_to_stderr(f"wrote {target}")


def _text(tables: Table | Sequence[Table], form: str | None) -> str:
    return render(tables, form or "terminal", terminal_width())


def _write(name: str, table: Table, options: Namespace) -> None:
    """Print a table, or write it below `options.out` in `options.format`, by default in all but the
    terminal's.
    """
    table = replace(table, pm=options.pm, caption=options.caption or table.caption)
    if options.format in (None, "terminal") or not options.out:
        print(_text(table, options.format), end="")
    if not options.out:
        return
    for form in (
        [options.format] if options.format else [form for form in FORMATS if form != "terminal"]
    ):
        target = options.out / f"{name.replace('/', '_')}{FORMATS[form]}"
        with atomic_output(target) as file:
            file.write_text(render(table, form), encoding="utf-8")
        _wrote([target])


def _slug(text: str) -> str:
    name = re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")
    return (
        name
        if len(name) <= 100
        else f"{name[:90]}_{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _option(name: str, text: str, **settings: Any) -> Option:
    return name, settings | {"help": text}


Option = tuple[str, dict[str, Any]]
LIST: dict[str, Any] = {"type": _words, "default": [], "metavar": "A,B"}
ROOTS = _option(
    "words", "folders of runs, default: outputs; and filters", nargs="*", metavar="ROOT|KEY=VALUE"
)
FORMAT = _option(
    "--format", "of tables; default: terminal, with --out all others", choices=[*FORMATS]
)
SELECT = "which evaluation is judged; validation: the best on held-out samples; best-checkpoint: the best on test data"
FAIR = ("last", "validation")
OWN_RULE = f"{SELECT}; {AS_PUBLISHED}: by each table's own rule"
TRIALS = _option("--trials", "also trials of searches", action="store_true")
EVERY_N = _option(
    "--every", "best-checkpoint: of every N rounds only; paper: 100", type=_positive, metavar="N"
)
JUDGED = (_option("--select", SELECT, choices=SELECTIONS, default="last"), EVERY_N)
OUT = _option(
    "--out",
    "write there; default of figures: ROOT/figures, of pages: ROOT/report",
    type=Path,
    metavar="DIR",
)
ACCURACY = _option(
    "--accuracy", "which; default: mean over clients", choices=ACCURACIES, default="accuracy"
)
REFERENCE = _option(
    "--reference",
    "published curves (method,round,accuracy_before,accuracy_after)",
    type=Path,
    metavar="CSV",
)
PAPER = _option("--paper", "also the paper's, as far as there are runs", action="store_true")
FIELDS = ", ".join(key for key in COLUMNS if key not in METRICS)
CHOSEN = f"only these, such as accuracy,ft_accuracy,bits_up: columns of rounds.csv, {FIELDS}"
PM = _option("--pm", "deviations as mean ± std", action="store_true")
CAPTION = _option("--caption", "of the table, instead of what it says", metavar="TEXT")
PUBLISHED = _option("--published", "published values beside any set-up", action="store_true")
LOOK = (FORMAT, PM, CAPTION)
SUCH = "of the curves, such as accuracy_pooled, accuracy_worst10, ft_accuracy; default: accuracy"
METRIC = _option("--metric", SUCH, choices=CURVES, default="accuracy", metavar="COLUMN")
ALONG = _option(
    "--over",
    "along the axis: rounds, gigabytes, hours of training or simulated ones",
    choices=[*AXIS_TITLES],
    default="round",
)
FAIRNESS = _option(
    "--fairness", "also which clients FedAvg+FT and Local-Only serve better", action="store_true"
)
TABLE = (ROOTS, _option("--columns", CHOSEN, **LIST), *LOOK, *JUDGED, PUBLISHED, FAIRNESS)
DRAWN = (METRIC, ALONG)
ALSO = (REFERENCE, PAPER, OUT)
SIDES = "A and B: run directories, or folders that hold the seeds of one; or one that holds both"
TEST = "mark what differs from the last line, paired over seeds"
STATUS = f"of {', '.join(cleaning.REMOVABLE)}; default: {','.join(cleaning.DEFAULT_STATUSES)} that no command would go on with"
FILTERS = """Filters choose runs by any key of config.yaml, commas standing between alternatives:
  method=fedobp,fedavg dataset=digits partition.alpha=0.1
A folder of such a name is written ./KEY=VALUE."""

COMMANDS: dict[str, tuple[Callable[[Namespace], int | None], str, str, tuple[Option, ...]]] = {
    "": (
        _show,
        "Print the table of all runs and draw their figures.",
        "Example: python -m fedpfl.report outputs/demo method=fedobp,fedavg",
        (*TABLE, *DRAWN, *ALSO),
    ),
    "tables": (
        partial(_show, only="tables"),
        "Print the table of all runs.",
        "Example: python -m fedpfl.report tables dataset=digits partition.alpha=0.1 --format markdown",
        (*TABLE, *ALSO),
    ),
    "figures": (
        partial(_show, only="figures"),
        "Draw accuracy over rounds.",
        "Example: python -m fedpfl.report figures outputs/demo method=fedobp,fedavg --out figures",
        (ROOTS, *DRAWN, *JUDGED, *ALSO),
    ),
    "paper": (
        _paper,
        "Show five papers' tables and figures from own runs; without a NAME, all of which there are runs.",
        "Example: python -m fedpfl.report paper fedobp/table4 figure4 seed=1,2,3 --out tables",
        (
            _option(
                "words",
                "fedobp/table3, figure2, ...; folders; filters",
                nargs="*",
                metavar="NAME|ROOT|KEY=VALUE",
            ),
            _option("--only", "of what there are runs", choices=("tables", "figures")),
            _option("--dataset", "only these columns, such as fmnist", **LIST),
            ACCURACY,
            _option("--select", OWN_RULE, choices=(*SELECTIONS, AS_PUBLISHED), default="last"),
            EVERY_N,
            _option("--test", TEST, choices=[*MIN_PAIRS]),
            *LOOK,
            OUT,
        ),
    ),
    "html": (
        _html,
        "Write an HTML page per experiment, which loads nothing from anywhere.",
        "Example: python -m fedpfl.report html outputs dataset=cifar10 --out pages",
        (ROOTS, OUT, *JUDGED),
    ),
    "ls": (
        _list,
        "List runs, one line each: status, what, accuracy, cost, age and path. Without filters also broken ones.",
        "Example: python -m fedpfl.report ls method=fedobp dataset=digits --status running,interrupted --sort accuracy",
        (
            ROOTS,
            _option("--status", f"only these: {', '.join(STATUSES)}", **LIST),
            _option("--sort", "default: run, as in tables", choices=listing.SORTS, default="run"),
            _option("--reverse", "the other way round", action="store_true"),
            _option(
                "--format", "default: terminal", choices=[*FORMATS, "json"], default="terminal"
            ),
        ),
    ),
    "compare": (
        _compare,
        "Compare two configurations: settings, final numbers over seeds, curves, clients.",
        "Example: python -m fedpfl.report compare outputs/demo method=fedavg,fedobp --test wilcoxon",
        (
            _option("words", SIDES, nargs="*", metavar="A|B|KEY=VALUE"),
            _option(
                "--test",
                "paired over seeds, two-sided; default: t",
                choices=[*MIN_PAIRS, "none"],
                default="t",
            ),
            _option(
                "--select",
                "validation: at the best accuracy on held-out samples",
                choices=FAIR,
                default="last",
            ),
            METRIC,
            _option("--format", "default: terminal", choices=[*FORMATS], default="terminal"),
            _option("--out", "curves: .png or .pdf", type=Path, metavar="FILE"),
        ),
    ),
    "ranks": (
        _ranks,
        "Rank methods over data sets and partitions: Friedman, Wilcoxon with Holm's correction, a diagram.",
        "Example: python -m fedpfl.report ranks outputs/fedobp method=fedavg,fedper,fedobp,local_only",
        (ROOTS, ACCURACY, FORMAT, *JUDGED, OUT),
    ),
    "clean": (
        _clean,
        "Remove runs that came to nothing, after asking. Never a finished one, nor one being written.",
        "Example: python -m fedpfl.report clean outputs/demo method=fedobp --status interrupted",
        (
            ROOTS,
            _option("--yes", "do not ask", action="store_true"),
            _option("--status", STATUS, **LIST),
        ),
    ),
}


if __name__ == "__main__":
    outlive_readers()
    raise SystemExit(main())
