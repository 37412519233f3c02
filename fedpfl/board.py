"""Tune all methods alike on a suite of settings and rank them; `verify` runs a row again.

    python -m fedpfl.board suite=small                       # conf/board/small.yaml; writes outputs/board/small/
    python -m fedpfl.board suite=small method=fedavg,fedper,local_only trials=4 seeds=2
    python -m fedpfl.board verify 3d2c suite=small           # run a row again and compare it

Each method is tuned as `python -m fedpfl.tune` does: the same number of trials, chosen by
validation samples, then fresh seeds. Other words are those of fedpfl.train, for all runs, launchers
included; `verify` takes the words that the board was made with. The same command continues an
interrupted board. `verify` exits with 0 if the row is equal, with 1 if it is not.
"""

from __future__ import annotations

import sys

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.install_handler(interrupts.exit_during_import)
    terminal.outlive_readers()

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from fedpfl.config import overrides
from fedpfl.config.messages import format_error
from fedpfl.config.plan import check_config
from fedpfl.config.run_location import register_resolver
from fedpfl.config.sweep import preload_datasets
from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.ground.files import atomic_output
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words
from fedpfl.methods import METHODS
from fedpfl.report import html
from fedpfl.report.fairness import (
    BASELINES,
    compare_with_baselines,
    comparisons_table,
    label_and_column,
)
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.grouping import groups, require_classes
from fedpfl.report.load import runs
from fedpfl.report.ranking import draw_rank_diagram, rank_tables
from fedpfl.report.render import render, terminal_width
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, mean_and_std
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, accuracy_table
from fedpfl.report.text import join_few
from fedpfl.runner import tuning
from fedpfl.runner.faults import EXIT_STATUS, Diverged
from fedpfl.runner.spaces import make_search_space, override_key
from fedpfl.tune import parse_request, run_or_exit

HELP_ADVICE = "python -m fedpfl.board --help tells what it takes"
SUITES = Path(overrides.CONF) / "board"
SUITE_KEYS = ("trials", "seeds", "method")
"""Keys of a suite that the command line may replace."""
INTERRUPTED_STATUSES = (130, 143)

MEASURED = (
    "accuracy",
    "accuracy_worst10",
    "ft_accuracy",
    "unseen_accuracy",
    "unseen_ft_accuracy",
    "asr",
    "ft_asr",
    "gap",
    "values_down",
    "values_up",
    "bits_down",
    "bits_up",
)
SIMULATED = "sim_seconds"
"""The one column that is a mean over rounds."""
BOARD_COLUMNS = {
    "setting": Column("setting"),
    "rank": Column("rank", "decimal", spare=1),
    "method": ROW_COLUMNS["method"],
    **{name: COLUMNS[name] for name in MEASURED if not name.startswith("values")},
    **{
        f"harmed_{name}": Column("harmed %", "percent", f"vs {label}")
        for name, label in BASELINES.items()
    },
    SIMULATED: Column("sim s/round", "number"),
    "seeds": Column("seeds", "whole"),
    "chosen": Column("chosen"),
    "identity": Column("row"),
}
PROVENANCE_COLUMNS = {
    "data": Column("data"),
    "versions": Column("versions"),
    "command": Column("command", "long"),
}
NOT_VERIFIED = ("rank", "versions", "command")
"""Columns of a row that `verify` does not compare: they do not follow from its runs alone."""
CHOSEN_VALUE = re.compile(r"[\w.+-]+", re.ASCII)
CAPTION = (
    "Test accuracy in percent, mean (sample standard deviation) over fresh seeds, at each run's "
    "round of the best validation accuracy; harmed: percent of clients that are worse off than "
    "with FedAvg+FT, or alone, after the last round; sim s/round: simulated, on equal devices, "
    "mean over rounds; rank: mean over settings, FedAvg judged after fine-tuning."
)


class BoardCommand(NamedTuple):
    """Hold a command line of the board.

    Attributes:
        suite: The suite's content.
        folder: Where the board and its runs are.
        run_words: The words for all runs.
    """

    suite: Mapping[str, Any]
    folder: Path
    run_words: list[str]


