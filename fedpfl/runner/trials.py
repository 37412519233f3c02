"""Read the results of a search's trials, and prune them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from fedpfl.config.plan import Plan
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.record.columns import METRICS, column_names, round_columns, validation_column
from fedpfl.record.rounds import read_rows
from fedpfl.runner import resume
from fedpfl.runner.faults import TrialPruned
from fedpfl.runner.optuna_study import import_optuna, open_storage

PRUNED = "pruned"
"""What a job returns that was given up."""
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


def choose_metric(plan: Plan, name: str) -> str:
    """Return the validation column that judges trials of a plan. Raises FedpflError.

    Args:
        plan: of a trial.
        name: of the column; "" for the score of the task.
    """
    columns = round_columns(validation=True, options=plan.settings.metrics, task=plan.task)
    # A deviation over clients has no better end.
    choices = [key for key in column_names("validation") if key in columns and METRICS[key].best]
    metric = name or validation_column(plan.task)
    if metric not in choices:
        raise FedpflError(f"metric: {choices_text(choices, metric)}")
    if METRICS[metric].fine_tuned and not plan.eval.finetune_epochs:
        raise FedpflError(f"metric={metric} needs fine-tuning; set eval.finetune_epochs=5")
    return metric


@dataclass(frozen=True)
class TrialResult:
    """Hold the result of a trial.

    Attributes:
        value: its best validation score, None if `lost` gives a reason.
        rounds: that it played.
        directory: of its run.
        lost: why it has no validation score.
    """

    value: float | None
    rounds: int
    directory: str
    lost: Outcome = ""


def read_trial_result(
    folder: Path, metric: str = validation_column(), lost: Outcome = ""
) -> TrialResult:
    """Read from a trial's directory its validation score, and no other measure.

    Args:
        folder: the run directory.
        metric: the column that judges it.
        lost: why the trial has no validation score, as far as its job knows.

    Raises:
        FedpflError: where no sample was held out.
    """
    rows: list[dict[str, float | None]] = []
    # A run that is lost may have diverged in the first round.
    if (folder / "rounds.csv").is_file() or not lost:
        rows = _read_evaluations(folder, metric)
    values = _list_scores(rows, metric)
    if not lost and not values and _is_untrained(folder):
        lost = "untrained"
    if not lost and not values:
        raise FedpflError(
            f"{folder}: no sample was held out; set validation=0.1, or more for clients of few "
            "samples"
        )
    return TrialResult(
        value=None if lost else _find_best_score(values, metric),
        rounds=int(rows[-1]["round"] or 0) if rows else 0,
        directory=str(folder),
        lost=lost,
    )


def _read_evaluations(folder: Path, metric: str) -> list[dict[str, float | None]]:
    """Return rounds and validation scores of rounds.csv; the rest is not even read."""
    text = (folder / "rounds.csv").read_text(encoding="utf-8")
    return read_rows(text, only=("round", metric))


def _is_untrained(folder: Path) -> bool:
    """Tell if no client of a finished run has made a step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("trained") == 0


def _list_scores(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """Return the scores in rows of rounds.csv."""
    values = [row.get(metric) for row in rows]
    return [value for value in values if value is not None and math.isfinite(value)]


def _find_best_score(values: Sequence[float], metric: str) -> float | None:
    """Return the best of some scores, None without any."""
    return (max if METRICS[metric].best == "max" else min)(values, default=None)


# ---- Whether to give a trial up


class SearchTrial:
    """Judge a run of a search after each evaluation, by its best score so far.

    Attributes:
        study_name: of the search, which the run's summary names.
    """

    def __init__(self, sweeper: Mapping[str, Any], number: int):
        """Read the study, as the process of the job finds it.

        Args:
            sweeper: the configuration of Hydra's sweeper.
            number: of the job.
        """
        optuna = import_optuna()
        self.study_name = sweeper["study"]
        storage = open_storage(Path(sweeper["folder"]))
        study = optuna.load_study(study_name=self.study_name, storage=storage)
        study.pruner = optuna.pruners.NopPruner()
        if sweeper["prune"]:
            study.pruner = optuna.pruners.MedianPruner(
                n_startup_trials=study.user_attrs["startup"],
                n_warmup_steps=study.user_attrs["warmup"],
            )
        stored = study.trials[number]
        self._trial = optuna.trial.Trial(study, stored._trial_id)
        self._told_rounds = {*stored.intermediate_values}
        self._metric = study.user_attrs["metric"]
        self._scores = [*stored.intermediate_values.values()]

    def judge(self, round_number: int, row: Mapping[str, Any]) -> None:
        """Report an evaluated row. Raises TrialPruned if the search gives the trial up."""
        scores = _list_scores([row], self._metric)
        if not scores:
            return
        self._scores += scores
        # Optuna refuses a second report of a round.
        if round_number not in self._told_rounds:
            self._trial.report(_find_best_score(self._scores, self._metric), round_number)
        self._require_promising()

    def replay(self, folder: Path, is_finished: bool) -> None:
        """Judge the evaluations that a run directory has. Raises TrialPruned.

        Thus the results of trials do not depend on the runs that already exist.

        Args:
            folder: the run directory.
            is_finished: whether the run is finished; its last round is not judged.
        """
        if (folder / "rounds.csv").is_file():
            rows = _read_evaluations(folder, self._metric)
            # A run is never given up at its end, so its last evaluation is not reported.
            for row in rows[:-1] if is_finished else rows:
                self.judge(int(row["round"] or 0), row)
        self._require_promising()

    def _require_promising(self) -> None:
        if self._scores and self._trial.should_prune():
            raise TrialPruned("given up")
