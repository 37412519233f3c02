"""Tables and figures from run directories: `python -m fedpfl.report [COMMAND] [ROOT ...]`.

See `--help`.
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

from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.ground.files import atomic_output
from fedpfl.ground.tasks import CLASSIFICATION
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
from fedpfl.report.grouping import common_task, group_by, groups, task_metric
from fedpfl.report.load import inspect_directories, no_runs_error, print_to_stderr, runs
from fedpfl.report.outcomes import (
    clients_figure,
    fairness_figure,
    gains_figure,
    traffic_figure,
)
from fedpfl.report.page.data import AXIS_TITLES
from fedpfl.report.ranking import draw_rank_diagram, rank_tables
from fedpfl.report.reach import reach_figure, reach_table
from fedpfl.report.render import FORMATS, render, terminal_width
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Table
from fedpfl.report.tables import ACCURACIES, COLUMNS, CURVES, SELECTIONS, accuracy_table


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0, 2 for a mistake of the user's, or 1 where `clean` left something.
    """
    # Without a command's name the first words are folders and filters of the plain table.
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in COMMANDS else ""
    run_command, *_ = COMMANDS[name]
    parser = _make_parser(name)
    try:
        status = _run_command(run_command, parser.parse_intermixed_args(words))
        sys.stdout.flush()
    except BrokenPipeError:
        _mute_stdout()  # `| head` has seen enough
        return 0
    except OSError as error:
        if error.filename is None:  # the screen: what is buffered would fail once more at exit
            _mute_stdout()
        print_notice(f"{error.filename or 'cannot write standard output'}: {error_text(error)}")
        return 2
    return status


