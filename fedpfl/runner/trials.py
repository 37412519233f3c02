"""Read the results of a search's trials, and prune them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedpfl.config.plan import Plan
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.records import Record, Values
from fedpfl.record.columns import METRICS, column_names, round_columns, validation_column
from fedpfl.record.rounds import read_rows
from fedpfl.runner import resume
from fedpfl.runner.faults import TrialPruned

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
        lost: why it has no validation score.
        curve: round and best score so far of each evaluation at which it may be given up.
    """

    value: float | None
    rounds: int
    lost: Outcome = ""
    curve: Sequence[tuple[int, float]] = ()


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
    scores = _read_scores(folder, metric)
    rounds = max(scores, default=0)
    curve: dict[int, float] = {}
    for round_number, score in scores.items():
        if score is not None:
            curve[round_number] = _find_best_score([score, *curve.values()], metric)
    value = [None, *curve.values()][-1]
    if not lost and value is None and _is_untrained(folder):
        lost = "untrained"
    if not lost:
        if value is None:
            raise FedpflError(
                f"{folder}: no sample was held out; set validation=0.1, or more for clients of few "
                "samples"
            )
        # A run is never given up at its end.
        curve.pop(rounds, None)
    return TrialResult(None if lost else value, rounds, lost, [*curve.items()])


def read_search(path: Path) -> Record:
    """Read the file of a search: its settings, and the trials that have ended."""
    return json.loads(path.read_text(encoding="utf-8"))


def _read_scores(folder: Path, metric: str) -> dict[int, float | None]:
    """Read each round's validation score, None without one, and no other column."""
    path = folder / "rounds.csv"
    # A run may diverge in its first round.
    text = path.read_text(encoding="utf-8") if path.is_file() else "round\n"
    rows = read_rows(text, only=("round", metric))
    return {int(row["round"] or 0): _keep_finite(row.get(metric)) for row in rows}


def _is_untrained(folder: Path) -> bool:
    """Tell if no client of a finished run has made a step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("trained") == 0


def _keep_finite(score: float | None) -> float | None:
    return score if score is not None and math.isfinite(score) else None


def _find_best_score(values: Sequence[float], metric: str) -> float:
    """Return the best of some scores."""
    return (max if METRICS[metric].best == "max" else min)(values)


# ---- Whether to give a trial up


class SearchTrial:
    """Judge a run of a search after each evaluation, by its best score so far.

    Attributes:
        study_name: of the search, which the run's summary names.
    """

    def __init__(self, sweeper: Values):
        """Read the search, as the process of the job finds it.

        Args:
            sweeper: the configuration of Hydra's sweeper.
        """
        self.study_name = sweeper["study"]
        search = read_search(Path(sweeper["folder"]) / f"{self.study_name}.json")
        self._metric = search["metric"]
        self._warmup = search["warmup"]
        curves = [dict(trial["curve"]) for trial in search["trials"] if trial["value"] is not None]
        is_judging = sweeper["prune"] and len(curves) >= search["startup"]
        self._curves = curves if is_judging else []
        self._scores: list[float] = []

    def judge(self, round_number: int, row: Values) -> None:
        """Judge an evaluated row.

        Raises:
            TrialPruned: if the best score so far is worse than the median of finished trials'.
        """
        score = _keep_finite(row.get(self._metric))
        if score is None:
            return
        self._scores.append(score)
        curves = [curve for curve in self._curves if round_number in curve]
        if curves and round_number >= self._warmup:
            best_score = _find_best_score(self._scores, self._metric)
            median = float(np.percentile([curve[round_number] for curve in curves], 50))
            if _find_best_score([median, best_score], self._metric) != best_score:
                raise TrialPruned("given up")

    def replay(self, folder: Path, is_finished: bool) -> None:
        """Judge the evaluations that a run directory has. Raises TrialPruned.

        Thus the results of trials do not depend on the runs that already exist.

        Args:
            folder: the run directory.
            is_finished: whether the run is finished; its last round is not judged.
        """
        scores = _read_scores(folder, self._metric)
        for round_number, score in scores.items():
            if not is_finished or round_number < max(scores):
                self.judge(round_number, {self._metric: score})
