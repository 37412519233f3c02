"""Tables and figures from run directories: `python -m fedpfl.report [COMMAND] [ROOT ...]`.

See `--help`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.ground.files import atomic_output
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.papers.curves import curve_table, draw_curves
from fedpfl.papers.fedobp.tables import published_beside
from fedpfl.papers.layout import Selection
from fedpfl.papers.queue import parse_duration, run_missing
from fedpfl.papers.registry import find_full_name
from fedpfl.papers.show import AS_PUBLISHED, NAMES, TABLES, make_tables_and_figures
from fedpfl.record.columns import METRICS
from fedpfl.report import claims, cleaning, listing, outcomes
from fedpfl.report.compare import compare_groups, find_sides
from fedpfl.report.fairness import fairness_table, kinds_table
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.filters import is_filter
from fedpfl.report.grouping import common_task, group_by, groups, task_metric
from fedpfl.report.load import Directory, no_runs_error, print_to_stderr, read_directories, runs
from fedpfl.report.other_code import other_code_table
from fedpfl.report.page.data import AXIS_TITLES
from fedpfl.report.power import INTERVAL_TEXTS
from fedpfl.report.ranking import draw_rank_diagram, rank_tables
from fedpfl.report.render import FORMATS, render, show_tables, terminal_width
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Table
from fedpfl.report.tables import ACCURACIES, COLUMNS, CURVES, SELECTIONS, accuracy_table

FILTERS = """Filters choose runs by any key of config.yaml, commas standing between alternatives:
  method=fedobp,fedavg dataset=digits partition.alpha=0.1
A folder of such a name is written ./KEY=VALUE."""
_WIDE = 10_000  # a pipe gets whole lines
FIGURE_KINDS = ("curves", "clients", "gains")


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _split_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _choose_some(choices: Sequence[str], text: str) -> Record:
    """Return the settings of an option that takes some of the choices, separated by commas."""

    def parse_words(words: str) -> list[str]:
        selection = _split_list(words)
        for word in selection:
            if word not in choices:
                raise argparse.ArgumentTypeError(choices_text(choices, word))
        return selection

    help_text = f"{text}: {', '.join(choices)}"
    return {"type": parse_words, "default": [], "metavar": "A,B", "help": help_text}


def _take_value(text: str, **settings: Any) -> Record:
    return settings | {"help": text}


def _choose_one(choices: Iterable[str], default: str | None, text: str) -> Record:
    return {"choices": [*choices], "default": default, "help": text}


def _take_list(text: str) -> Record:
    return {"type": _split_list, "default": [], "metavar": "A,B", "help": text}


def _take_switch(text: str) -> Record:
    return {"action": "store_true", "help": text}


# ---- options: those of one command alone have its name before theirs

_FIELD_NAMES = ", ".join(key for key in COLUMNS if key not in METRICS)
_SELECT_HELP = (
    "which evaluation is judged; validation: the best on held-out samples; best-checkpoint: the "
    "best on test data"
)
_SIDES_HELP = (
    "A and B: run directories, or folders that hold the seeds of one; or one that holds both"
)
_CLEAN_HELP = f"default: {','.join(cleaning.DEFAULT_STATUSES)}; of"
OPTIONS = {
    "words": _take_value(
        "folders of runs, default: outputs; and filters", metavar="ROOT|KEY=VALUE"
    ),
    "paper words": _take_value(
        "fedobp/table3, ...; folders; filters", metavar="NAME|ROOT|KEY=VALUE"
    ),
    "claim words": _take_value("claims, folders and filters", metavar="'A > B'|ROOT|KEY=VALUE"),
    "compare words": _take_value(_SIDES_HELP, metavar="A|B|KEY=VALUE"),
    "--columns": _take_list(f"only these, as accuracy,bits_up: of rounds.csv, {_FIELD_NAMES}"),
    "--format": _choose_one(FORMATS, None, "of tables; default: terminal, with --out all others"),
    "--pm": _take_switch("deviations as mean ± std"),
    "--caption": _take_value("of the table, above its own", metavar="TEXT"),
    "--select": _choose_one(SELECTIONS, "last", _SELECT_HELP),
    "paper --select": _choose_one(
        (*SELECTIONS, AS_PUBLISHED),
        None,
        f"{_SELECT_HELP}; {AS_PUBLISHED}, the default: each table's own rule",
    ),
    "--by": _take_value(
        "points by which the first is claimed to be better", type=float, default=0.0
    ),
    "--every": _take_value(
        "best-checkpoint: of every N rounds only; paper: 100", type=_parse_positive, metavar="N"
    ),
    "--published": _take_switch("published values beside any set-up"),
    "--beside": _take_list("results of other code as rows: PFLlib's .h5, FL-bench's metrics.csv"),
    "--fairness": _take_switch("also which clients FedAvg+FT and Local-Only serve better"),
    "--interval": _choose_one(
        INTERVAL_TEXTS, "", "95 %% intervals instead of deviations: over seeds, clients or both"
    ),
    "--kind": _choose_some(FIGURE_KINDS, "only these"),
    "--metric": _choose_one(CURVES, "accuracy", "of the curves; default: accuracy")
    | {"metavar": "COLUMN"},
    "--over": _choose_one(AXIS_TITLES, "round", "along the axis: rounds, gigabytes, hours"),
    "--reference": _take_value(
        "published curves (method,round,accuracy_before,accuracy_after)", type=Path, metavar="CSV"
    ),
    "--accuracy": _choose_one(ACCURACIES, "accuracy", "which; default: mean over clients"),
    "ls --status": _choose_some(STATUSES, "only these"),
    "clean --status": _choose_some(cleaning.REMOVABLE, _CLEAN_HELP),
    "--sort": _take_value("by a key of --json; default: as in tables", metavar="KEY"),
    "--yes": _take_switch("do not ask"),
    "--out": _take_value(
        "default of figures: ROOT/figures, of pages: ROOT/report", type=Path, metavar="DIR"
    ),
    "--fill": _take_value(
        "run missing cells for so long, the cheapest first: 30m, 2h",
        metavar="TIME",
        type=parse_duration,
    ),
    "--with": _take_list("with --fill: overrides of all runs, such as data_dir=DIR"),
    "--trials": _take_switch("also trials of searches"),
}


class Command(NamedTuple):
    """A command of the report: its function, and the texts and the options of its --help."""

    run: Callable[[Namespace], int | None]
    description: str
    example: str
    options: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0, 2 for a mistake of the user's, or 1 if `clean` left something.
    """
    # Without a command's name the first arguments are folders and filters of the plain table.
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else ""
    options = _make_parser(name).parse_intermixed_args(arguments)
    options.claims = [word for word in options.words if name == "claim" and ">" in word]
    options.words = [word for word in options.words if word not in options.claims]
    options.where = [word for word in options.words if is_filter(word)]
    options.words = [word for word in options.words if not is_filter(word)]
    options.roots = [*map(Path, options.words)] or [Path("outputs")]
    try:
        try:
            status = COMMANDS[name].run(options) or 0
        except FedpflError as error:
            print_notice(error)
            status = 2
        sys.stdout.flush()
    except OSError as error:
        if error.filename is None:
            # Python flushes the stream once more when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_notice(f"{error.filename or 'cannot write standard output'}: {error_text(error)}")
        return 2
    return status