def _make_parser(name: str) -> Parser:
    """Return the parser of a command's options."""
    _, description, example, options = COMMANDS[name]
    epilog = f"{FILTERS}\n\n{example}"
    if not name:
        summaries = ""
        for command, (_, text, *_) in COMMANDS.items():
            if command:
                summaries += f"  {command:8}  {re.split('[.:;]', text)[0]}\n"
        epilog += f"\n\nOther commands, each with its own --help:\n{summaries}"
    parser = Parser(
        prog=f"python -m fedpfl.report {name}".strip(),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flags, settings in (*options, TRIALS):
        parser.add_argument(*flags.split(), **settings)
    return parser


def _run_command(run_command: Callable[[Namespace], int | None], options: Namespace) -> int:
    """Run a command after its words are split into filters and folders."""
    options.where = [word for word in options.words if is_filter(word)]
    options.words = [word for word in options.words if not is_filter(word)]
    options.roots = [*map(Path, options.words)] or [Path("outputs")]
    try:
        return run_command(options) or 0
    except FedpflError as error:
        print_notice(error)
        return 2


def _mute_stdout() -> None:
    """Let nothing be written to standard output any more, at exit neither."""
    # Python flushes the stream when it ends; a closed one would make that an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- the commands


def _show_runs(options: Namespace, only: str = "") -> None:
    """Show the tables and figures of all runs, and the paper's if asked for.

    Args:
        options: the command's options.
        only: `tables` or `figures`.
    """
    # ---- Step 1: the runs, and whether what was asked goes together.
    shown_runs = _find_runs(options)
    has_fairness = only != "figures" and options.fairness
    if has_fairness and options.select != "last":
        raise FedpflError(
            "--fairness is of the last evaluation, which clients.csv holds; leave out --select"
        )

    # ---- Step 2: tables.
    if only != "figures":
        has_further_tables = bool(options.fairness or options.reference or options.paper)
        _check_caption(options, has_further_tables)
        table = accuracy_table(
            shown_runs,
            select=options.select,
            every=options.every or 1,
            beside=partial(published_beside, everywhere=options.published),
            chosen=options.columns,
            interval=options.interval,
        )
        _show_table("accuracy", table, options)
        if options.reference:
            _show_table("curves", curve_table(shown_runs, options.reference), options)
    if has_fairness:
        _show_table("fairness", fairness_table(shown_runs), options)

    # ---- Step 3: figures.
    if only != "tables":
        is_of_curves = not only or (options.metric, options.over) != ("accuracy", "round")
        kinds = [] if not is_of_curves else ["curves"]
        _draw_figures(options, shown_runs, (only and options.kind) or kinds)
    if options.paper:
        selection = Selection(select=options.select, every=options.every or 100)
        _show_papers(shown_runs, options, selection, only=only)


def _draw_figures(options: Namespace, shown_runs: list[Run], kinds: Sequence[str]) -> None:
    """Draw figures of each data set, partition and task.

    Args:
        options: the command's options.
        shown_runs: the runs.
        kinds: of FIGURE_KINDS; none means all that these runs have.
    """
    folder = _output_folder(options, "figures")
    unknown = [kind for kind in kinds if kind not in FIGURE_KINDS]
    if unknown:
        raise FedpflError(f"no such --kind: {choices_text(FIGURE_KINDS, unknown[0])}")

    def file_name(run: Run) -> str:
        task = "" if run.task == CLASSIFICATION else f" {run.task.name}"
        return _file_name(f"{run.dataset}_{run.partition}{task}")

    for name, members in group_by(shown_runs, file_name).items():
        for kind in kinds or FIGURE_KINDS:
            if kind == "curves":
                _draw_curves(options, members, folder, name)
            elif kind != "ranks":
                path = folder / f"{kind}_{name}"
                draw = partial(FIGURE_KINDS[kind], members, path, options)
                _draw_or_explain(path.name, draw, is_required=bool(kinds))
    if "ranks" in kinds or (not kinds and len({run.method_name for run in shown_runs}) > 2):
        draw = partial(FIGURE_KINDS["ranks"], shown_runs, folder / "ranks", options)
        _draw_or_explain("ranks", draw, is_required=bool(kinds))


def _draw_or_explain(name: str, draw: Callable[[], list[Path]], is_required: bool) -> None:
    """Draw a figure, or say why these runs have none, unless it was asked for."""
    try:
        _report_files(draw())
    except FedpflError as error:
        if is_required:
            raise
        print_to_stderr(f"not drawn: {name}: {error}")


def _draw_curves(options: Namespace, members: list[Run], folder: Path, name: str) -> None:
    """Draw a metric over rounds, and beside a published curve where one is asked for."""
    axis = "" if options.over == "round" else f"_over_{options.over}"
    metric = task_metric(options.metric, common_task(members))
    files = accuracy_figure(
        members,
        folder / f"{metric}{axis}_{name}",
        options.metric,
        along=options.over,
        interval=options.interval,
    )
    if options.reference:
        files += draw_curves(members, options.reference, folder / f"curves_{name}")
    _report_files(files)


def _draw_ranks(shown_runs: list[Run], path: Path, options: Namespace) -> list[Path]:
    _, result = rank_tables(shown_runs, "accuracy", options.select, options.every or 1)
    return draw_rank_diagram(result, path)


def _draw_traffic(members: list[Run], path: Path, options: Namespace) -> list[Path]:
    return traffic_figure(members, path, options.select, options.every or 1, options.interval)


FIGURE_KINDS: dict[str, Callable[[list[Run], Path, Namespace], list[Path]]] = {
    "curves": lambda members, path, options: accuracy_figure(members, path),
    "clients": lambda members, path, options: clients_figure(members, path),
    "gains": lambda members, path, options: gains_figure(members, path),
    "fairness": lambda members, path, options: fairness_figure(members, path, options.interval),
    "traffic": _draw_traffic,
    "ranks": _draw_ranks,
}
"""What `figures` draws, each by runs, a path and the command's options."""


def _show_paper(options: Namespace) -> None:
    """Show tables and figures of papers, named among the words."""
    # ---- Step 1: names and folders.
    full_names = {}
    folders = []
    for word in options.words:
        full_name = find_full_name(word)
        if full_name:
            full_names[word] = full_name
        else:
            folders.append(Path(word))
    options.roots = folders or [Path("outputs")]
    absent = [root for root in options.roots if not root.is_dir()]
    if absent:
        raise FedpflError(
            f"{absent[0]} is neither a folder nor a table or figure; there are {', '.join(NAMES)}"
        )

    # ---- Step 2: the rule by which runs are judged.
    selection: Selection | None
    if options.select == AS_PUBLISHED:
        if options.every or options.accuracy != "accuracy":
            raise FedpflError(
                f"--select {AS_PUBLISHED} has rounds and accuracy of its own; "
                "leave out --every and --accuracy"
            )
        selection = None
    else:
        selection = Selection(
            options.accuracy,
            options.select,
            options.every or 100,
        )

    # ---- Step 3: the tables and figures.
    shown_runs = runs(
        *options.roots,
        where=options.where,
        trials=options.trials,
    )
    names = [*full_names.values()]
    _check_caption(options, len(names) != 1)
    _show_papers(
        shown_runs,
        options,
        selection,
        names=names,
        only=options.only or "",
        datasets=options.dataset,
        test=options.test or "",
    )


def _show_papers(
    shown_runs: Sequence[Run], options: Namespace, selection: Selection | None, **wishes: Any
) -> None:
    """Show what can be filled of the papers' tables and figures.

    Args:
        shown_runs: the runs.
        options: the command's options.
        selection: the rule by which runs are judged, None for each table's own.
        wishes: further arguments of `make_tables_and_figures`.
    """
    is_empty = True
    folder = _output_folder(options, "figures")
    for name, content in make_tables_and_figures(groups(shown_runs), folder, selection, **wishes):
        is_empty = False
        if isinstance(content, Table):
            _show_table(name, content, options)
        else:
            _report_files(content)
    if is_empty:
        folders = ", ".join(map(str, options.roots))
        print_to_stderr(
            f"nothing of the papers' can be filled from the runs below {folders}; name a table "
            f"({', '.join(TABLES)}) to see the commands that fill it"
        )


def _write_html(options: Namespace) -> None:
    from fedpfl.report.html import write_pages

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
    directories = inspect_directories(options.roots, options.where, options.trials)
    entries = listing.list_entries(directories)
    if not entries:
        raise no_runs_error(options.roots)
    entries = listing.select_statuses(entries, options.status)
    entries = listing.sort_entries(entries, options.sort, options.reverse)
    if options.format == "json":
        text = json.dumps([entry.record for entry in entries], indent=2) + "\n"
    else:
        width = terminal_width() or 1 << 30  # a pipe gets whole lines
        text = render(listing.entries_table(entries), options.format, width)
    print(text, end="")


def _compare_sides(options: Namespace) -> None:
    if options.out and options.out.suffix not in (".png", ".pdf"):
        raise FedpflError(f"--out {options.out}: must end in .png or .pdf")
    a, b = find_sides(options.roots, options.where, options.trials)
    tables = compare_groups(
        a,
        b,
        options.test,
        options.metric,
        options.select,
    )
    print(_render_for_screen(tables, options.format), end="")
    if options.out:
        _report_files(comparison_figure(a, b, options.metric, options.out))


def _show_reach(options: Namespace) -> None:
    shown_runs = _find_runs(options)
    _show_table("reach", reach_table(shown_runs, options.at), options)
    path = _output_folder(options, "figures") / "reach"
    _report_files(reach_figure(shown_runs, path, options.at))


def _rank_runs(options: Namespace) -> None:
    tables, result = rank_tables(
        _find_runs(options), options.accuracy, options.select, options.every or 1
    )
    print(_render_for_screen(tables, options.format), end="")
    _report_files(draw_rank_diagram(result, _output_folder(options, "figures") / "ranks"))


def _clean_directories(options: Namespace) -> int:
    return cleaning.clean_runs(
        roots=options.roots,
        statuses=options.status,
        where=options.where,
        yes=options.yes,
        trials=options.trials,
    )


# ---- what they share


def _find_runs(options: Namespace) -> list[Run]:
    found = runs(
        *options.roots,
        where=options.where,
        trials=options.trials,
    )
    if not found:
        raise no_runs_error(options.roots)
    return found


def _check_caption(options: Namespace, has_several_tables: bool) -> None:
    if options.caption and has_several_tables:
        raise FedpflError("--caption is of one table; ask for one alone")


def _output_folder(options: Namespace, name: str) -> Path:
    """Return the folder to write files into."""
    return options.out or options.roots[0] / name


def _report_files(targets: Iterable[Path]) -> None:
    for target in targets:
        print_to_stderr(f"wrote {target}")


def _render_for_screen(tables: Table | Sequence[Table], form: str | None) -> str:
    return render(tables, form or "terminal", terminal_width())


def _show_table(name: str, table: Table, options: Namespace) -> None:
    """Print a table, or write it below `options.out` in `options.format`.

    The default is all formats but the terminal's.
    """
    table = replace(
        table,
        pm=options.pm,
        caption=options.caption or table.caption,
    )
    if options.format in (None, "terminal") or not options.out:
        print(_render_for_screen(table, options.format), end="")
    if not options.out:
        return
    forms = [form for form in FORMATS if form != "terminal"]
    if options.format:
        forms = [options.format]
    for form in forms:
        target = options.out / f"{name.replace('/', '_')}{FORMATS[form]}"
        with atomic_output(target) as file:
            file.write_text(render(table, form), encoding="utf-8")
        _report_files([target])


def _file_name(text: str) -> str:
    """Return a file name of lower-case letters, digits, dots and underscores."""
    # Lower case: some file systems take names of other case for the same.
    name = re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")
    if len(name) <= 100:
        return name
    # Cut names may be equal; their digests are not.
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{name[:90]}_{digest}"


# ---- options


def _parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _split_list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _make_option(flags: str, text: str, **settings: Any) -> Option:
    return flags, settings | {"help": text}


Option = tuple[str, dict[str, Any]]
LIST_SETTINGS: dict[str, Any] = {"type": _split_list, "default": [], "metavar": "A,B"}
ROOTS = _make_option(
    "words", "folders of runs, default: outputs; and filters", nargs="*", metavar="ROOT|KEY=VALUE"
)
FORMAT = _make_option(
    "--format", "of tables; default: terminal, with --out all others", choices=[*FORMATS]
)
SELECT_HELP = (
    "which evaluation is judged; validation: the best on held-out samples; "
    "best-checkpoint: the best on test data"
)
FAIR_SELECTIONS = ("last", "validation")
PAPER_SELECT_HELP = f"{SELECT_HELP}; {AS_PUBLISHED}: by each table's own rule"
TRIALS = _make_option("--trials", "also trials of searches", action="store_true")
EVERY_N = _make_option(
    "--every",
    "best-checkpoint: of every N rounds only; paper: 100",
    type=_parse_positive,
    metavar="N",
)
SELECTION_OPTIONS = (
    _make_option("--select", SELECT_HELP, choices=SELECTIONS, default="last"),
    EVERY_N,
)
OUT = _make_option(
    "--out",
    "write there; default of figures: ROOT/figures, of pages: ROOT/report",
    type=Path,
    metavar="DIR",
)
ACCURACY = _make_option(
    "--accuracy", "which; default: mean over clients", choices=ACCURACIES, default="accuracy"
)
REFERENCE = _make_option(
    "--reference",
    "published curves (method,round,accuracy_before,accuracy_after)",
    type=Path,
    metavar="CSV",
)
PAPER = _make_option("--paper", "also the paper's, as far as there are runs", action="store_true")
FIELD_NAMES = ", ".join(key for key in COLUMNS if key not in METRICS)
COLUMNS_HELP = (
    f"only these, such as accuracy,ft_accuracy,bits_up: columns of rounds.csv, {FIELD_NAMES}"
)
PM = _make_option("--pm", "deviations as mean ± std", action="store_true")
CAPTION = _make_option("--caption", "of the table, instead of what it says", metavar="TEXT")
PUBLISHED = _make_option("--published", "published values beside any set-up", action="store_true")
TABLE_STYLE = (FORMAT, PM, CAPTION)
METRIC_HELP = (
    "of the curves, such as accuracy_pooled, accuracy_worst10, ft_accuracy; default: accuracy"
)
METRIC = _make_option("--metric", METRIC_HELP, choices=CURVES, default="accuracy", metavar="COLUMN")
INTERVAL = _make_option(
    "--interval", "95 %% confidence intervals instead of deviations", action="store_true"
)
KIND = _make_option("--kind", f"only these: {', '.join(FIGURE_KINDS)}", **LIST_SETTINGS)
ALONG = _make_option(
    "--over",
    "along the axis: rounds, also since a shift, gigabytes, hours of training or simulated ones",
    choices=[*AXIS_TITLES],
    default="round",
)
FAIRNESS = _make_option(
    "--fairness", "also which clients FedAvg+FT and Local-Only serve better", action="store_true"
)
TABLE_OPTIONS = (
    ROOTS,
    _make_option("--columns", COLUMNS_HELP, **LIST_SETTINGS),
    *TABLE_STYLE,
    *SELECTION_OPTIONS,
    PUBLISHED,
    FAIRNESS,
    INTERVAL,
)
FIGURE_OPTIONS = (METRIC, ALONG)
EXTRA_OPTIONS = (REFERENCE, PAPER, OUT)
SIDES_HELP = (
    "A and B: run directories, or folders that hold the seeds of one; or one that holds both"
)
TEST_HELP = "mark what differs from the last line, paired over seeds"
STATUS_HELP = (
    f"of {', '.join(cleaning.REMOVABLE)}; default: "
    f"{','.join(cleaning.DEFAULT_STATUSES)} that no command would go on with"
)
FILTERS = """Filters choose runs by any key of config.yaml, commas standing between alternatives:
  method=fedobp,fedavg dataset=digits partition.alpha=0.1
A folder of such a name is written ./KEY=VALUE."""

COMMANDS: dict[str, tuple[Callable[[Namespace], int | None], str, str, tuple[Option, ...]]] = {
    "": (
        _show_runs,
        "Print the table of all runs and draw their figures.",
        "Example: python -m fedpfl.report outputs/demo method=fedobp,fedavg",
        (*TABLE_OPTIONS, *FIGURE_OPTIONS, *EXTRA_OPTIONS),
    ),
    "tables": (
        partial(_show_runs, only="tables"),
        "Print the table of all runs.",
        "Example: python -m fedpfl.report tables dataset=digits partition.alpha=0.1 "
        "--format markdown",
        (*TABLE_OPTIONS, *EXTRA_OPTIONS),
    ),
    "figures": (
        partial(_show_runs, only="figures"),
        "Draw accuracy over rounds, and what methods come to: for clients, the worst of them, "
        "and the traffic; and their ranks.",
        "Example: python -m fedpfl.report figures outputs/demo method=fedobp,fedavg --out figures",
        (ROOTS, KIND, *FIGURE_OPTIONS, INTERVAL, *SELECTION_OPTIONS, *EXTRA_OPTIONS),
    ),
    "paper": (
        _show_paper,
        "Show five papers' tables and figures from own runs; without a NAME, all of "
        "which there are runs.",
        "Example: python -m fedpfl.report paper fedobp/table4 figure4 seed=1,2,3 --out tables",
        (
            _make_option(
                "words",
                "fedobp/table3, figure2, ...; folders; filters",
                nargs="*",
                metavar="NAME|ROOT|KEY=VALUE",
            ),
            _make_option("--only", "of what there are runs", choices=("tables", "figures")),
            _make_option("--dataset", "only these columns, such as fmnist", **LIST_SETTINGS),
            ACCURACY,
            _make_option(
                "--select", PAPER_SELECT_HELP, choices=(*SELECTIONS, AS_PUBLISHED), default="last"
            ),
            EVERY_N,
            _make_option("--test", TEST_HELP, choices=[*MIN_PAIRS]),
            *TABLE_STYLE,
            OUT,
        ),
    ),
    "html": (
        _write_html,
        "Write an HTML page per experiment, which loads nothing from anywhere.",
        "Example: python -m fedpfl.report html outputs dataset=cifar10 --out pages",
        (ROOTS, OUT, *SELECTION_OPTIONS),
    ),
    "ls": (
        _list_runs,
        "List runs, one line each: status, what, accuracy, cost, age and path. Without "
        "filters also broken ones.",
        "Example: python -m fedpfl.report ls method=fedobp dataset=digits --status "
        "running,interrupted --sort accuracy",
        (
            ROOTS,
            _make_option("--status", f"only these: {', '.join(STATUSES)}", **LIST_SETTINGS),
            _make_option(
                "--sort", "default: run, as in tables", choices=listing.SORTS, default="run"
            ),
            _make_option("--reverse", "the other way round", action="store_true"),
            _make_option(
                "--format", "default: terminal", choices=[*FORMATS, "json"], default="terminal"
            ),
        ),
    ),
    "compare": (
        _compare_sides,
        "Compare two configurations: settings, final numbers over seeds, curves, clients.",
        "Example: python -m fedpfl.report compare outputs/demo method=fedavg,fedobp "
        "--test wilcoxon",
        (
            _make_option("words", SIDES_HELP, nargs="*", metavar="A|B|KEY=VALUE"),
            _make_option(
                "--test",
                "paired over seeds, two-sided; default: t",
                choices=[*MIN_PAIRS, "none"],
                default="t",
            ),
            _make_option(
                "--select",
                "validation: at the best accuracy on held-out samples",
                choices=FAIR_SELECTIONS,
                default="last",
            ),
            METRIC,
            _make_option("--format", "default: terminal", choices=[*FORMATS], default="terminal"),
            _make_option("--out", "curves: .png or .pdf", type=Path, metavar="FILE"),
        ),
    ),
    "ranks": (
        _rank_runs,
        "Rank methods over data sets and partitions: Friedman, Wilcoxon with Holm's "
        "correction, a diagram.",
        "Example: python -m fedpfl.report ranks outputs/fedobp "
        "method=fedavg,fedper,fedobp,local_only",
        (ROOTS, ACCURACY, FORMAT, *SELECTION_OPTIONS, OUT),
    ),
    "reach": (
        _show_reach,
        "Tell what it takes until a method reaches an accuracy: rounds, gigabytes, hours.",
        "Example: python -m fedpfl.report reach outputs/demo --at 90",
        (
            ROOTS,
            _make_option("--at", "the accuracy in percent; default: 90", type=float, default=90.0),
            *TABLE_STYLE,
            OUT,
        ),
    ),
    "clean": (
        _clean_directories,
        "Remove runs that came to nothing, after asking. Never a finished one, nor one "
        "being written.",
        "Example: python -m fedpfl.report clean outputs/demo method=fedobp --status interrupted",
        (
            ROOTS,
            _make_option("--yes", "do not ask", action="store_true"),
            _make_option("--status", STATUS_HELP, **LIST_SETTINGS),
        ),
    ),
}


if __name__ == "__main__":
    outlive_readers()
    raise SystemExit(main())
