"""Tune all methods alike on a suite of settings and rank them; `verify` runs a row again.

    python -m fedpfl.board suite=small                       # conf/board/small.yaml; writes outputs/board/small/
    python -m fedpfl.board suite=small method=fedavg,fedper,local_only trials=4 seeds=2
    python -m fedpfl.board verify 3d2c suite=small           # the row whose configuration begins so: equal or not?

Each method is tuned as `python -m fedpfl.tune` does: as many trials for all, chosen by held-out
samples, then fresh seeds. Other words are those of fedpfl.train, for all runs alike, launchers
among them. The same command goes on where it was stopped. `verify` ends with status 0 where the row
is equal, 1 where it is not.
"""

from __future__ import annotations

import sys

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.install_handler(interrupts.exit_during_import)
    terminal.outlive_readers()

import contextlib
import csv
import hashlib
import io
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from fedpfl.config import overrides
from fedpfl.config.foreign import ForeignRuns, read_untrusted_command
from fedpfl.config.messages import format_error
from fedpfl.config.run_location import register_resolver
from fedpfl.config.sweep import preload_datasets
from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.ground.files import atomic_output
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words, replaced_words
from fedpfl.methods import METHODS
from fedpfl.report import html
from fedpfl.report.fairness import (
    BASELINES,
    compare_with_baselines,
    comparisons_table,
    label_and_column,
)
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.grouping import Group, groups, require_classes
from fedpfl.report.load import runs
from fedpfl.report.ranking import draw_rank_diagram, drop_gaps, rank_methods, rank_tables
from fedpfl.report.render import render, terminal_width
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, mean_and_std
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, accuracy_table
from fedpfl.report.text import clip_text, csv_cell, join_few
from fedpfl.runner.faults import EXIT_STATUS, Diverged
from fedpfl.runner.spaces import make_search_space
from fedpfl.runner.tuning import locate_final_runs, tune_methods
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
    "accuracy": COLUMNS["accuracy"],
    "accuracy_worst10": COLUMNS["accuracy_worst10"],
    "ft_accuracy": COLUMNS["ft_accuracy"],
    "unseen_accuracy": COLUMNS["unseen_accuracy"],
    "unseen_ft_accuracy": COLUMNS["unseen_ft_accuracy"],
    "asr": COLUMNS["asr"],
    "ft_asr": COLUMNS["ft_asr"],
    "gap": COLUMNS["gap"],
    **{
        f"harmed_{name}": Column("harmed %", "percent", f"vs {label}")
        for name, label in BASELINES.items()
    },
    "bits_down": COLUMNS["bits_down"],
    "bits_up": COLUMNS["bits_up"],
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
_NUMBER = r"\d+(\.\d+)+\S*"
VERSIONS_PATTERN = re.compile(
    rf"fedpfl {_NUMBER}, torch {_NUMBER}, python {_NUMBER}, commit (None|[0-9a-f]+)( [0-9a-f]+)*"
)
"""The form in which `describe_provenance` writes versions."""
CAPTION = (
    "Test accuracy in percent, mean (sample standard deviation) over fresh seeds, at each run's "
    "round of the best validation accuracy; harmed: percent of clients that are worse off than "
    "with FedAvg+FT, or alone, after the last round; sim s/round: simulated, on equal devices, "
    "mean over rounds; rank: mean over settings, FedAvg judged after fine-tuning."
)


class BoardCommand(NamedTuple):
    """Hold what a command line asks for.

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
    arguments = check_words(arguments, {}, HELP_ADVICE)
    note = replaced_words(arguments)
    if note:
        print_notice(note)
    # The last of two words for one key counts, as with Hydra.
    values = {key: value for key, _, value in (word.partition("=") for word in arguments)}

    # ---- The suite, with what the command line replaces of it
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
    suite_words = [word for word in suite["words"] if _key_of(word) not in values]
    board_keys = ("suite", "hydra.sweep.dir", *SUITE_KEYS)
    run_words = [word for word in arguments if _key_of(word) not in board_keys]
    return BoardCommand(suite, folder, [*suite_words, *run_words])


def _key_of(word: str) -> str:
    return word.partition("=")[0]


FinalRuns = dict[Path, Mapping[str, Any]]
"""By run directory of a final run: its method's record in the table of `tune`, and the setting."""


