"""Tune methods on equal terms: a search each, then its best values with fresh seeds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from omegaconf import DictConfig

from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.ground.casting import schema_annotations
from fedpfl.ground.errors import pluralize
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import Task
from fedpfl.ground.terminal import print_notice
from fedpfl.methods import METHODS
from fedpfl.record import run_files
from fedpfl.record.columns import METRICS, column_names, validation_column
from fedpfl.report import load
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import accuracy_table, describe_validation
from fedpfl.runner import resume
from fedpfl.runner.faults import EXIT_STATUS, Diverged
from fedpfl.runner.optuna_study import parse_example
from fedpfl.runner.search import search_results
from fedpfl.runner.spaces import (
    find_edge_values,
    keep_within_limits,
    make_search_space,
    override_key,
)
from fedpfl.runner.trials import choose_metric


def _judged_columns(task: Task) -> dict[str, Column]:
    """Return the columns of the final runs' test scores."""
    kind = "percent" if task.unit else "score"
    title = f"test {task.score_word}"
    columns = {
        task.score: Column("mean", kind, title),
        f"{task.score}_pooled": Column("pooled", kind, title),
        f"ft_{task.score}": Column("fine-tuned", kind, title),
        f"unseen_{task.score}": Column("unseen", kind),
    }
    return {name: column for name, column in columns.items() if name in METRICS}


class TuningRequest(NamedTuple):
    """Hold a request to tune methods.

    Attributes:
        methods: to be compared.
        trials: of each method's search.
        seeds: fresh ones that each method's chosen values are run with.
        folder: where runs and tables are written.
        shared_words: words of the command line that all methods have.
        metric: the validation column that chooses; "" for the score of the task.
    """

    methods: list[str]
    trials: int
    seeds: int
    folder: Path
    shared_words: list[str]
    metric: str = ""

    @property
    def select(self) -> str:
        """Return the choice of final runs' rounds, as in `accuracy_table`."""
        return self.metric or "validation"

    @property
    def has_finetuned_metric(self) -> bool:
        """Return True if trials are judged after fine-tuning."""
        return self.metric in column_names("validation", fine_tuned=True)


class TunedMethod(NamedTuple):
    """Hold a tuned method.

    Attributes:
        record: its row of the table, with the command of its final runs.
        final_runs: run directories of these, one per seed.
    """

    record: Record
    final_runs: list[Path]


RunCommand = Callable[..., None]
"""Run a command line of fedpfl.train, given options, words and `accepted_status` beside 0.

It returns only with one of these exit statuses.
"""


def tune_methods(request: TuningRequest, run_command: RunCommand) -> Table:
    """Search for each method's values, run them with fresh seeds, and return a table."""
    # ---- Step 1: a row for each method.
    tuned_methods = search_methods(request, run_command)
    task = search_results[-1].task
    columns = _judged_columns(task)
    metric = METRICS[request.metric or validation_column(task)]
    metric_text = request.metric or f"validation {task.score_word}"
    side = "below" if metric.best == "max" else "above"
    notes = ["Rounds: played by all trials together."]
    if "hydra.sweeper.prune=false" not in map(str.lower, request.shared_words):
        notes.append(f"A trial {side} the others' median {metric_text} is given up.")
    rows = []
    for record, final_runs in tuned_methods:
        scores = _read_test_scores(final_runs, [*columns], request.select)
        rows.append({**scores, **record})
        notes += _note_limits(record, len(final_runs) - scores["seeds"])

    # ---- Step 2: the table, with titles for methods.
    frame = pd.DataFrame(rows)
    shown = frame.assign(method=frame["method"].replace(METHOD_TITLES))
    return Table.of(
        shown.to_dict("records"),
        {
            "method": Column("method"),
            "chosen": Column("chosen", "long"),
            "finished": Column("finished", "whole", "trials"),
            "given up": Column("given up", "whole", "trials"),
            "rounds": Column("rounds", "whole", "trials"),
            request.select: Column(request.select, metric.kind),
            **columns,
            "seeds": Column("seeds", "whole"),
        },
        title="Tuned on equal terms",
        frame=frame,
        caption=f"{pluralize(request.trials, 'trial')} per method, chosen by "
        f"{describe_validation(request.select, task)}; "
        f"then {pluralize(request.seeds, 'other seed')}, each at its round of the best "
        f"{metric_text}: mean (standard deviation over seeds)"
        f"{', in percent' if task.unit else ''}.",
        notes=tuple(notes),
    )