def _make_parser(name: str) -> Parser:
    command = COMMANDS[name]
    epilog = f"{FILTERS}\n\nExample: python -m fedpfl.report {command.example}"
    if not name:
        commands = [*COMMANDS.items()][1:]
        summaries = [
            f"  {name:8}  {re.split('[.:;]', one.description)[0]}\n" for name, one in commands
        ]
        epilog += f"\n\nOther commands, each with its own --help:\n{''.join(summaries)}"
    parser = Parser(
        prog=f"python -m fedpfl.report {name}".strip(),
        description=command.description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", **OPTIONS.get(f"{name} words", OPTIONS["words"]))
    for flag in (*command.options.split(), "--trials"):
        parser.add_argument(flag, **OPTIONS.get(f"{name} {flag}") or OPTIONS[flag])
    return parser


# ---- the commands


def _show_runs(options: Namespace) -> None:
    _show_tables(options)
    _draw_figures(options, _find_runs(options), ["curves"])


def _show_tables(options: Namespace) -> None:
    shown_runs = _find_runs(options)
    table = accuracy_table(
        shown_runs,
        select=options.select,
        every=options.every or 1,
        beside=partial(published_beside, everywhere=options.published),
        chosen=options.columns,
        interval=options.interval,
    )
    _show_table("accuracy", table, options)
    if options.beside:
        _show_table("other_code", other_code_table(options.beside, options.select), options)
    if options.reference:
        _show_table("curves", curve_table(shown_runs, options.reference), options)
    kinds = kinds_table(shown_runs)
    if kinds.rows:
        _show_table("kinds", kinds, options)
    if options.fairness:
        _show_table("fairness", fairness_table(shown_runs, options.interval), options)


def _show_figures(options: Namespace) -> None:
    _draw_figures(options, _find_runs(options), options.kind)


def _draw_figures(options: Namespace, shown_runs: list[Run], kinds: Sequence[str]) -> None:
    """Draw figures of each data set, partition and task.

    Args:
        options: the command's options.
        shown_runs: the runs.
        kinds: of FIGURE_KINDS; none means all that these runs have.
    """
    drawers: dict[str, Callable[[list[Run], Path], list[Path]]] = {
        "curves": partial(_draw_runs, options),
        "clients": outcomes.clients_figure,
        "gains": outcomes.gains_figure,
    }
    by_setting = group_by(shown_runs, _name_setting).items()
    for (setting, members), kind in itertools.product(by_setting, kinds or FIGURE_KINDS):
        name = f"{kind}_{setting}"
        try:
            _report_files(drawers[kind](members, _output_folder(options, "figures") / name))
        except FedpflError as error:
            if kinds or kind == "curves":
                raise
            print_to_stderr(f"not drawn: {name}: {error}")


def _name_setting(run: Run) -> str:
    """Return a file name for the figures of a run's data set, partition and task."""
    task = "" if run.task == CLASSIFICATION else f" {run.task.name}"
    # Lower case: some file systems take names of other case for the same.
    text = f"{run.dataset}_{run.partition}{task}".lower()
    return re.sub(r"[^a-z0-9.]+", "_", text).strip("_")[:100]


def _draw_runs(options: Namespace, members: list[Run], path: Path) -> list[Path]:
    """Draw a metric over rounds, and beside a published curve if one is named."""
    axis = "" if options.over == "round" else f"_over_{options.over}"
    metric = task_metric(options.metric, common_task(members))
    files = accuracy_figure(
        members,
        path.with_name(path.name.replace("curves", f"{metric}{axis}", 1)),
        options.metric,
        along=options.over,
    )
    if options.reference:
        files += draw_curves(members, options.reference, path)
    return files


def _show_papers(options: Namespace) -> None:
    # ---- Step 1: names and folders.
    names = [name for name in map(find_full_name, options.words) if name]
    folders = [Path(word) for word in options.words if not find_full_name(word)]
    options.roots = folders or [Path("outputs")]
    for root in options.roots:
        if not root.is_dir():
            raise FedpflError(
                f"{root} is neither a folder nor a table or figure; there are {', '.join(NAMES)}"
            )

    # ---- Step 2: the rule that judges runs.
    rule = None
    has_own_rule = options.every or options.accuracy != "accuracy"
    select = options.select or ("last" if has_own_rule else AS_PUBLISHED)
    if select != AS_PUBLISHED:
        rule = Selection(options.accuracy, select, options.every or 100)
    elif has_own_rule:
        raise FedpflError(
            f"--select {AS_PUBLISHED} has rounds and accuracy of its own; "
            "leave out --every and --accuracy"
        )

    # ---- Step 3: the tables and figures.
    shown_groups = groups(runs(*options.roots, where=options.where, trials=options.trials))
    if options.fill:
        run_missing(names, shown_groups, options.fill, vars(options)["with"])
        return
    contents = make_tables_and_figures(
        groups=shown_groups,
        out=_output_folder(options, "figures"),
        rule=rule,
        names=names,
    )
    is_empty = True
    for name, content in contents:
        is_empty = False
        if isinstance(content, Table):
            _show_table(name, content, options)
        else:
            _report_files(content)
    if is_empty:
        roots = ", ".join(map(str, options.roots))
        print_to_stderr(
            f"nothing of the papers' can be filled from the runs below {roots}; name a table "
            f"({', '.join(TABLES)}) to see the commands that fill it"
        )


def _write_html(options: Namespace) -> None:
    from fedpfl.report.html import write_pages  # jinja2 and plotly are slow to load

    files = write_pages(
        roots=options.roots,
        out=_output_folder(options, "report"),
        select=options.select,
        every=options.every or 1,
        where=options.where,
        table=partial(accuracy_table, beside=published_beside),
        trials=options.trials,
    )
    _report_files(files)


def _list_runs(options: Namespace) -> None:
    entries = listing.list_entries(_find_directories(options))
    if not entries:
        raise no_runs_error(options.roots)
    if options.status:
        entries = [entry for entry in entries if entry.directory.status in options.status]
    if options.sort:
        entries = listing.sort_entries(entries, options.sort)
    answer.add_facts(runs=[entry.record for entry in entries])
    form = options.format or "terminal"
    print(render(listing.entries_table(entries), form, terminal_width() or _WIDE), end="")


def _compare_sides(options: Namespace) -> None:
    a, b = find_sides(options.roots, options.where, options.trials)
    show_tables(*compare_groups(a, b, options.select), form=options.format or "terminal")


def _rank_runs(options: Namespace) -> None:
    tables, result = rank_tables(
        _find_runs(options), options.accuracy, options.select, options.every or 1
    )
    show_tables(*tables, form=options.format or "terminal")
    _report_files(draw_rank_diagram(result, _output_folder(options, "figures") / "ranks"))


def _judge_claims(options: Namespace) -> None:
    if not options.claims:
        raise FedpflError("name a claim, as: python -m fedpfl.report claim 'fedobp > fedper'")
    sentences = [claims.parse_claim(text) for text in options.claims]
    table = claims.judge_claims(_find_runs(options), sentences, options.by, options.accuracy)
    show_tables(table, form=options.format or "terminal")


def _show_power(options: Namespace) -> None:
    table = claims.power_table(_find_runs(options), options.accuracy)
    show_tables(table, form=options.format or "terminal")


def _clean_directories(options: Namespace) -> int:
    return cleaning.clean_runs(
        _find_directories(options), options.status, options.yes, options.roots
    )


# ---- shared functions


def _find_runs(options: Namespace) -> list[Run]:
    found_runs = runs(*options.roots, where=options.where, trials=options.trials)
    if not found_runs:
        raise no_runs_error(options.roots)
    return found_runs


def _find_directories(options: Namespace) -> list[Directory]:
    """Return run directories; with filters none that cannot be read."""
    directories = read_directories(options.roots, options.where, options.trials)
    return [directory for directory in directories if directory.run or not options.where]


def _output_folder(options: Namespace, name: str) -> Path:
    return options.out or options.roots[0] / name


def _report_files(targets: Iterable[Path]) -> None:
    for target in targets:
        answer.add_facts(files=[target])
        print_to_stderr(f"wrote {target}")


def _show_table(name: str, table: Table, options: Namespace) -> None:
    """Print a table, or write it below `options.out` in `options.format`.

    The default is all formats but the terminal's.
    """
    if options.caption:
        # The table's own caption says what deviations are over.
        table = replace(table, caption=options.caption, notes=(table.caption, *table.notes))
    table = replace(table, pm=options.pm)
    if options.format in (None, "terminal") or not options.out:
        show_tables(table, form=options.format or "terminal")
    if options.out:
        for form in [options.format] if options.format else [*FORMATS][1:]:
            target = options.out / f"{name.replace('/', '_')}{FORMATS[form]}"
            with atomic_output(target) as file:
                file.write_text(render(table, form), encoding="utf-8")
            _report_files([target])


# ---- the table of commands

_TABLES = (
    "--columns --format --pm --caption --select --every --published --beside --fairness "
    "--interval --reference --out"
)
COMMANDS = {
    "": Command(
        _show_runs,
        "Print the table of all runs and draw their figures.",
        "outputs/demo method=fedobp,fedavg",
        f"{_TABLES} --metric --over",
    ),
    "tables": Command(
        _show_tables,
        "Print the table of all runs.",
        "tables dataset=digits partition.alpha=0.1 --format markdown",
        _TABLES,
    ),
    "figures": Command(
        _show_figures,
        "Draw accuracy over rounds, clients from the worst to the best, and their gains.",
        "figures outputs/demo method=fedobp,fedavg --out figures",
        "--kind --metric --over --reference --out",
    ),
    "paper": Command(
        _show_papers,
        "Show five papers' tables and figures from own runs; without a NAME, all that have runs.",
        "paper fedobp/table4 figure4 seed=1,2,3 --out tables",
        "--accuracy --select --every --fill --with --format --pm --caption --out",
    ),
    "html": Command(
        _write_html,
        "Write an HTML page per experiment, which loads nothing from anywhere.",
        "html outputs dataset=cifar10 --out pages",
        "--out --select --every",
    ),
    "ls": Command(
        _list_runs,
        "List runs, one line each: status, what, accuracy, cost, age and path. "
        "Without filters also broken ones.",
        "ls method=fedobp dataset=digits --status running,interrupted --sort accuracy",
        "--status --sort --format",
    ),
    "compare": Command(
        _compare_sides,
        "Compare two configurations: settings, final numbers over seeds, clients.",
        "compare outputs/demo method=fedavg,fedobp",
        "--select --format",
    ),
    "ranks": Command(
        _rank_runs,
        "Rank methods over data sets and partitions: Friedman, Wilcoxon with Holm's correction, a "
        "diagram.",
        "ranks outputs/fedobp method=fedavg,fedper,fedobp,local_only",
        "--accuracy --format --select --every --out",
    ),
    "claim": Command(
        _judge_claims,
        "Judge claims such as 'fedobp > fedper': supported, not supported, or so many more seeds.",
        "claim 'fedobp > fedper' 'fedobp > fedavg' outputs/fedobp --by 1",
        "--by --accuracy --format",
    ),
    "power": Command(
        _show_power,
        "Tell which differences 3, 5, 10 and 20 seeds can show, from the spread in these runs.",
        "power outputs/fedobp",
        "--accuracy --format",
    ),
    "clean": Command(
        _clean_directories,
        "Remove runs that came to nothing, after asking; never one that has ended or is written.",
        "clean outputs/demo method=fedobp --status interrupted",
        "--yes --status",
    ),
}


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