def tune_suite(command: BoardCommand) -> tuple[FinalRuns, list[str]]:
    """Tune all methods in all settings; return final runs and failures."""
    suite = command.suite
    methods = _methods_of_suite(suite)
    counts = [f"trials={suite['trials']}", f"seeds={suite['seeds']}"]

    # Whatever is wrong with the command is said now, not hours later.
    configs = _compose_settings(command, [f"method={methods[0]}", *counts])

    # ---- One method after another; a setting without its data is left out
    final_runs: FinalRuns = {}
    failures: list[str] = []

    def add_failure(failure: str) -> None:
        failures.append(failure)
        print_notice(failure)

    for setting, setting_words in suite["settings"].items():
        try:
            preload_datasets([configs[setting]])
        except FedpflError as error:
            add_failure(f"{setting}: left out: {error}")
            continue
        folder = command.folder / setting
        for method in methods:
            tuning_words = [
                f"method={method}",
                *setting_words,
                *command.run_words,
                *counts,
            ]
            tuning_words += overrides.format_words("hydra.sweep.dir", str(folder))
            try:
                table = tune_methods(parse_request(tuning_words), run_or_exit)
                (record,) = table.frame.to_dict("records")
            except (FedpflError, *overrides.HYDRA_ERRORS) as error:
                add_failure(f"{setting}, {method}: left out: {format_error(error)}")
                continue
            except SystemExit as exit_request:
                # A user who interrupts wants no board of the rest.
                if exit_request.code in INTERRUPTED_STATUSES:
                    raise
                # Its jobs have said by themselves what was wrong.
                failures.append(
                    f"{setting}, {method}: left out: its runs failed (status {exit_request.code})"
                )
                continue
            final_words, seeds = _words_and_seeds(record["command"])
            for path in locate_final_runs(folder / "final", final_words, seeds):
                final_runs[path.resolve()] = {**record, "setting": setting}
    return final_runs, failures


