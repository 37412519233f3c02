"""Tune all methods alike on a suite of settings and rank them; `verify` runs a row again.

    python -m fedpfl.board suite=small                       # conf/board/small.yaml; writes outputs/board/small/
    python -m fedpfl.board suite=small method=fedavg,fedper,local_only trials=4 seeds=2
    python -m fedpfl.board verify 3d2c suite=small           # run a row again and compare it
    python -m fedpfl.board submit 3d2c suite=small           # make the folder to send (CONTRIBUTING.md)

Each method is tuned as `python -m fedpfl.tune` does: the same number of trials, chosen by
validation samples (`metric=val_ft_accuracy`: after fine-tuning), then fresh seeds. Other words are
those of fedpfl.train, for all runs, launchers included; `verify` and `submit` take the words that the board was
made with. The same command continues an interrupted board. `verify` exits with 0 if the row is
equal, with 1 if it is not.
"""

from __future__ import annotations

import sys

from fedpfl.ground import answer, interrupts
from fedpfl.ground.records import Record, Values

if __name__ == "__main__":
    interrupts.begin_imports()

import hashlib
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from fedpfl.config import overrides, plugins
from fedpfl.config.messages import format_error
from fedpfl.config.plan import check_config
from fedpfl.config.sweep import preload_datasets
from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.ground.files import atomic_output
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words
from fedpfl.methods import METHODS
from fedpfl.report import html
from fedpfl.report.fairness import (
    BASELINES,
    BaselineComparison,
    compare_with_baselines,
    comparisons_table,
)
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.grouping import Group, groups, require_classes
from fedpfl.report.load import runs
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.power import SeedScore, describe_parting, number_groups
from fedpfl.report.ranking import MethodRanks, draw_rank_diagram, rank_tables
from fedpfl.report.render import render, show_tables
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, mean_and_std
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, accuracy_table, describe_validation
from fedpfl.report.text import join_few
from fedpfl.runner import tuning
from fedpfl.runner.faults import run_guarded
from fedpfl.runner.spaces import make_search_space, override_key
from fedpfl.tune import parse_request, run_or_exit