def read_command_line(arguments: Sequence[str]) -> BoardCommand:
    """Read the command line. Raises FedpflError."""
    arguments = check_words(arguments, (), HELP_ADVICE)
    # The last of two words for one key counts, as with Hydra.
    values = {key: value for key, _, value in (word.partition("=") for word in arguments)}

    # ---- The suite, with the command line's replacements
    suite_names = sorted(path.stem for path in SUITES.glob("*.yaml"))
    suite_name = values.pop("suite", "")
    if suite_name not in suite_names:
        raise FedpflError(f"suite: {choices_text(suite_names, suite_name)}")
    suite = yaml.safe_load((SUITES / f"{suite_name}.yaml").read_text())
    suite |= {key: values.pop(key) for key in SUITE_KEYS if key in values}

    # ---- The folder
    sweep_dir = overrides.read_text_value(arguments, "hydra.sweep.dir")
    folder = Path(sweep_dir or f"outputs/board/{suite_name}")
    values.pop("hydra.sweep.dir", None)

    # ---- All other words are for the runs; they replace the suite's words of the same key
    suite_words = [word for word in suite["words"] if override_key(word) not in values]
    board_keys = ("suite", "hydra.sweep.dir", *SUITE_KEYS)
    run_words = [word for word in arguments if override_key(word) not in board_keys]
    return BoardCommand(suite, folder, [*suite_words, *run_words])


FinalRuns = dict[Path, Mapping[str, Any]]
"""By run directory of a final run: its method's record in the table of `tune`, and the setting."""


def tune_suite(command: BoardCommand) -> tuple[FinalRuns, list[str]]:
    """Tune all methods in all settings; return final runs and failures."""
    settings = command.suite["settings"]
    methods = _methods_of_suite(command.suite)
    # A mistake in the command is reported once, and before the first search.
    configs = {}
    for setting in settings:
        (words,) = tuning.split_words_by_method(
            _make_request(command, setting, methods[0])
        ).values()
        common_words = [word for word in words if not word.startswith("method.")]
        configs[setting] = tuning.check_words(methods[0], common_words)

    # ---- One method after another; a setting without its data is left out
    final_runs: FinalRuns = {}
    failures: list[str] = []

    def add_failure(failure: str) -> None:
        failures.append(failure)
        print_notice(failure)

    for setting in settings:
        try:
            preload_datasets([configs[setting]])
        except FedpflError as error:
            add_failure(f"{setting}: left out: {error}")
            continue
        for method in methods:
            request = _make_request(command, setting, method)
            try:
                (tuned,) = tuning.search_methods(request, run_or_exit)
            except (FedpflError, *overrides.HYDRA_ERRORS) as error:
                add_failure(f"{setting}, {method}: left out: {format_error(error)}")
                continue
            except SystemExit as exit_request:
                # A user who interrupts wants no board of the rest.
                if exit_request.code in INTERRUPTED_STATUSES:
                    raise
                # Its jobs have reported their errors.
                failures.append(
                    f"{setting}, {method}: left out: its runs failed (status {exit_request.code})"
                )
                continue
            for path in tuned.final_runs:
                final_runs[path.resolve()] = {**tuned.record, "setting": setting}
    return final_runs, failures


def _make_request(command: BoardCommand, setting: str, method: str) -> tuning.TuningRequest:
    """Return the request that tunes a method in a setting."""
    suite = command.suite
    return parse_request(
        [
            f"method={method}",
            *suite["settings"][setting],
            *command.run_words,
            f"trials={suite['trials']}",
            f"seeds={suite['seeds']}",
            *overrides.format_words("hydra.sweep.dir", str(command.folder / setting)),
        ]
    )


def _methods_of_suite(suite: Mapping[str, Any]) -> list[str]:
    """Return the methods that a suite compares. Raises FedpflError for one that does not exist."""
    if suite["method"] == "all":
        # Methods with `pairs` are for networks with low-rank pairs.
        return [name for name in sorted(METHODS) if not METHODS[name].pairs]
    methods = suite["method"].split(",")
    for method in methods:
        if method not in METHODS:
            raise FedpflError(f"method: {choices_text(sorted(METHODS), method)}")
    return methods


