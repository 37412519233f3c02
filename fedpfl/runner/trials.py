"""Read the results of a search's trials, and prune them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fedpfl.config.plan import Plan
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, TASKS, Task
from fedpfl.record.columns import task_of_columns, validation_column
from fedpfl.record.rounds import read_rows
from fedpfl.runner import resume
from fedpfl.runner.optuna_study import import_optuna, open_storage

PRUNED = "pruned"
"""What a job returns that was given up."""
ShouldPrune = Callable[[int, Mapping[str, Any] | None], bool]
"""Of the round and the row of an evaluation, whether to give the run up.

The row is None when a run begins or goes on.
"""
Outcome = Literal["", "given up", "diverged", "untrained"]
"""Why a trial has no validation score, "" where it has one."""


# ---- Origin of a trial's numbers


class TrialOrigin(NamedTuple):
    """Data and code that a run's numbers come from.

    Attributes:
        data: fingerprint of samples, split and initial weights.
        code: digests of the method's and the plugins' files.
    """

    data: str
    code: Mapping[str, str]


def find_origin(plan: Plan) -> TrialOrigin:
    """Read the data of a plan, and return what its runs come from. Raises FedpflError."""
    # An accelerator's memory is for the trials.
    run = build_run(replace(plan, device=torch.device("cpu")))
    return TrialOrigin(run.fingerprint, resume.digest_code(run))


def require_origin(folder: Path, origin: TrialOrigin) -> None:
    """Raise FedpflError if a trial's run has other data or code than its search.

    They may have changed since the search began, and a finished run of other code is taken as it
    is.
    """
    from fedpfl.report import reading  # pandas is slow to load

    summary = reading.read_summary(folder)
    if (summary.get("data"), summary.get("code")) != (origin.data, [origin.code]):
        raise FedpflError(
            f"{folder} was run with other data or code than the search began with; give the same "
            "command again, which searches anew, or remove that directory"
        )


def name_study(identity: str, seed: int, space_words: Sequence[str], origin: TrialOrigin) -> str:
    """Return a study's name, from what its trials have in common and its search space."""
    origin_text = json.dumps(origin, sort_keys=True)
    text = "\n".join([identity, str(seed), origin_text, *sorted(space_words)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- Results of trials


@dataclass(frozen=True)
class TrialResult:
    """Hold the result of a trial.

    Attributes:
        value: its validation score, None if `lost` gives a reason.
        rounds: that it played.
        directory: of its run.
        lost: why it has no validation score.
    """

    value: float | None
    rounds: int
    directory: str
    lost: Outcome = ""


def read_trial_result(folder: Path, lost: Outcome = "") -> TrialResult:
    """Read from a trial's directory its validation score, and no other measure.

    Args:
        folder: the run directory.
        lost: why the trial has no validation score, as far as its job knows.

    Raises:
        FedpflError: where no sample was held out.
    """
    rows: list[dict[str, float | None]] = []
    task = CLASSIFICATION
    # A run that is lost may have diverged in the first round.
    if (folder / "rounds.csv").is_file() or not lost:
        task, rows = _read_evaluations(folder)
    values = _list_scores(rows, task)
    if not lost and not values and _is_untrained(folder):
        lost = "untrained"
    if not lost and not values:
        raise FedpflError(
            f"{folder}: no sample was held out; set validation=0.1, or more for clients of few "
            "samples"
        )
    return TrialResult(
        value=None if lost else _find_best_score(values, task),
        rounds=int(rows[-1]["round"] or 0) if rows else 0,
        directory=str(folder),
        lost=lost,
    )


def _read_evaluations(folder: Path) -> tuple[Task, list[dict[str, float | None]]]:
    """Return a run's task, and rounds and validation scores of rounds.csv.

    The rest is not even read.
    """
    text = (folder / "rounds.csv").read_text(encoding="utf-8")
    task = task_of_columns(text.partition("\n")[0].split(","))
    return task, read_rows(text, only=("round", validation_column(task)))


def _is_untrained(folder: Path) -> bool:
    """Tell if no client of a finished run has made a step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("trained") == 0


def _list_scores(rows: Sequence[Mapping[str, Any]], task: Task) -> list[float]:
    """Return the validation scores in rows of rounds.csv."""
    values = [row.get(validation_column(task)) for row in rows]
    return [value for value in values if value is not None and math.isfinite(value)]


def _find_best_score(values: Sequence[float], task: Task) -> float | None:
    """Return the best of some scores, None without any."""
    return (max if task.is_higher_better else min)(values, default=None)


# ---- whether to give a trial up


@dataclass(frozen=True)
class SearchTrial:
    """Tell a session of the search that it is a trial of.

    Attributes:
        study_name: of the search, which the run's summary names.
        should_prune: what `make_should_prune` returns.
    """

    study_name: str
    should_prune: ShouldPrune


def find_trial(sweeper: Mapping[str, Any], number: int) -> SearchTrial | None:
    """Return the trial of a sweep's job, None where the sweep is no search.

    Args:
        sweeper: the configuration of Hydra's sweeper.
        number: of the job.
    """
    study_name = sweeper.get("study")
    if not study_name:
        return None
    return SearchTrial(study_name, make_should_prune(sweeper, number))


def make_should_prune(sweeper: Mapping[str, Any], number: int) -> ShouldPrune:
    """Return the function that judges a job of a search after each evaluation.

    Args:
        sweeper: the configuration of Hydra's sweeper.
        number: of the job.
    """
    # ---- Step 1: the study, as the process of the job reads it.
    optuna = import_optuna()
    study = optuna.load_study(
        study_name=sweeper["study"], storage=open_storage(Path(sweeper["folder"]))
    )
    if sweeper["prune"]:
        study.pruner = optuna.pruners.MedianPruner(
            n_startup_trials=study.user_attrs["startup"],
            n_warmup_steps=study.user_attrs["warmup"],
        )
    else:
        study.pruner = optuna.pruners.NopPruner()

    # ---- Step 2: the trial is judged by its best score so far, which a resumed one has stored.
    stored = study.trials[number]
    trial = optuna.trial.Trial(study, stored._trial_id)
    task = TASKS[study.user_attrs.get("task", CLASSIFICATION.name)]
    best_score = _find_best_score([*stored.intermediate_values.values()], task)

    def should_prune(round_number: int, row: Mapping[str, Any] | None) -> bool:
        nonlocal best_score
        if row is not None:
            score = row.get(validation_column(task))
            if score is None or not math.isfinite(score):
                return False
            if task.is_better(score, best_score):
                best_score = score
            # Optuna refuses a second report of a round.
            if round_number not in stored.intermediate_values:
                trial.report(best_score, round_number)
        return best_score is not None and bool(trial.should_prune())

    return should_prune


def replay_evaluations(folder: Path, should_prune: ShouldPrune, is_finished: bool) -> bool:
    """Tell a search of a run directory's evaluations; return whether it gives the run up.

    Thus the results of trials do not depend on the runs that already exist.

    Args:
        folder: the run directory.
        should_prune: what `make_should_prune` returns.
        is_finished: whether the run is finished; its last round is not judged.
    """
    if not (folder / "rounds.csv").is_file():
        return False
    _, rows = _read_evaluations(folder)
    if is_finished:
        # A run is never given up at its end, so its last evaluation is not reported.
        rows = rows[:-1]
    return any(should_prune(int(row["round"] or 0), row) for row in rows)