HELP_ADVICE = "python -m fedpfl.board --help tells what it takes"
SUITES = Path(overrides.CONF) / "board"
SUITE_KEYS = ("trials", "seeds", "method", "metric")
"""Keys of a suite that the command line may replace."""
INTERRUPTED_STATUSES = (130, 143)
MEASURED = (
    *("accuracy", "accuracy_worst10", "ft_accuracy", "unseen_accuracy", "unseen_ft_accuracy"),
    *("asr", "ft_asr", "gap", "values_down", "values_up", "bits_down", "bits_up"),
)
SIMULATED = "sim_seconds"
"""The one column that is a mean over rounds."""
HARMED = {f"harmed_{name}": label for name, label in BASELINES.items()}
"""Columns beside the baselines, and their titles."""
BOARD_COLUMNS = {
    "setting": Column("setting"),
    "group": Column("group", "whole"),
    "method": ROW_COLUMNS["method"],
    **{name: COLUMNS[name] for name in MEASURED if not name.startswith("values")},
    **{name: Column("harmed %", "percent", f"vs {label}") for name, label in HARMED.items()},
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
NOT_VERIFIED = ("rank", "group", "versions", "command")
"""Columns of a row that `verify` does not compare: they do not follow from its runs alone."""
CHOSEN_WORD = re.compile(r"[\w.]+=[\w.+-]+", re.ASCII)
CAPTION = (
    "Test accuracy in percent, mean (sample standard deviation) over fresh seeds, at each run's "
    "round of the best {metric}; harmed: percent of clients that are worse off than "
    "with FedAvg+FT, or alone, after the last round; sim s/round: simulated, on equal devices, "
    "mean over rounds; group: rows of a setting that do not differ from the group's first (test of "
    "Games and Howell over seeds, 5 %, all pairs together)."
)


class BoardCommand(NamedTuple):
    """Hold a command line of the board.

    Attributes:
        suite: The suite's content.
        folder: Where the board and its runs are.
        run_words: The words for all runs.
        words: All words, as they were typed.
    """

    suite: Values
    folder: Path
    run_words: list[str]
    words: list[str]

    @property
    def metric(self) -> str:
        """Return the validation column that chooses, "" for the accuracy."""
        return str(self.suite.get("metric", ""))


def read_command_line(arguments: Sequence[str]) -> BoardCommand:
    """Read the command line. Raises FedpflError."""
    words = check_words(arguments, (), HELP_ADVICE)
    plugins.load_plugins(overrides.read_list_value(words, "plugins"))
    # The last of two words for one key counts, as with Hydra.
    values = {override_key(word): word.partition("=")[2] for word in words}
    suite_names = sorted(path.stem for path in SUITES.glob("*.yaml"))
    suite_name = values.get("suite", "")
    if suite_name not in suite_names:
        raise FedpflError(f"suite: {choices_text(suite_names, suite_name)}")
    suite = yaml.safe_load((SUITES / f"{suite_name}.yaml").read_text())
    suite |= {key: values[key] for key in SUITE_KEYS if key in values}
    folder = overrides.read_text_value(words, "hydra.sweep.dir") or f"outputs/board/{suite_name}"

    # ---- All other words are for the runs; they replace the suite's words of the same key.
    board_keys = ("suite", "hydra.sweep.dir", *SUITE_KEYS)
    suite_words = [word for word in suite["words"] if override_key(word) not in values]
    run_words = [word for word in words if override_key(word) not in board_keys]
    return BoardCommand(suite, Path(folder), [*suite_words, *run_words], words)


FinalRuns = dict[Path, Values]
"""By run directory of a final run: its method's record in the table of `tune`, and the setting."""


def tune_suite(command: BoardCommand) -> tuple[FinalRuns, list[str]]:
    """Tune all methods in all settings; return final runs and failures."""
    # ---- Step 1: report a mistake in the command once, and before the first search.
    methods = _list_methods(command.suite)
    configs = {}
    for setting in command.suite["settings"]:
        _make_request(command, setting, ",".join(methods))  # raises for an unknown method
        words = _split_words(command, setting, methods[0])
        common_words = [word for word in words if not word.startswith("method.")]
        configs[setting] = tuning.check_words(methods[0], common_words, command.metric)

    # ---- Step 2: one method after another; what fails is left out.
    final_runs: FinalRuns = {}
    failures: list[str] = []
    for setting, config in configs.items():
        try:
            preload_datasets([config])
        except FedpflError as error:
            failures.append(f"{setting}: left out: {error}")
            print_notice(failures[-1])
            continue
        for method in methods:
            request = _make_request(command, setting, method)
            try:
                (tuned,) = tuning.search_methods(request, run_or_exit)
            except (FedpflError, *overrides.HYDRA_ERRORS) as error:
                failures.append(f"{setting}, {method}: left out: {format_error(error)}")
                print_notice(failures[-1])
            except SystemExit as ending:  # its jobs have reported their errors
                if ending.code in INTERRUPTED_STATUSES:
                    raise
                failures.append(f"{setting}, {method}: left out: its runs failed")
            else:
                record = {**tuned.record, "setting": setting}
                final_runs |= {path.resolve(): record for path in tuned.final_runs}
    return final_runs, failures


def _make_request(command: BoardCommand, setting: str, method: str) -> tuning.TuningRequest:
    """Return the request that tunes a method in a setting."""
    suite = command.suite
    run_words = command.run_words
    if method in METHODS and METHODS[method].pools_samples:
        # No client has a device.
        run_words = [word for word in run_words if not word.startswith("system")]
    return parse_request(
        [
            f"method={method}",
            *suite["settings"][setting],
            *run_words,
            f"trials={suite['trials']}",
            f"seeds={suite['seeds']}",
            f"metric={command.metric}",
            *overrides.format_words("hydra.sweep.dir", str(command.folder / setting)),
        ]
    )


def _split_words(command: BoardCommand, setting: str, method: str) -> list[str]:
    """Return the suite's and the user's words for a method in a setting."""
    (words,) = tuning.split_words_by_method(_make_request(command, setting, method)).values()
    return words


def _list_methods(suite: Values) -> list[str]:
    """Return the methods that a suite compares."""
    if suite["method"] == "all":
        # Methods with `pairs` are for networks with low-rank pairs.
        return [name for name in sorted(METHODS) if not METHODS[name].pairs]
    return suite["method"].split(",")


class Board(NamedTuple):
    """Hold a board.

    Attributes:
        table: a row for each method and setting.
        finished_runs: final runs that came to their end.
        ranks: of the methods over settings; None if there is too little to rank.
    """

    table: Table
    finished_runs: Sequence[Run]
    ranks: MethodRanks | None


def make_board(
    final_runs: FinalRuns, failures: Sequence[str] = (), title: str = "", metric: str = ""
) -> Board:
    """Make the table of the final runs.

    Args:
        final_runs: Result of `tune_suite`.
        failures: Lines for the notes.
        title: The table's title.
        metric: The validation column that chooses; "" for the accuracy.
    """
    # ---- Step 1: accuracies, harms and ranks.
    finished_runs = [run for run in runs(*final_runs) if run.status == "finished"]
    run_groups = groups(finished_runs)
    require_classes(run_groups, "fedpfl.board")
    select = metric or "validation"
    accuracies = accuracy_table(finished_runs, select, chosen=MEASURED)
    comparisons, fairness_notes = compare_with_baselines(run_groups)
    ranks: MethodRanks | None = None
    mean_ranks = pd.Series(dtype=float)
    try:
        tables, ranks = rank_tables(finished_runs, select=select)
        notes = [note for note in tables[-1].notes if note.startswith("Left out")]
        # FedAvg is ranked after fine-tuning, under that name.
        mean_ranks = ranks.ranks.mean().rename({BASELINES["fedavg"]: METHOD_TITLES["fedavg"]})
    except FedpflError as error:
        notes = [f"No ranks: {error}."]

    # ---- Step 2: a row for each configuration, the best of each setting first.
    rows = []
    measured_rows = accuracies.frame.to_dict("records")
    for group, measured, comparison in zip(run_groups, measured_rows, comparisons, strict=True):
        record = final_runs[group.runs[0].path.resolve()]
        rows.append({**measured, **_describe_group(group, record), **read_harms(comparison)})
    frame = pd.DataFrame(rows)
    frame["rank"] = frame["method"].map(mean_ranks)
    frame = frame.sort_values(["setting", "accuracy"], ascending=[True, False], kind="stable")
    parting_notes = add_groups(frame)

    # ---- Step 3: notes on missing numbers.
    finished_paths = [run.path.resolve() for run in finished_runs]
    for path, record in final_runs.items():
        name = f"{record['setting']}, {record['method']}"
        note = f"{name}: runs with fresh seeds diverged, and are in no mean."
        if path not in finished_paths and note not in notes:
            notes.append(note)
    notes += [note for note in accuracies.notes if note.startswith(("Empty", "Attack"))]
    table = Table.of(
        frame.to_dict("records"),
        {**BOARD_COLUMNS, **PROVENANCE_COLUMNS},
        title=title,
        frame=frame,
        caption=CAPTION.format(metric=describe_validation(select, CLASSIFICATION)),
        notes=(*failures, *parting_notes, *notes, *fairness_notes),
        by=1,
    )
    return Board(table, finished_runs, ranks)


def add_groups(rows: pd.DataFrame) -> list[str]:
    """Number the groups of each setting's rows, the best first, in a column `group`.

    An upper line is in none.

    Returns:
        For each setting how many seeds would part its first two rows.
    """
    rows["group"] = math.nan
    notes = []
    is_ranked = (rows["method"] != METHOD_TITLES["centralized"]) & rows["accuracy"].notna()
    for setting, members in rows[is_ranked].groupby("setting"):
        columns = members[["accuracy", "accuracy_seed_std", "seeds"]]
        scores = [SeedScore(*values) for values in columns.itertuples(index=False)]
        rows.loc[members.index, "group"] = number_groups(scores)
        if len(scores) > 1:
            first, second = scores[:2]
            deviation = math.hypot(first.deviation, second.deviation)
            names = [*members["method"][:2]]
            told = describe_parting(names, first.mean - second.mean, deviation)
            notes.append(f"{setting}: {told}")
    return notes


def _describe_group(group: Group, record: Values) -> Record:
    """Describe the runs of a row, with versions and a digest of their numbers."""
    run = group.runs[0]
    finished = sorted(group.reported_runs, key=lambda run: run.seed)
    digest = hashlib.blake2b(digest_size=8)
    for one in finished:
        digest.update(one.reproducible_columns.to_csv(index=False).encode())
    versions = [f"{key} {run.environment.get(key)}" for key in ("fedpfl", "torch", "python")]
    commit = str(run.environment.get("commit"))[:10]
    seconds = [one.rounds.reindex(columns=[SIMULATED]).mean().item() for one in finished]
    return {
        "setting": f"{record['setting']}: {group.setting}",
        "method": run.method_title,
        SIMULATED: mean_and_std(seconds)[0],
        "seeds": len(finished),
        "chosen": record["chosen"],
        "identity": run.identity,
        "data": " ".join(str(one.summary.get("data")) for one in finished),
        "versions": ", ".join([*versions, f"commit {commit}"]),
        "digest": digest.hexdigest(),
        "command": record["command"],
    }


def read_harms(comparison: BaselineComparison) -> Record:
    """Return a row's shares of harmed clients, and their deviations over seeds."""
    rows = comparisons_table([comparison], ()).frame.to_dict("records")
    harms: Record = dict.fromkeys(HARMED)
    for row in rows:
        harms |= {key: value for key, value in row.items() if key.startswith("harmed_")}
    return harms


def write_board(command: BoardCommand, board: Board) -> None:
    """Write the board as CSV, Markdown and page, with figures and settings' pages."""
    folder = command.folder
    table = board.table
    rows = table.frame.to_dict("records")
    short_table = Table.of(
        rows, BOARD_COLUMNS, caption=table.caption, notes=table.notes, by=table.by
    )
    (folder / "board.csv").write_text(render(table, "csv"))
    (folder / "board.md").write_text(render(short_table, "markdown") + "\n")
    with atomic_output(folder / "board.html") as file:
        file.write_text(html.single_table_page(table), encoding="utf-8")
    html.write_pages(
        sorted(folder.glob("*/final")), folder / "pages", command.metric or "validation"
    )
    accuracy_figure(board.finished_runs, folder / "accuracy")
    if board.ranks is not None:
        draw_rank_diagram(board.ranks, folder / "ranks")
    show_tables(short_table)
    print_notice(f"wrote {folder / 'board.html'}")


# ---- verify


def verify_row(identity_prefix: str, command: BoardCommand) -> int:
    """Run a row of the board again; return 0 if it is equal, else 1.

    The suite composes the row's configuration; of the row only its method and its chosen values are
    read. Columns beside FedAvg and Local-Only need the runs of their rows too.

    Raises:
        FedpflError: if no such row exists, or the suite makes another.
    """
    # ---- Step 1: run it again, and the baselines of its setting.
    row, *baseline_rows = find_row(identity_prefix, command)
    final_runs = _play_again(row, command)
    for record in baseline_rows:
        final_runs |= _play_again(record, command)

    # ---- Step 2: compare the columns.
    new_path = command.folder / "verify" / "board.csv"
    new_path.write_text(render(make_board(final_runs, metric=command.metric).table, "csv"))
    new_row = read_rows(new_path).set_index("identity", drop=False).loc[row["identity"]]
    differences = [
        f"{key} {value!r} there, {new_row.get(key, '')!r} here"
        for key, value in row.items()
        if key not in NOT_VERIFIED and value != new_row.get(key, "")
    ]
    print_notice(f"versions: {row.get('versions')!r} there, {new_row['versions']!r} here")
    row_name = f"{new_row['method']}, {new_row['setting']}"
    if differences:
        print_notice(f"{row_name}: not equal: {'; '.join(differences)}")
        return 1
    print(f"{row_name}: equal, every number of {new_row['seeds']} runs")
    return 0


def submit_row(identity_prefix: str, command: BoardCommand) -> int:
    """Make the folder to send for a row: the row, its baselines, plugins, and a command for them.

    Raises:
        FedpflError: if no such row exists, or the suite makes another.
    """
    rows = find_row(identity_prefix, command)
    # Else the receiver would be the first to hear that words are missing.
    compose_row(rows[0], command)
    folder = command.folder / "submit" / rows[0]["identity"]
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "board.csv", index=False)
    files = overrides.read_list_value(command.words, "plugins")
    for file in files:
        shutil.copy(file, folder)
    # The last word of a key counts.
    names = ",".join(Path(file).name for file in files)
    words = [*command.words, "hydra.sweep.dir=.", f"plugins=[{names}]"]
    line = shlex.join(["python", "-m", "fedpfl.board", "verify", rows[0]["identity"], *words])
    (folder / "README.md").write_text(f"In this folder: `{line}`\n")
    answer.add_facts(files=[*folder.iterdir()])
    print(f"wrote {folder}; CONTRIBUTING.md says where it goes")
    return 0