def _note_limits(record: Values, lost_count: int) -> list[str]:
    """Return notes on lost final runs, and on values at the end of the space."""
    notes = []
    if lost_count:
        notes.append(
            f"{lost_count} of the final runs did not finish, so its test cells stay empty."
        )
    if record["at_end"]:
        notes.append(
            f"{record['at_end']}: at the end of what was searched; better values may lie beyond."
        )
    return [f"{record['method']}: {note}" for note in notes]


def _read_test_scores(
    final_runs: Sequence[Path], columns: Sequence[str], select: str = "validation"
) -> Record:
    """Return the number of finished runs, and test scores if all are finished.

    Each run is judged at its best validation round.
    """
    runs = [load.read_started_run(path) for path in final_runs]
    finished_count = sum(run.status == "finished" for run in runs)
    scores: Record = dict.fromkeys(columns)
    if finished_count == len(runs):
        # They differ by seed alone, so the table has one row.
        (scores,) = accuracy_table(runs, select, chosen=columns).frame.to_dict("records")
    return {**scores, "seeds": finished_count}


def search_methods(request: TuningRequest, run_command: RunCommand) -> list[TunedMethod]:
    """Search for each method's values and run them with fresh seeds."""
    # Compose all spaces first, so that a mistake is reported before the first search.
    method_words = split_words_by_method(request)
    searches = {}
    for method, user_words in method_words.items():
        space_words = make_search_space(method, user_words)
        cfg = check_words(method, [*user_words, *space_words], request.metric)
        search_words = [f"method={method}", *user_words, *space_words]
        if not request.has_finetuned_metric:  # fine-tuned columns choose nothing
            search_words.append("eval.finetune_epochs=0")
        searches[method] = keep_within_limits(method, search_words, cfg)
    return [
        _tune_method(request, method, method_words[method], search_words, run_command)
        for method, search_words in searches.items()
    ]


def split_words_by_method(request: TuningRequest) -> dict[str, list[str]]:
    """Return each method's words of the command line, with those that trials are judged by.

    A `method.mu=...` is left out for methods that lack it, if another of these has it.
    """
    needed_values = {"validation": "0.1"}
    if request.has_finetuned_metric:
        needed_values["eval.finetune_every"] = "${eval.every}"
    given_keys = {override_key(word).lstrip("+") for word in request.shared_words}
    needed_words = [f"{key}={needed_values[key]}" for key in needed_values.keys() - given_keys]
    keys = {}
    for method in request.methods:
        schema: Any = METHODS[method]
        keys[method] = {f"method.{name}" for name in schema_annotations(schema)}
    keys_of_any = set[str]().union(*keys.values())
    words_by_method: dict[str, list[str]] = {}
    for method in request.methods:
        words_by_method[method] = []
        for word in (*request.shared_words, *sorted(needed_words)):
            key = override_key(word)
            if key in keys_of_any - keys[method]:
                print_notice(
                    f"method={method} has no {key}, so {word} is for the other methods alone"
                )
            else:
                words_by_method[method].append(word)
    return words_by_method


def check_words(method: str, run_words: Sequence[str], metric: str = "") -> DictConfig:
    """Check a method's words, with the first value of each swept key; return the configuration.

    Args:
        method: name of the method.
        run_words: its words.
        metric: as in `TuningRequest`.

    Raises:
        FedpflError: for a value or a space that cannot be; and what Hydra raises.
    """
    fixed_words = []
    for word in run_words:
        if overrides.is_sweep(word):
            word = parse_example(word)
        if not word.startswith("hydra.sweeper."):
            fixed_words.append(word)
    cfg = overrides.compose_single_run([f"method={method}", *fixed_words])
    choose_metric(check_config(cfg), metric)
    return cfg