def make_board(
    final_runs: Mapping[Path, Mapping[str, Any]], failures: Sequence[str], title: str
) -> tuple[Table, list[Run]]:
    """Return the table of the final runs, and the finished ones among these.

    Args:
        final_runs: Result of `tune_suite`.
        failures: Lines for the notes.
        title: The table's title.
    """
    # ---- Accuracies, harms and ranks
    finished_runs = [run for run in runs(*final_runs.keys()) if run.status == "finished"]
    run_groups = groups(finished_runs)
    require_classes(run_groups, "fedpfl.board")
    accuracies = accuracy_table(finished_runs, "validation", chosen=MEASURED)
    comparisons, fairness_notes = compare_with_baselines(run_groups)
    judged_groups = [comparison.group for comparison in comparisons if comparison.accuracies]
    harm_records = comparisons_table(comparisons, ()).frame.to_dict("records")
    harms = dict(zip(judged_groups, harm_records, strict=True))
    mean_ranks, notes = _mean_ranks(finished_runs)

    # ---- A row for each configuration
    records = []
    for group, row in zip(run_groups, accuracies.frame.to_dict("records"), strict=True):
        run = group.runs[0]
        tuning_record = final_runs[run.path.resolve()]
        # FedAvg's row is ranked after fine-tuning, under that name.
        label = BASELINES["fedavg"] if run.method_name == "fedavg" else label_and_column(group)[0]
        seconds = [one.rounds.reindex(columns=[SIMULATED]).mean() for one in group.reported_runs]
        names = [name for name in _with_spreads(MEASURED) if row.get(name) is not None]
        harm_names = _with_spreads(f"harmed_{baseline}" for baseline in BASELINES)
        records.append(
            {
                "setting": f"{tuning_record['setting']}: {group.setting}",
                "rank": mean_ranks.get(run.method_title, mean_ranks.get(label)),
                "method": run.method_title,
                **{name: row[name] for name in names},
                **{name: harms.get(group, {}).get(name) for name in harm_names},
                SIMULATED: mean_and_std([float(mean.item()) for mean in seconds])[0],
                "seeds": len(group.reported_runs),
                "chosen": tuning_record["chosen"],
                "identity": run.identity,
                **describe_provenance(group.reported_runs),
                "command": tuning_record["command"],
            }
        )
    # The best of each setting first, empty ones last.
    records.sort(key=lambda row: (row["setting"], -np.nan_to_num(row["accuracy"], nan=-1.0)))

    # ---- Notes on missing numbers
    notes += failures
    notes += [*_diverged_notes(final_runs, finished_runs), *fairness_notes]
    notes += [note for note in accuracies.notes if note.startswith(("Empty", "Attack"))]
    table = Table.of(
        records,
        {**BOARD_COLUMNS, **PROVENANCE_COLUMNS},
        title=title,
        frame=pd.DataFrame(records),
        caption=CAPTION,
        notes=tuple(notes),
        by=1,
    )
    return table, finished_runs


def _mean_ranks(finished_runs: Sequence[Run]) -> tuple[dict[str, float], list[str]]:
    """Return each method's mean rank over settings, and notes."""
    try:
        tables, ranks = rank_tables(finished_runs, select="validation")
    except FedpflError as error:
        return {}, [f"No ranks: {error}."]
    notes = [note for note in tables[-1].notes if note.startswith("Left out")]
    return ranks.ranks.mean().to_dict(), notes


def _diverged_notes(
    final_runs: Mapping[Path, Mapping[str, Any]], finished_runs: Sequence[Run]
) -> list[str]:
    """Return a note for each method with a final run that is not finished."""
    finished_paths = {run.path.resolve() for run in finished_runs}
    names = dict.fromkeys(
        f"{record['setting']}, {record['method']}"
        for path, record in final_runs.items()
        if path not in finished_paths
    )
    return [f"{name}: runs with fresh seeds diverged, and are in no mean." for name in names]


def _with_spreads(names: Iterable[str]) -> Iterator[str]:
    """Yield each column's name, then the name of its standard deviation over seeds."""
    for name in names:
        yield name
        yield f"{name}_seed_std"


