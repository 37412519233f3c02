"""A search for hyperparameters with Optuna, by the validation score alone (`hydra/sweeper=optuna`).

A search is a function of its configuration, seed and search space: after a kill, the same command
ends in the same trials. Therefore each proposal has its own seed, and the trials of a batch are
known, and written, only after the whole batch has ended.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedpfl.config.overrides import requote_word
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION, Task
from fedpfl.record.columns import METRICS, validation_column
from fedpfl.record.eta import format_duration
from fedpfl.runner.optuna_study import import_optuna
from fedpfl.runner.trials import TrialResult, read_search


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
    space: Values = field(default_factory=dict)
    task: Task = CLASSIFICATION


search_results: list[SearchResult] = []
"""Results of the searches of this process, in order."""


@dataclass(frozen=True)
class SearchSettings:
    """Hold the settings of a search.

    Attributes:
        trials: number of proposals.
        batch: proposals that are made before the results of any is known.
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
    """Propose trials in batches.

    Attributes:
        path: file of the trials that have ended, which jobs read.
        settings: of the search.
        trials: those that have ended, with `params` beside the fields of `TrialResult`.
    """

    def __init__(
        self,
        path: Path,
        space: Values,
        configured_values: Values,
        settings: SearchSettings,
    ):
        """Read the trials that have ended.

        Args:
            path: see above.
            space: distributions by key.
            configured_values: values of the configuration, tried first if the space has them.
            settings: of the search.
        """
        self.path = path
        self._space = space
        self.settings = settings
        self._first_proposal: Record = {}
        for key, value in configured_values.items():
            matching_value = _match_value(space[key], value)
            if matching_value is not None:
                self._first_proposal[key] = matching_value
        self.trials: list[Record] = read_search(path)["trials"] if path.is_file() else []

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
        start_count = len(self.trials)
        self._write()
        while len(self.trials) < self.settings.trials:
            # ---- Step 1: run the jobs of a batch; equal proposals are one run.
            proposals = self._propose_batch()
            numbers: dict[tuple[str, ...], int] = {}
            for number, params in enumerate(proposals, len(self.trials)):
                numbers.setdefault(self.to_overrides(params), number)
            job_results = run_jobs([(number, [*words]) for words, number in numbers.items()])
            results = dict(zip(numbers, job_results, strict=True))

            # ---- Step 2: report and write the results.
            told_count = len(self.trials) + len(proposals) - start_count
            seconds_of_trial = (time.monotonic() - start_time) / told_count
            for params in proposals:
                words = self.to_overrides(params)
                result = results[words]
                self.trials.append({"params": params, **asdict(result)})
                results[words] = replace(result, curve=())  # a run counts once in a median
                outcome = result.lost or self.settings.describe_value(result.value or 0)
                left_count = self.settings.trials - len(self.trials)
                eta = f", ETA {format_duration(left_count * seconds_of_trial)}"
                progress = f"{len(self.trials)}/{self.settings.trials}{eta if left_count else ''}"
                tell(f"trial {progress}  {' '.join(words)}: {outcome}")
            self._write()
        return self._find_best()

    def _write(self) -> None:
        """Write the trials that have ended, and what jobs judge theirs by."""
        settings = {name: getattr(self.settings, name) for name in ("startup", "warmup", "metric")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with files.durable_write(self.path) as file:
            file.write(json.dumps({**settings, "trials": self.trials}).encode())

    def _propose_batch(self) -> list[Record]:
        """Return the values of the next trials, from the whole batches before them."""
        optuna = import_optuna()
        study = optuna.create_study(
            direction="maximize" if self.settings.is_higher_better else "minimize"
        )
        states = optuna.trial.TrialState
        for trial in self.trials:
            ended_trial = optuna.trial.create_trial(
                state=states.PRUNED if trial["value"] is None else states.COMPLETE,
                params=trial["params"],
                distributions=dict(self._space),
                value=trial["value"],
                intermediate_values=dict(trial["curve"]),
            )
            study.add_trial(ended_trial)
        proposals = []
        start = len(self.trials)
        for position in range(start, min(self.settings.trials, start + self.settings.batch)):
            study.sampler = self._make_sampler(position)
            if position == 0 and self._first_proposal:
                study.enqueue_trial(self._first_proposal)
            proposals.append(study.ask(dict(self._space)).params)
        return proposals

    def _make_sampler(self, position: int) -> Any:
        """Return a sampler seeded by the search's seed and the proposal's number."""
        key = f"{self.settings.seed} {position}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return import_optuna().samplers.TPESampler(
            seed=int.from_bytes(digest), n_startup_trials=self.settings.startup
        )

    def to_overrides(self, params: Values) -> tuple[str, ...]:
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
        trials = self.trials[: self.settings.trials]
        finished_trials = [trial for trial in trials if trial["value"] is not None]
        if not finished_trials:
            raise FedpflError(f"none of {len(trials)} trials finished; look at their run.log")
        find_best = max if self.settings.is_higher_better else min
        best = find_best(finished_trials, key=itemgetter("value"))
        # Equal proposals are one run.
        rounds = {self.to_overrides(trial["params"]): trial["rounds"] for trial in trials}
        lost_count = len(trials) - len(finished_trials)
        return SearchResult(
            overrides=self.to_overrides(best["params"]),
            value=best["value"],
            trials={"finished": len(finished_trials), "given up": lost_count},
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
