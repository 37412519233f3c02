"""A search for hyperparameters with Optuna, by the validation score alone (`hydra/sweeper=optuna`).

A study is a function of its configuration, seed and search space: after a kill, the same command
ends in the same trials. Therefore each proposal has its own seed, and the study learns results only
after a whole batch has ended.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpfl.config.overrides import requote_word
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, Task
from fedpfl.record.columns import METRICS, validation_column
from fedpfl.record.eta import format_duration
from fedpfl.runner.optuna_study import import_optuna, open_storage
from fedpfl.runner.trials import TrialResult


@dataclass(frozen=True)
class SearchResult:
    """Hold a search's outcome.

    Attributes:
        overrides: the chosen words.
        value: their validation score, such as the accuracy in percent.
        trials: number of trials by outcome.
        rounds: rounds of all trials together.
        space: distributions by key.
        task: of the score.
    """

    overrides: tuple[str, ...]
    value: float
    trials: Mapping[str, int]
    rounds: int
    space: Mapping[str, Any] = field(default_factory=dict)
    task: Task = CLASSIFICATION


search_results: list[SearchResult] = []
"""Results of the searches of this process, in order."""


@dataclass(frozen=True)
class SearchSettings:
    """Hold the settings of a search.

    Attributes:
        trials: number of proposals.
        batch: proposals that are made before the study learns their results.
        startup: random proposals, during which no trial is pruned.
        warmup: rounds before which no trial is pruned.
        seed: of the proposals.
        task: of the score.
        metric: the validation column that judges trials.
    """

    trials: int
    batch: int
    startup: int
    warmup: int
    seed: int
    task: Task = CLASSIFICATION
    metric: str = validation_column()

    @property
    def is_higher_better(self) -> bool:
        """Tell if larger values of the metric are better."""
        return METRICS[self.metric].best == "max"

    def describe_value(self, value: float) -> str:
        """Write a trial's value as terminals show it, with a name."""
        if self.metric == validation_column(self.task):
            return f"validation {self.task.describe_score(value)}"
        return f"{self.metric} {value:.4g} {METRICS[self.metric].unit}".rstrip()