def describe_provenance(group_runs: Sequence[Run]) -> dict[str, str]:
    """Return data fingerprints, versions, and a digest of all numbers but times."""
    ordered_runs = sorted(group_runs, key=lambda run: run.seed)
    digest = hashlib.blake2b(digest_size=8)
    for run in ordered_runs:
        digest.update(run.reproducible_columns.to_csv(index=False).encode())
    environment = ordered_runs[0].environment
    versions = [f"{key} {environment.get(key)}" for key in ("fedpfl", "torch", "python")]
    commits = dict.fromkeys(str(run.environment.get("commit"))[:10] for run in ordered_runs)
    return {
        "data": " ".join(str(run.summary.get("data")) for run in ordered_runs),
        "versions": ", ".join([*versions, f"commit {' '.join(commits)}"]),
        "digest": digest.hexdigest(),
    }


def write_board(command: BoardCommand, table: Table, finished_runs: Sequence[Run]) -> None:
    """Write the board as CSV, Markdown and page, with figures and settings' pages."""
    folder = command.folder
    records = table.frame.to_dict("records")
    short_table = Table.of(
        records,
        BOARD_COLUMNS,
        caption=table.caption,
        notes=table.notes,
        by=1,
    )
    (folder / "board.csv").write_text(render(table, "csv"))
    (folder / "board.md").write_text(render(short_table, "markdown") + "\n")
    with atomic_output(folder / "board.html") as file:
        file.write_text(html.single_table_page(table), encoding="utf-8")
    final_folders = [folder / setting / "final" for setting in command.suite["settings"]]
    existing_folders = [path for path in final_folders if path.is_dir()]
    html.write_pages(existing_folders, folder / "pages", "validation")
    accuracy_figure(finished_runs, folder / "accuracy")
    try:
        _, ranks = rank_tables(finished_runs, select="validation")
        draw_rank_diagram(ranks, folder / "ranks")
    except FedpflError as error:
        print_notice(f"no diagram of ranks: {error}")
    print(render(short_table, width=terminal_width()))
    print_notice(f"wrote {folder / 'board.html'}")


# ---- verify


def verify_row(identity_prefix: str, command: BoardCommand) -> int:
    """Run a row of the board again; return 0 if it is equal, else 1.

    The suite composes the row's configuration; of the row only its method and its chosen values are
    read, and these must be values of the method's search space. Columns beside FedAvg and Local-Only
    need the runs of their rows too.

    Raises:
        FedpflError: if no such row exists, or the suite makes another.
    """
    # ---- Find the row
    path = command.folder / "board.csv"
    board_rows = read_rows(path)
    matching_rows = board_rows[board_rows["identity"].str.startswith(identity_prefix)]
    if len(matching_rows) != 1:
        candidates = board_rows if matching_rows.empty else matching_rows
        raise FedpflError(
            f"{path}: {len(matching_rows) or 'no'} rows begin with {identity_prefix!r}; "
            f"there are {join_few(candidates['identity'])}"
        )
    (row,) = matching_rows.to_dict("records")

    # ---- Run it again, and the rows of the baselines in its setting
    is_same_setting = board_rows["setting"] == row["setting"]
    final_runs = _play_again(row, command)
    for record in board_rows[is_same_setting].to_dict("records"):
        if _method_of(record) in BASELINES and record["identity"] != row["identity"]:
            final_runs |= _play_again(record, command)

    # ---- Compare the new row's columns with those of the row
    new_table, _ = make_board(final_runs, [], "")
    new_rows = _read_csv(io.StringIO(render(Table("", (), [], new_table.frame), "csv")))
    new_row = new_rows[new_rows["identity"] == row["identity"]].to_dict("records")[0]
    differences = [
        f"{key} {value!r} there, {new_row.get(key, '')!r} here"
        for key, value in row.items()
        if key not in NOT_VERIFIED and value != new_row.get(key, "")
    ]
    print_notice(f"versions: {row.get('versions', '')!r} there, {new_row['versions']!r} here")
    row_name = f"{new_row['method']}, {new_row['setting']}"
    if differences:
        print_notice(f"{row_name}: not equal: {'; '.join(differences)}")
        return 1
    print(f"{row_name}: equal, every number of {new_row['seeds']} runs")
    return 0


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a board's CSV as texts. Raises FedpflError for another file."""
    try:
        rows = _read_csv(path)
    except (OSError, ValueError) as error:
        raise FedpflError(
            f"{path} cannot be read as a board: {error_text(error)}; make it with "
            "python -m fedpfl.board, or give its folder"
        ) from None
    missing_columns = {"identity", "command", "setting", "chosen"} - {*rows}
    if missing_columns:
        raise FedpflError(f"{path} is no board: it has no column {min(missing_columns)}")
    return rows


