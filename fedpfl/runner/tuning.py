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
from fedpfl.ground.errors import FedpflError, pluralize
from fedpfl.ground.tasks import Task
from fedpfl.ground.terminal import print_notice
from fedpfl.record.columns import METRICS, validation_column
from fedpfl.report import load, reading
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.table import Column, Table, mean_and_std
from fedpfl.report.tables import best_round
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
    """

    methods: list[str]
    trials: int
    seeds: int
    folder: Path
    shared_words: list[str]


class TunedMethod(NamedTuple):
    """Hold a tuned method.

    Attributes:
        record: its row of the table, with the command of its final runs.
        final_runs: run directories of these, one per seed.
    """

    record: dict[str, Any]
    final_runs: list[Path]


RunCommand = Callable[..., None]
"""Run a command line of fedpfl.train, given options, words and `accepted_status` beside 0.

It returns only with one of these exit statuses.
"""


def tune_methods(request: TuningRequest, run_command: RunCommand) -> Table:
    """Search for each method's values, run them with fresh seeds, and return a table."""
    records = [tuned.record for tuned in search_methods(request, run_command)]
    task = search_results[-1].task
    titled_records = [
        {**record, "method": METHOD_TITLES.get(record["method"], record["method"])}
        for record in records
    ]
    return Table.of(
        titled_records,
        {
            "method": Column("method"),
            "chosen": Column("chosen", "long"),
            "finished": Column("finished", "whole", "trials"),
            "given up": Column("given up", "whole", "trials"),
            "rounds": Column("rounds", "whole", "trials"),
            "validation": Column("validation", "percent" if task.unit else "score"),
            **_judged_columns(task),
            "seeds": Column("seeds", "whole"),
        },
        title="Tuned on equal terms",
        frame=pd.DataFrame(records),
        caption=f"{pluralize(request.trials, 'trial')} per method, chosen by validation "
        f"{task.score_word}; then {pluralize(request.seeds, 'other seed')}, each at its round of "
        f"the best validation {task.score_word}: mean (standard deviation over seeds)"
        f"{', in percent' if task.unit else ''}.",
        notes=tuple(_make_notes(request, records, task)),
    )


def search_methods(request: TuningRequest, run_command: RunCommand) -> list[TunedMethod]:
    """Search for each method's values and run them with fresh seeds."""
    # Compose all spaces first, so that a mistake is reported before the first search.
    method_words = split_words_by_method(request)
    searches = {}
    for method, user_words in method_words.items():
        space_words = make_search_space(method, user_words)
        cfg = check_words(method, [*user_words, *space_words])
        # Fine-tuned columns choose nothing.
        search_words = [f"method={method}", *user_words, *space_words, "eval.finetune_epochs=0"]
        searches[method] = keep_within_limits(method, search_words, cfg)
    return [
        _tune_method(request, method, method_words[method], search_words, run_command)
        for method, search_words in searches.items()
    ]


def _make_notes(request: TuningRequest, records: Sequence[dict[str, Any]], task: Task) -> list[str]:
    """Return the notes below the table."""
    side = "below" if task.is_higher_better else "above"
    notes = [
        f"Rounds: played by all trials together. A trial {side} the others' median validation "
        f"{task.score_word} is given up."
    ]
    for record in records:
        method = record["method"]
        lost_count = request.seeds - record["seeds"]
        if lost_count:
            notes.append(
                f"{method}: {lost_count} of the final runs diverged, so its test cells stay empty."
            )
        if record["at_end"]:
            notes.append(
                f"{method}: {record['at_end']}: at the end of what was searched; better values may "
                "lie beyond."
            )
    return notes


def split_words_by_method(request: TuningRequest) -> dict[str, list[str]]:
    """Return each method's words of the command line, with `validation`.

    A `method.mu=...` is left out for methods that lack it, if another of these has it.
    """
    shared_words = list(request.shared_words)
    if not any(word.lstrip("+").startswith("validation=") for word in shared_words):
        shared_words.append("validation=0.1")

    # ---- The keys of each method.
    composed_words = [
        word
        for word in shared_words
        if not word.startswith(("method.", "hydra.sweeper.")) and not overrides.is_sweep(word)
    ]
    keys = {
        method: {*overrides.compose_config([f"method={method}", *composed_words]).method}
        for method in request.methods
    }

    # ---- Leave out keys that only another method has.
    keys_of_any = set[str]().union(*keys.values())
    words_by_method: dict[str, list[str]] = {}
    for method in request.methods:
        absent_keys = {f"method.{key}" for key in keys_of_any - keys[method]}
        kept_words = [word for word in shared_words if override_key(word) not in absent_keys]
        for word in shared_words:
            if word not in kept_words:
                print_notice(
                    f"method={method} has no {override_key(word)}, so {word} is for the other "
                    "methods alone"
                )
        words_by_method[method] = kept_words
    return words_by_method


def check_words(method: str, run_words: Sequence[str]) -> DictConfig:
    """Check a method's words, with the first value of each swept key; return the configuration.

    Raises:
        FedpflError: for a value or a space that cannot be; and what Hydra raises.
    """
    fixed_words = []
    for word in run_words:
        if word.startswith("hydra.sweeper."):
            continue
        if overrides.is_sweep(word):
            word = parse_example(word)
        fixed_words.append(word)
    cfg = overrides.compose_single_run([f"method={method}", *fixed_words])
    check_config(cfg)
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
    paths = locate_final_runs(final_folder, final_words, seeds)
    code = resume.digest_code(check_config(overrides.compose_single_run(final_words)))
    started_paths = [path for path in paths if (path / "summary.json").is_file()]
    is_outdated = any(reading.read_summary(path).get("code") != [code] for path in started_paths)
    restart_words = ["restart=true"] if is_outdated else []
    play_seeds(final_folder, [*final_words, *restart_words], seeds, run_command)

    # ---- Step 3: their results, and the command that repeats them.
    edge_values = find_edge_values(result.overrides, result.space)
    run_words = [word for word in final_words if not overrides.is_hydra_setting(word)]
    seeds_word = f"seed={','.join(map(str, seeds))}"
    record = {
        "method": method,
        "chosen": " ".join(result.overrides),
        **result.trials,
        "rounds": result.rounds,
        "validation": result.value,
        "at_end": " ".join(edge_values),
        "command": shlex.join(["python", "-m", "fedpfl.train", "-m", *run_words, seeds_word]),
        **_read_test_results(final_folder, final_words, seeds, result.task),
    }
    return TunedMethod(record, locate_final_runs(final_folder, final_words, seeds))


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


def _read_test_results(
    root: Path, run_words: Sequence[str], seeds: Sequence[int], task: Task
) -> dict[str, Any]:
    """Return mean test scores of these runs, each at its best validation round.

    They are nan where a run diverged.
    """
    values: dict[str, list[float]] = {name: [] for name in _judged_columns(task)}
    finished_count = 0
    for path in locate_final_runs(root, run_words, seeds):
        run = load.read_started_run(path)
        if run.status not in ("finished", "diverged"):
            raise FedpflError(f"{path}: {run.status}; the same command tries it again")
        row: Any = {}
        if run.status == "finished":
            finished_count += 1
            row = best_round(load.read_run(path).evaluations, validation_column(task))
        for name in values:
            values[name].append(float(row.get(name, float("nan"))))
    results: dict[str, Any] = {"seeds": finished_count}
    for name, scores in values.items():
        mean, std = mean_and_std(scores)
        results |= {name: mean, f"{name}_seed_std": std}
    return results