def _tune_method(
    request: TuningRequest,
    method: str,
    user_words: Sequence[str],
    search_words: Sequence[str],
    run_command: RunCommand,
) -> TunedMethod:
    """Search for one method's values and run them with fresh seeds.

    Args:
        request: methods, budget and words.
        method: name of the method.
        user_words: of the command line, for this method.
        search_words: those of its search.
        run_command: does a command line of fedpfl.train's.
    """
    # ---- Step 1: the search.
    search_options = ["-m", "hydra/sweeper=optuna", f"hydra.sweeper.trials={request.trials}"]
    search_options.append(f"hydra.sweeper.metric={request.metric}")
    search_options += _sweep_dir_words(request.folder / "trials")
    run_command(search_options, search_words)
    result = search_results[-1]

    # ---- Step 2: the final runs.
    final_words = join_final_words(method, user_words, result.overrides)
    seeds = choose_seeds(final_words, request.seeds)
    print_notice(
        f"method={method}: {pluralize(request.seeds, 'fresh seed')} of {' '.join(result.overrides)}"
    )

    # Finished runs of other code are run again.
    final_folder = request.folder / "final"
    final_runs = locate_final_runs(final_folder, final_words, seeds)
    code = resume.digest_code(check_config(overrides.compose_single_run(final_words)))
    summaries = [run_files.read_summary_file(path)[0] for path in final_runs]
    is_outdated = any(summary and summary.get("code") != [code] for summary in summaries)
    restart_words = ["restart=true"] * is_outdated
    play_seeds(final_folder, [*final_words, *restart_words], seeds, run_command)

    # ---- Step 3: the result, and the command that repeats the final runs.
    seeds_word = f"seed={','.join(map(str, seeds))}"
    record = {
        "method": method,
        "chosen": " ".join(result.overrides),
        **result.trials,
        "rounds": result.rounds,
        request.select: result.value,
        "at_end": " ".join(find_edge_values(result.overrides, result.space)),
        "command": shlex.join(["python", "-m", "fedpfl.train", "-m", *final_words, seeds_word]),
    }
    return TunedMethod(record, final_runs)


def join_final_words(method: str, user_words: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Return the words of a method's final runs: the user's and those that were chosen."""
    chosen_keys = {override_key(word) for word in chosen}
    kept_words = [
        word
        for word in user_words
        if not word.startswith("hydra.sweeper.") and override_key(word) not in chosen_keys
    ]
    return [f"method={method}", *kept_words, *chosen]


def choose_seeds(final_words: Sequence[str], count: int) -> list[int]:
    """Return seeds that no trial has had: the values were chosen for the search's own."""
    first_seed = int(overrides.compose_single_run(final_words).seed) + 1
    return [first_seed + number for number in range(count)]


def play_seeds(
    folder: Path, run_words: Sequence[str], seeds: Sequence[int], run_command: RunCommand
) -> None:
    """Run words with each seed, below a folder. A run may diverge."""
    run_command(
        ["-m", *_sweep_dir_words(folder)],
        [*run_words, f"seed=choice({','.join(map(str, seeds))})", "hydra.sweeper.table=false"],
        accepted_status=EXIT_STATUS[Diverged],
    )


def _sweep_dir_words(folder: Path) -> Iterator[str]:
    return overrides.format_words("hydra.sweep.dir", str(folder))


def locate_final_runs(root: Path, run_words: Sequence[str], seeds: Sequence[int]) -> list[Path]:
    """Return the run directories of these words, one per seed."""
    return [
        root / overrides.compose_single_run([*run_words, f"seed={seed}"]).hydra.sweep.subdir
        for seed in seeds
    ]