def _read_csv(source: Path | io.StringIO) -> pd.DataFrame:
    return pd.read_csv(source, dtype=str, keep_default_na=False)


def _method_of(row: Mapping[str, str]) -> str:
    """Return the name of a row's method, "" if its command has none."""
    match = re.search(r" method=(\w+) ", row["command"])
    return match[1] if match else ""


def compose_row(row: Mapping[str, str], command: BoardCommand) -> list[str]:
    """Return the words of a row's runs as the suite composes them.

    Raises:
        FedpflError: if the suite makes another row.
    """
    # ---- Step 1: the words of the suite.
    setting = row["setting"].partition(": ")[0]
    method = _method_of(row)
    if setting not in command.suite["settings"] or method not in METHODS:
        raise FedpflError(f"row {row['identity']!r} is of no setting and method of the suite")
    request = _make_request(command, setting, method)
    (user_words,) = tuning.split_words_by_method(request).values()

    # ---- Step 2: the values that a search has chosen; a row may be a stranger's.
    searched_words = [
        *make_search_space(method, user_words),
        *filter(overrides.is_sweep, user_words),
    ]
    searched_keys = {override_key(word) for word in searched_words}
    chosen = row["chosen"].split()
    for word in chosen:
        key, _, value = word.partition("=")
        if key not in searched_keys or not CHOSEN_VALUE.fullmatch(value):
            raise FedpflError(
                f"row {row['identity']!r}: {word!r} is no value of the search space of method={method}"
            )
    final_words = tuning.join_final_words(method, user_words, chosen)

    # ---- Step 3: both make the row's configuration.
    own_identity = check_config(overrides.compose_single_run(final_words)).identity
    if own_identity != row["identity"]:
        raise FedpflError(
            f"row {row['identity']!r}: the suite and its chosen values make {own_identity}; give the "
            "words that the board was made with"
        )
    return final_words


def _play_again(row: Mapping[str, str], command: BoardCommand) -> FinalRuns:
    """Run a row's configuration anew; return its final runs."""
    final_words = compose_row(row, command)
    seeds = tuning.choose_seeds(final_words, int(command.suite["seeds"]))
    root = command.folder / "verify"
    options = ["-m", *overrides.format_words("hydra.sweep.dir", str(root))]
    seed_word = f"seed=choice({','.join(map(str, seeds))})"
    # A row counts the runs that did not diverge.
    run_or_exit(
        options,
        [*final_words, seed_word, "hydra.sweeper.table=false", "restart=true"],
        accepted_status=EXIT_STATUS[Diverged],
    )
    record = {**row, "setting": row["setting"].partition(": ")[0]}
    return {path.resolve(): record for path in tuning.locate_final_runs(root, final_words, seeds)}


def main() -> int:
    """Run the command; return the exit status."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments} or not arguments:
        print(__doc__)
        return 0
    try:
        register_resolver()
        if arguments[0] == "verify":
            return _run_verify(arguments[1:])
        return _run_board(arguments)
    except (FedpflError, *overrides.HYDRA_ERRORS) as error:
        print_notice(format_error(error))
        return 2
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, print_notice)
        return 130


def _run_board(arguments: Sequence[str]) -> int:
    """Tune a suite and write its board; return 1 where something failed."""
    command = read_command_line(arguments)
    final_runs, failures = tune_suite(command)
    if not final_runs:
        explanation = failures[0] if failures else "none was named"
        raise FedpflError(f"no method came to its end: {explanation}")
    table, finished_runs = make_board(
        final_runs,
        failures,
        f"Board {command.folder.name}",
    )
    write_board(command, table, finished_runs)
    return 1 if failures else 0


def _run_verify(arguments: Sequence[str]) -> int:
    """Run a row again: `ROW suite=NAME`, and the words that the board was made with."""
    if not arguments:
        raise FedpflError("verify needs a row: python -m fedpfl.board verify ROW suite=small")
    identity_prefix, *board_words = arguments
    check_words([identity_prefix], {}, HELP_ADVICE)
    return verify_row(identity_prefix, read_command_line(board_words))


if __name__ == "__main__":
    interrupts.install_handler(interrupts.raise_interrupt)
    raise SystemExit(main())