def find_row(identity_prefix: str, command: BoardCommand) -> list[Record]:
    """Find a row by its identity's beginning; the baselines of its setting follow it.

    Raises:
        FedpflError: no row begins so, or several do.
    """
    path = command.folder / "board.csv"
    rows = read_rows(path)
    matching_rows = rows[rows["identity"].str.startswith(identity_prefix)]
    if len(matching_rows) != 1:
        raise FedpflError(
            f"{path}: {len(matching_rows) or 'no'} rows begin with {identity_prefix!r}; "
            f"there are {join_few(rows['identity'])}"
        )
    (row,) = matching_rows.to_dict("records")
    neighbours = rows[rows["setting"] == row["setting"]].to_dict("records")
    baselines = [one for one in neighbours if one != row and _read_method(one) in BASELINES]
    return [row, *baselines]


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a board's CSV as texts. Raises FedpflError for another file."""
    try:
        rows = pd.read_csv(path, dtype=str, keep_default_na=False)
        rows[["identity", "command", "setting", "chosen"]]
    except (OSError, ValueError, KeyError) as error:
        raise FedpflError(
            f"{path} cannot be read as a board: {error_text(error)}; make it with "
            "python -m fedpfl.board, or give its folder"
        ) from None
    return rows


def _read_method(row: Mapping[str, str]) -> str:
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
    method = _read_method(row)
    if setting not in command.suite["settings"] or method not in METHODS:
        raise FedpflError(f"row {row['identity']!r} is of no setting and method of the suite")
    user_words = _split_words(command, setting, method)

    # ---- Step 2: the values that a search has chosen; a row may be a stranger's.
    searched_words = [*make_search_space(method, user_words), *user_words]
    searched_keys = {override_key(word) for word in filter(overrides.is_sweep, searched_words)}
    chosen = row["chosen"].split()
    for word in chosen:
        if override_key(word) not in searched_keys or not CHOSEN_WORD.fullmatch(word):
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
    tuning.play_seeds(root, [*final_words, "restart=true"], seeds, run_or_exit)
    record = {**row, "setting": row["setting"].partition(": ")[0]}
    return {path.resolve(): record for path in tuning.locate_final_runs(root, final_words, seeds)}


def main() -> int:
    """Run the command; return the exit status."""
    return run_guarded(__doc__, sys.argv[1:], _run_words)


def _run_words(arguments: Sequence[str]) -> int:
    """Verify a row, or make a board; return the exit status."""
    commands = {"verify": verify_row, "submit": submit_row}
    if arguments[0] in commands:
        # An option in place of the row would be taken for its beginning.
        check_words(arguments[1:2], (), HELP_ADVICE)
        command = read_command_line(arguments[2:])
        return commands[arguments[0]]("".join(arguments[1:2]), command)
    return _run_board(read_command_line(arguments))


def _run_board(command: BoardCommand) -> int:
    """Tune a suite and write its board; return 1 where something failed."""
    final_runs, failures = tune_suite(command)
    if not final_runs:
        raise FedpflError(f"no method came to its end: {failures[0]}")
    write_board(
        command, make_board(final_runs, failures, f"Board {command.folder.name}", command.metric)
    )
    return 1 if failures else 0


if __name__ == "__main__":
    interrupts.end_imports()
    answer.run_command(main)