class Search:
    """Propose trials of one study in batches.

    Args:
        folder: where the trials are stored.
        name: of the study, the same for the same search.
        space: distributions by key.
        configured_values: values of the configuration, tried first if the space has them.
        settings: of the search.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        space: Mapping[str, Any],
        configured_values: Mapping[str, Any],
        settings: SearchSettings,
    ):
        self._folder = folder.resolve()
        self._name = name
        self._space = space
        self.settings = settings
        self._first_proposal: dict[str, Any] = {}
        for key, value in configured_values.items():
            matching_value = _match_value(space[key], value)
            if matching_value is not None:
                self._first_proposal[key] = matching_value
        self.study = self._open_study()

    def _open_study(self) -> Any:
        study = import_optuna().create_study(
            storage=open_storage(self._folder),
            study_name=self._name,
            direction="maximize" if self.settings.is_higher_better else "minimize",
            load_if_exists=True,
        )
        # Jobs read these from the study, in processes of their own.
        study.set_user_attr("startup", self.settings.startup)
        study.set_user_attr("warmup", self.settings.warmup)
        study.set_user_attr("metric", self.settings.metric)
        return study

    def forget(self) -> None:
        """Drop all trials.

        Proposals come again as they came, and runs that are whole are not run again.
        """
        import_optuna().delete_study(study_name=self._name, storage=self.study._storage)
        self.study = self._open_study()

    def run(
        self,
        run_jobs: Callable[[list[tuple[int, list[str]]]], list[TrialResult]],
        tell: Callable[[str], None],
    ) -> SearchResult:
        """Run the trials that are missing, and return the best.

        Args:
            run_jobs: runs jobs, given by numbers and words; returns their results in order.
            tell: called with a line about each trial that has ended.
        """
        start_time = time.monotonic()
        told_count = 0
        while batch := self._next_batch():
            # ---- Step 1: run the jobs of the batch; equal proposals are one run.
            numbers: dict[tuple[str, ...], int] = {}
            for trial in batch:
                numbers.setdefault(self.to_overrides(trial.params), trial.number)
            job_results = run_jobs([(number, [*words]) for words, number in numbers.items()])
            results = dict(zip(numbers, job_results, strict=True))

            # ---- Step 2: store and report the results.
            told_count += len(batch)
            seconds_of_trial = (time.monotonic() - start_time) / told_count
            for trial in batch:
                words = self.to_overrides(trial.params)
                result = results[words]
                self._store_result(trial, result)
                outcome = result.lost or self.settings.describe_value(result.value or 0)
                ended_count = len(self._ended_trials())
                left_count = self.settings.trials - ended_count
                eta = f", ETA {format_duration(left_count * seconds_of_trial)}"
                progress = f"{ended_count}/{self.settings.trials}{eta if left_count else ''}"
                tell(f"trial {progress}  {' '.join(words)}: {outcome}")
        return self._find_best()

    def _store_result(self, trial: Any, result: TrialResult) -> None:
        """Store the result of a trial in the study."""
        optuna = import_optuna()
        stored = optuna.trial.Trial(self.study, trial._trial_id)
        stored.set_user_attr("rounds", result.rounds)
        # Relative, as the folder may be moved.
        directory = os.path.relpath(Path(result.directory).resolve(), self._folder)
        stored.set_user_attr("directory", directory)
        if result.value is not None:
            self.study.tell(trial.number, result.value)
            return
        if not self.study.trials[trial.number].intermediate_values:
            # It diverged before it was judged.
            stored.report(0.0 if self.settings.is_higher_better else math.inf, 0)
        self.study.tell(trial.number, state=optuna.trial.TrialState.PRUNED)

    def _ended_trials(self) -> list[Any]:
        """Return the trials that have ended, without those that were killed half drawn."""
        states = import_optuna().trial.TrialState
        return self.study.get_trials(states=(states.COMPLETE, states.PRUNED))

    def _next_batch(self) -> list[Any]:
        """Return the next batch of trials, first those that a killed process left."""
        states = import_optuna().trial.TrialState
        batch = []
        for trial in self.study.get_trials(states=(states.RUNNING,)):
            if trial.params.keys() == self._space.keys():
                batch.append(trial)
            else:  # killed while it was drawn
                self.study.tell(trial.number, state=states.FAIL)
        count = len(batch) + len(self._ended_trials())
        # A batch that was broken off while it was told is not filled up: its proposals would know
        # more than they may.
        while count < self.settings.trials and (not batch or count % self.settings.batch):
            self.study.sampler = self._make_sampler(count)
            is_waiting = bool(self.study.get_trials(states=(states.WAITING,)))
            if count == 0 and self._first_proposal and not is_waiting:
                self.study.enqueue_trial(self._first_proposal)
            number = self.study.ask(dict(self._space)).number
            batch.append(self.study.trials[number])
            count += 1
        return batch

    def _make_sampler(self, position: int) -> Any:
        """Return a sampler seeded by the search's seed and the proposal's number."""
        key = f"{self.settings.seed} {position}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return import_optuna().samplers.TPESampler(
            seed=int.from_bytes(digest), n_startup_trials=self.settings.startup
        )

    def to_overrides(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Return proposed values as words of the command line, in the order of the space."""
        trial_words = []
        for key in self._space:
            value = params[key]
            # As a user would type it: the printed words find the run again.
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            trial_words.append(requote_word(f"{key}={text}"))
        return tuple(trial_words)

    def _find_best(self) -> SearchResult:
        """Return the first of the best trials. Raises FedpflError if none finished."""
        # An earlier search may have been longer.
        trials = self._ended_trials()[: self.settings.trials]
        complete = import_optuna().trial.TrialState.COMPLETE
        complete_trials = [trial for trial in trials if trial.state == complete]
        if not complete_trials:
            raise FedpflError(f"none of {len(trials)} trials finished; look at their run.log")

        sign = 1 if self.settings.is_higher_better else -1
        best = max(complete_trials, key=lambda trial: (sign * trial.value, -trial.number))
        # Equal proposals are one run.
        rounds = {trial.user_attrs["directory"]: trial.user_attrs["rounds"] for trial in trials}
        return SearchResult(
            overrides=self.to_overrides(best.params),
            value=best.value,
            trials={
                "finished": len(complete_trials),
                "given up": len(trials) - len(complete_trials),
            },
            rounds=sum(rounds.values()),
            space=self._space,
            task=self.settings.task,
        )


def _match_value(distribution: Any, value: Any) -> Any:
    """Return the value as the distribution holds it, None if it does not."""
    choices = getattr(distribution, "choices", None)
    if choices:
        equal_choices = (choice for choice in choices if _to_text(choice) == _to_text(value))
        return next(equal_choices, None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not distribution.low <= value <= distribution.high:
        return None
    step = distribution.step
    return None if step and (value - distribution.low) % step else value


def _to_text(value: Any) -> str:
    """Return one text for equal numbers, such as 0.10 and 0.1; other values as text."""
    try:
        return str(float(value))
    except (TypeError, ValueError):
        return str(value)