def _compose_settings(command: BoardCommand, words_of_tuning: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of each setting, without a method's values."""
    parse_request(words_of_tuning)
    shared_words = [
        word
        for word in command.run_words
        if not (word.startswith("method.") or overrides.is_sweep(word))
    ]
    return {
        setting: overrides.compose_config([*setting_words, *shared_words])
        for setting, setting_words in command.suite["settings"].items()
    }


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
        final_runs: What `tune_suite` returns.
        failures: Lines for the notes.
        title: The table's title.
    """
    # ---- Accuracies, harms and ranks
    finished_runs = [run for run in runs(*final_runs.keys()) if run.status == "finished"]
    run_groups = groups(finished_runs)
    require_classes(run_groups, "fedpfl.board")
    accuracies = accuracy_table(finished_runs, "validation", chosen=MEASURED)
    harms, fairness_notes = _harms_by_group(run_groups)
    mean_ranks, rank_notes = _mean_ranks(finished_runs)

    # ---- A row for each configuration
    records = []
    for group, row in zip(run_groups, accuracies.frame.to_dict("records"), strict=True):
        run = group.runs[0]
        tuning_record = final_runs[run.path.resolve()]
        # FedAvg's row is ranked after fine-tuning, under that name.
        label = BASELINES["fedavg"] if run.method_name == "fedavg" else label_and_column(group)[0]
        sim_seconds, _ = mean_and_std([_mean_sim_seconds(run) for run in group.reported_runs])
        names = [name for name in _with_spreads(MEASURED) if row.get(name) is not None]
        records.append(
            {
                "setting": f"{tuning_record['setting']}: {group.setting}",
                "rank": mean_ranks.get(run.method_title, mean_ranks.get(label)),
                "method": run.method_title,
                **{name: row[name] for name in names},
                **_select_harms(harms.get(group, {})),
                SIMULATED: sim_seconds,
                "seeds": len(group.reported_runs),
                "chosen": tuning_record["chosen"],
                "identity": run.identity,
                **describe_provenance(group.reported_runs),
                "command": tuning_record["command"],
            }
        )
    records.sort(key=_by_setting_and_accuracy)

    # ---- Notes: what is missing, and why
    notes = [*rank_notes, *failures, *_diverged_notes(final_runs, finished_runs), *fairness_notes]
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


def _by_setting_and_accuracy(record: Mapping[str, Any]) -> tuple[str, float]:
    """Return the key by which rows are sorted: the best of each setting first, empty ones last."""
    return record["setting"], -float(np.nan_to_num(record["accuracy"], nan=-1.0))


def _with_spreads(names: Iterable[str]) -> Iterator[str]:
    """Yield each column's name, then that of its standard deviation over seeds."""
    for name in names:
        yield name
        yield f"{name}_seed_std"


def _select_harms(harm_record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's columns `harmed_<baseline>`, None without that baseline."""
    names = _with_spreads(f"harmed_{baseline}" for baseline in BASELINES)
    return {name: harm_record.get(name) for name in names}


def _harms_by_group(
    run_groups: Sequence[Group],
) -> tuple[dict[Group, dict[str, Any]], tuple[str, ...]]:
    """Return each configuration's record of `fairness`, and the notes on baselines."""
    comparisons, notes = compare_with_baselines(run_groups)
    judged_groups = [comparison.group for comparison in comparisons if comparison.accuracies]
    records = comparisons_table(comparisons, ()).frame.to_dict("records")
    return dict(zip(judged_groups, records, strict=True)), notes


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
    """Return a note for each method of which a final run is not finished."""
    finished_paths = {run.path.resolve() for run in finished_runs}
    names = dict.fromkeys(
        f"{record['setting']}, {record['method']}"
        for path, record in final_runs.items()
        if path not in finished_paths
    )
    return [f"{name}: runs with fresh seeds diverged, and are in no mean." for name in names]


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

    The row is data of a stranger's: of its command nothing is run but known keys with plain values.
    What it shows beside FedAvg and Local-Only needs the runs of their rows, too.

    Raises:
        FedpflError: if there is no such row.
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
    row_name = f"{row['method']}, {row['setting']}"

    # ---- Run it again, and the rows that it is measured against
    final_runs: FinalRuns = {}
    for record in (row, *_baseline_rows(board_rows, row)):
        foreign_runs = _with_known_data(read_untrusted_command(record["command"]), command)
        setting = _setting_of(record, foreign_runs, command)
        for run_path in _play_again(foreign_runs, command.folder / "verify"):
            final_runs[run_path.resolve()] = {**record, "setting": setting}

    # ---- Make its columns from the new runs
    new_table, _ = make_board(final_runs, [], "")
    new_rows = pd.read_csv(_as_csv(new_table.frame), dtype=str, keep_default_na=False)
    new_matches = [new for new in new_rows.to_dict("records") if new["identity"] == row["identity"]]
    if not new_matches:
        identities = join_few(new_rows["identity"]) if len(new_rows) else "no finished run"
        print_notice(f"{row_name}: not equal: its command makes {identities}, no {row['identity']}")
        return 1
    # These follow from the other rows and the search, which are not run again.
    remade_columns = {"rank": _rank_of(board_rows, row), "chosen": _chosen_words(row, command)}
    new_row = new_matches[0] | remade_columns

    # ---- Compare all columns
    # Another machine has other versions: they are reported, and make no row unequal.
    has_known_versions = "versions" not in row or VERSIONS_PATTERN.fullmatch(row["versions"])
    different_columns = [key for key in row if row[key] != new_row.get(key, "")]
    if has_known_versions and "versions" in different_columns:
        different_columns.remove("versions")
    if different_columns:
        differences = "; ".join(
            f"{key} {row[key]} there, {new_row.get(key, '')} here" for key in different_columns
        )
        print_notice(f"{row_name}: not equal: {differences}; versions {new_row['versions']}")
        return 1
    print(f"{row_name}: equal, every number of {new_row['seeds']} runs")
    if row.get("versions", new_row["versions"]) != new_row["versions"]:
        print(f"  made with other versions: {row['versions']} there, {new_row['versions']} here")
    return 0


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a board's CSV as texts, which may be anybody's.

    Raises:
        FedpflError: for what no board writes: cells that a spreadsheet would take for a formula or
            a terminal obey, rows of another length, a column twice.
    """
    # ---- Step 1: the file.
    if not path.is_file():
        raise FedpflError(
            f"{path} is absent; make it with python -m fedpfl.board, or give its folder"
        )
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file, strict=True)
    except (OSError, ValueError, csv.Error) as error:
        raise FedpflError(f"{path} cannot be read as a board: {error_text(error)}") from None
    missing_columns = {"identity", "command", "setting", "method", "chosen"} - {*header}
    if missing_columns:
        raise FedpflError(f"{path} is no board: it has no column {min(missing_columns)}")

    # ---- Step 2: its cells.
    for number, line in enumerate([header, *lines], start=1):
        # pandas would fill up short lines and take two columns of a name for one.
        if len(line) != len(header) or len({*header}) < len(header):
            raise FedpflError(
                f"{path}: line {number} has not one cell for each of {len(header)} different "
                "columns"
            )
        cells = [re.sub(r"\s", " ", cell) for cell in line]
        for cell in cells:
            # A spreadsheet would run a cell that begins with `=`, a terminal one with escapes.
            if csv_cell(cell) != cell:
                raise FedpflError(
                    f"{path}: line {number} has a cell that is no plain text: {clip_text(cell)!r}"
                )
    return pd.DataFrame(lines, columns=header, dtype=str)


def _with_known_data(foreign_runs: ForeignRuns, command: BoardCommand) -> ForeignRuns:
    """Return a stranger's runs, which download no data set but those of the suite."""
    suite_words = {
        word for setting_words in command.suite["settings"].values() for word in setting_words
    }
    dataset_words = {word for word in foreign_runs.run_words if word.startswith("dataset=")}
    if dataset_words <= suite_words:
        return foreign_runs
    return foreign_runs._replace(run_words=[*foreign_runs.run_words, "dataset.download=false"])


def _setting_of(record: Mapping[str, str], foreign_runs: ForeignRuns, command: BoardCommand) -> str:
    """Return the setting whose words a row has; of several, the one that it names."""
    fitting_settings = [
        setting
        for setting, setting_words in command.suite["settings"].items()
        if {*setting_words} <= {*foreign_runs.run_words}
    ]
    setting_name = record["setting"].partition(": ")[0]
    if setting_name in fitting_settings:
        return setting_name
    return fitting_settings[0] if fitting_settings else "none of the suite"


def _baseline_rows(board_rows: pd.DataFrame, row: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the rows of the baselines that a row's columns `harmed_...` compare it with.

    Raises:
        FedpflError: if a baseline has several rows in the setting.
    """
    # A column that is there but empty counts: the cell may have been emptied.
    baselines = [name for name in BASELINES if f"harmed_{name}" in row]
    is_same_setting = board_rows["setting"] == row["setting"]
    other_rows = board_rows[is_same_setting & (board_rows["identity"] != row["identity"])]
    # By the command, which `verify` checks: a title may be anything.
    methods = other_rows["command"].str.extract(r" method=(\w+) ", expand=False)
    records: list[dict[str, str]] = []
    for name in baselines:
        baseline_rows = other_rows[methods == name].to_dict("records")
        if len(baseline_rows) > 1:
            raise FedpflError(
                f"{row['setting']} has several rows of method={name}, which others are measured by"
            )
        records += baseline_rows
    return records


def _play_again(foreign_runs: ForeignRuns, root: Path) -> list[Path]:
    """Run a stranger's words anew; return the run directories."""
    seeds = ",".join(map(str, foreign_runs.seeds))
    options = ["-m", *overrides.format_words("hydra.sweep.dir", str(root))]
    run_words = [
        *foreign_runs.run_words,
        f"seed=choice({seeds})",
        "hydra.sweeper.table=false",
        "restart=true",
    ]
    # A row counts the runs that did not diverge, so others may.
    run_or_exit(options, run_words, accepted_status=EXIT_STATUS[Diverged])
    return locate_final_runs(root, foreign_runs.run_words, foreign_runs.seeds)


def _rank_of(board_rows: pd.DataFrame, row: Mapping[str, str]) -> str:
    """Return a row's mean rank by the accuracies of all rows, "" without ranks."""
    accuracies: dict[str, dict[str, float]] = {}
    for record in board_rows.to_dict("records"):
        is_fedavg = record["method"].startswith("FedAvg") and " method=fedavg " in record["command"]
        value = record.get("ft_accuracy" if is_fedavg else "accuracy")
        # A row whose number is damaged is not equal; this one may be.
        with contextlib.suppress(ValueError):
            if value:
                accuracies.setdefault(record["setting"], {})[record["method"]] = float(value)
    try:
        without_gaps, _ = drop_gaps(accuracies)
        rank = rank_methods(without_gaps).ranks.mean().get(row["method"])
    except FedpflError:
        return ""
    if rank is None:
        return ""
    return pd.read_csv(_as_csv(pd.DataFrame({"value": [rank]})), dtype=str)["value"][0]


def _chosen_words(row: Mapping[str, str], command: BoardCommand) -> str:
    """Return which words of a row's command its search has chosen."""
    run_words = read_untrusted_command(row["command"]).run_words
    method = overrides.read_text_value(run_words, "method")
    setting_name = row["setting"].partition(": ")[0]
    setting_words = command.suite["settings"].get(setting_name, [])
    search_space = make_search_space(method, [*setting_words, *command.run_words])
    searched_keys = {_key_of(word) for word in search_space}
    return " ".join(word for word in run_words if _key_of(word) in searched_keys)


def _mean_sim_seconds(run: Run) -> float:
    """Return a run's simulated seconds a round, nan where it has none."""
    return float(run.rounds.reindex(columns=[SIMULATED]).mean().item())


def _as_csv(frame: pd.DataFrame) -> io.StringIO:
    """Return a table's numbers as the board's CSV has them."""
    return io.StringIO(render(Table("", (), [], frame), "csv"))


def _words_and_seeds(command: str) -> tuple[list[str], list[int]]:
    """Return the words and the seeds of a row's command."""
    *run_words, seed_word = shlex.split(command)[4:]
    seeds = seed_word.partition("=")[2].split(",")
    return run_words, [int(seed) for seed in seeds]


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
    """Run a row again: `ROW suite=NAME [hydra.sweep.dir=DIR]`."""
    if not arguments:
        raise FedpflError("verify needs a row: python -m fedpfl.board verify ROW suite=small")
    identity_prefix, *board_words = arguments
    for word in board_words:
        if not word.startswith(("suite=", "hydra.sweep.dir=")):
            raise FedpflError(f"{word}: verify runs the words of the row itself; leave it out")
    check_words([identity_prefix], {}, HELP_ADVICE)
    return verify_row(identity_prefix, read_command_line(board_words))


if __name__ == "__main__":
    interrupts.install_handler(interrupts.raise_interrupt)
    raise SystemExit(main())
