"""Search for hyperparameters with Optuna, by the validation score alone (`hydra/sweeper=optuna`).

A study is a function of its configuration, seed and search space: killed anywhere, the same command
ends in the same trials. So each proposal has random numbers of its own, and the study is told of
trials only when a whole batch has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from fedpfl.config.overrides import requote_word
from fedpfl.config.plan import Plan, build_run
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.tasks import CLASSIFICATION, TASKS, Task
from fedpfl.record.columns import task_of_columns, validation_column
from fedpfl.record.console import format_duration
from fedpfl.record.rounds import read_rows
from fedpfl.runner import resume

if TYPE_CHECKING:
    import optuna

PRUNED = "pruned"
"""What a job returns that was given up."""
ShouldPrune = Callable[[int, Mapping[str, Any] | None], bool]
"""Of the round and the row of an evaluation, whether to give the run up.

The row is None when a run begins or goes on.
"""
Outcome = Literal["", "given up", "diverged", "untrained"]
"""Why a trial has no validation score, "" where it has one."""
DATABASE = "trials.db"


class TrialOrigin(NamedTuple):
    """What a run's numbers come from, as its summary says it.

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


@dataclass(frozen=True)
class SearchResult:
    """Hold a search's outcome.

    Attributes:
        overrides: the words that were chosen.
        value: their validation score, such as the accuracy in percent.
        trials: number of trials by what became of them.
        rounds: played by all of them.
        study: Optuna's, for figures.
        space: its distributions by key.
        task: whose score it searched by.
    """

    overrides: tuple[str, ...]
    value: float
    trials: Mapping[str, int]
    rounds: int
    study: optuna.Study = field(repr=False)
    space: Mapping[str, Any] = field(default_factory=dict)
    task: Task = CLASSIFICATION


search_results: list[SearchResult] = []
"""What the searches of this process found, in order."""


@dataclass(frozen=True)
class TrialResult:
    """Hold what became of a trial.

    Attributes:
        value: its validation score, None where `lost` says why there is none.
        rounds: that it played.
        directory: of its run.
        lost: why it has no validation score.
    """

    value: float | None
    rounds: int
    directory: str
    lost: Outcome = ""


# ---- Optuna


def _import_optuna() -> Any:
    """Import Optuna when it is first asked for, as it is an extra. Raises FedpflError."""
    try:
        import optuna
    except ImportError:
        raise FedpflError(
            "tuning needs Optuna, which is not installed; pip install 'fedpfl[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_storage(folder: Path) -> Any:
    """Return the trials stored below a folder. Raises FedpflError where the file is damaged."""
    with _database_errors(folder):
        return _create_storage(folder)


@contextlib.contextmanager
def _database_errors(folder: Path) -> Iterator[None]:
    """Raise FedpflError for whatever SQLite, SQLAlchemy and Optuna say of a damaged file."""
    try:
        yield
    except FedpflError:
        raise
    except Exception as error:
        reason = error_text(error).partition(" [SQL")[0]
        raise FedpflError(
            f"{folder / DATABASE} cannot be read as the trials of searches: {reason}; remove it, "
            "and the same command goes through the trials again, by the runs that there are"
        ) from error


def _create_storage(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DATABASE
    if not path.exists():
        # Two searches may begin at once: the file is made under another name, and linked whole.
        with tempfile.TemporaryDirectory(dir=folder) as temporary_folder:
            new_path = Path(temporary_folder) / path.name
            _connect(new_path).engine.dispose()
            with contextlib.suppress(FileExistsError):
                os.link(new_path, path)
    return _connect(path)


def _connect(path: Path) -> Any:
    timeout_seconds = 120  # for jobs side by side
    return _import_optuna().storages.RDBStorage(
        f"sqlite:///{path.resolve()}",
        engine_kwargs={"connect_args": {"timeout": timeout_seconds}},
    )


def parse_distribution(override: Override) -> Any:
    """Return what Optuna draws from for a sweep in Hydra's words.

    `a,b` and `choice(a, b)` are a choice, `range(1, 9, 2)` whole numbers, `interval(0.1, 1)` any,
    and `tag(log, interval(...))` uniform in the logarithm.

    Raises:
        FedpflError: for what is none of these.
    """
    # ---- choice(a, b)
    distributions = _import_optuna().distributions
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        choices = tuple(map(str, override.sweep_string_iterator()))
        return distributions.CategoricalDistribution(choices)

    # ---- range(start, stop, step)
    if isinstance(sweep, RangeSweep):
        is_whole = all(
            number is not None and float(number).is_integer()
            for number in (sweep.start, sweep.stop, sweep.step)
        )
        if not is_whole:
            raise FedpflError(
                f"{override.input_line}: ranges are of whole numbers; use interval(...) or "
                "choice(...)"
            )
        start = sweep.start
        stop = sweep.stop
        step = sweep.step
        assert start is not None
        assert stop is not None
        # Optuna's upper end is a value of its own; Hydra's is not.
        largest = start + (stop - 1 - start) // step * step
        return distributions.IntDistribution(
            int(start),
            int(largest),
            step=int(step),
        )

    # ---- interval(start, end)
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        is_logarithmic = "log" in sweep.tags
        return distributions.FloatDistribution(sweep.start, sweep.end, log=is_logarithmic)
    raise FedpflError(
        f"{override.input_line} cannot be searched; use choice(...), range(...) or interval(...)"
    )


# ---- The search


@dataclass(frozen=True)
class SearchSettings:
    """Say how a search proposes.

    Attributes:
        trials: how many proposals there are.
        batch: how many are made before the study is told what became of them.
        startup: proposals at random, before which nothing is given up either.
        warmup: rounds before which nothing is given up.
        seed: of the proposals.
        task: whose score is searched by.
    """

    trials: int
    batch: int
    startup: int
    warmup: int
    seed: int
    task: Task = CLASSIFICATION


class Search:
    """One study: proposals in batches, whose jobs somebody else runs.

    Args:
        folder: where the trials are stored.
        name: of the study, the same for the same search.
        space: distributions by key.
        configured_values: what the configuration has, tried first where the space holds it.
        settings: how it proposes.
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
        self._settings = settings
        self._first_proposal: dict[str, Any] = {}
        for key, value in configured_values.items():
            matched = _match_value(space[key], value)
            if matched is not None:
                self._first_proposal[key] = matched
        with _database_errors(folder):
            self.study = self._open_study()

    @property
    def task(self) -> Task:
        """Return the task whose score is searched by."""
        return self._settings.task

    def _open_study(self) -> Any:
        study = _import_optuna().create_study(
            storage=open_storage(self._folder),
            study_name=self._name,
            direction="maximize" if self._settings.task.is_higher_better else "minimize",
            load_if_exists=True,
        )
        # Jobs read these from the study, in processes of their own.
        study.set_user_attr("startup", self._settings.startup)
        study.set_user_attr("warmup", self._settings.warmup)
        study.set_user_attr("task", self._settings.task.name)
        return study

    def forget(self) -> None:
        """Drop all trials.

        Proposals come again as they came, and runs that are whole are not run again.
        """
        _import_optuna().delete_study(study_name=self._name, storage=self.study._storage)
        self.study = self._open_study()

    def verify(
        self, find_origin: Callable[[list[str]], TrialOrigin], tell: Callable[[str], None]
    ) -> None:
        """Check every stored trial against its run; forget all where one differs.

        Later proposals rest on every earlier value, so no single trial can be taken out.

        Args:
            find_origin: returns what the run of a trial's words must come from.
            tell: called with why the trials are forgotten.
        """
        states = _import_optuna().trial.TrialState
        with _database_errors(self._folder):
            stored_trials = [
                trial
                for trial in self.study.trials
                if trial.state in (states.COMPLETE, states.PRUNED)
            ]
        for trial in stored_trials:
            fault = self._find_fault(trial, find_origin)
            if fault:
                tell(f"trial {trial.number + 1} {fault}: the search goes through its trials again")
                self.forget()
                return

    def _find_fault(self, trial: Any, find_origin: Callable[[list[str]], TrialOrigin]) -> str:
        """Return in what a stored trial differs from its run, empty where in nothing."""
        is_complete = trial.state == _import_optuna().trial.TrialState.COMPLETE
        value = trial.value if is_complete else None
        if trial.user_attrs.get("digest") != _digest_trial(trial, value):
            return f"is not in {self._folder / DATABASE} as it was stored"
        path = self._folder / trial.user_attrs["directory"]
        try:
            from fedpfl.report import load  # pandas is slow to load

            run = load.read_started_run(path)
            values = _list_scores([*run.rounds.to_dict("records")], self._settings.task)
        except FedpflError as error:
            return f"has lost its run ({error})"
        fault = explain_other_origin(
            run.summary,
            find_origin(self.to_overrides(trial.params)),
        )
        if fault:
            return f"{fault} ({path})"
        # The run of one that was given up may have gone on since, for an equal proposal.
        is_equal = run.status == "finished" and _find_best_score(values, run.task) == value
        if is_complete and not is_equal:
            return f"has another {run.task.score_word} than its run ({path})"
        return ""

    def run(
        self,
        run_jobs: Callable[[list[tuple[int, list[str]]]], list[TrialResult]],
        tell: Callable[[str], None],
    ) -> SearchResult:
        """Run the trials that are missing, and return the best.

        Args:
            run_jobs: of numbers and words of jobs, returns what became of them, in order.
            tell: called with a line about each trial that has ended.
        """
        start_time = time.monotonic()
        told_count = 0
        while True:
            batch = self._next_batch()
            if not batch:
                return self._find_best()

            # ---- Step 1: run the jobs of the batch; equal proposals are one run.
            jobs = [(trial.number, self.to_overrides(trial.params)) for trial in batch]
            distinct_jobs: dict[tuple[str, ...], tuple[int, list[str]]] = {}
            for number, trial_words in jobs:
                distinct_jobs.setdefault(tuple(trial_words), (number, trial_words))
            ordered_jobs = sorted(distinct_jobs.values())
            job_results = run_jobs(ordered_jobs)
            results = {
                tuple(trial_words): result
                for (_, trial_words), result in zip(ordered_jobs, job_results, strict=True)
            }

            # ---- Step 2: tell the study, and whoever watches, what became of them.
            seconds = time.monotonic() - start_time
            told_count += len(batch)
            for trial, (_, trial_words) in zip(batch, jobs, strict=True):
                result = results[tuple(trial_words)]
                self._store_result(trial, result)
                ended_count = self._count_ended()
                outcome: str = result.lost
                if result.value is not None:
                    outcome = f"validation {self._settings.task.describe_score(result.value)}"
                eta = ""
                trials_left = self._settings.trials - ended_count
                if trials_left > 0:
                    eta = f", ETA {format_duration(trials_left * seconds / told_count)}"
                progress_text = f"{ended_count}/{self._settings.trials}{eta}"
                tell(f"trial {progress_text}  {' '.join(trial_words)}: {outcome}")

    def _store_result(self, trial: Any, result: TrialResult) -> None:
        """Tell the study what became of a trial."""
        optuna = _import_optuna()
        stored = optuna.trial.Trial(self.study, trial._trial_id)
        stored.set_user_attr("rounds", result.rounds)
        # Relative, as the folder may be moved.
        directory = os.path.relpath(
            Path(result.directory).resolve(),
            self._folder,
        )
        stored.set_user_attr("directory", directory)
        if result.value is None and not self.study.trials[trial.number].intermediate_values:
            # It diverged before it was judged.
            stored.report(0.0 if self._settings.task.is_higher_better else math.inf, 0)
        digest = _digest_trial(self.study.trials[trial.number], result.value)
        stored.set_user_attr("digest", digest)
        if result.value is None:
            self.study.tell(trial.number, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial.number, result.value)

    def _count_ended(self) -> int:
        """Return how many trials have ended, without those that were left half drawn."""
        failed = _import_optuna().trial.TrialState.FAIL
        return sum(
            trial.state.is_finished() and trial.state != failed for trial in self.study.trials
        )

    def _next_batch(self) -> list[Any]:
        """Return the next batch's trials: those that a killed process left first."""
        states = _import_optuna().trial.TrialState
        for trial in self.study.trials:
            if trial.state == states.RUNNING and trial.params.keys() != self._space.keys():
                self.study.tell(trial.number, state=states.FAIL)  # killed while it was drawn
        trials = [trial for trial in self.study.trials if trial.state != states.FAIL]
        batch = [trial for trial in trials if trial.state == states.RUNNING]
        count = sum(trial.state != states.WAITING for trial in trials)
        # A batch that was broken off while it was told is not filled up: its proposals would know
        # more than they may.
        while count < self._settings.trials and (not batch or count % self._settings.batch):
            self.study.sampler = self._make_sampler(count)
            if count == 0 and self._first_proposal:
                is_waiting = any(trial.state == states.WAITING for trial in self.study.trials)
                if not is_waiting:
                    self.study.enqueue_trial(self._first_proposal)
            number = self.study.ask(dict(self._space)).number
            batch.append(self.study.trials[number])
            count += 1
        return batch

    def _make_sampler(self, position: int) -> Any:
        """Return a sampler whose random numbers are a function of the seed and the proposal."""
        key = f"{self._settings.seed} {position}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return _import_optuna().samplers.TPESampler(
            seed=int.from_bytes(digest), n_startup_trials=self._settings.startup
        )

    def to_overrides(self, params: Mapping[str, Any]) -> list[str]:
        """Return proposed values as words of the command line."""
        trial_words = []
        # In the order of the space: equal proposals are equal words.
        for key in self._space:
            value = params[key]
            if isinstance(value, float):
                # As a user would type it, so that the run is found again by what is printed.
                trial_words.append(f"{key}={value:.4g}")
            else:
                trial_words.append(requote_word(f"{key}={value}"))
        return trial_words

    def _find_best(self) -> SearchResult:
        """Return the first of the best trials. Raises FedpflError where none came to its end."""
        # ---- Step 1: the trials of this search that have ended.
        states = _import_optuna().trial.TrialState
        ended_trials = [
            trial for trial in self.study.trials if trial.state in (states.COMPLETE, states.PRUNED)
        ]
        # An earlier search may have been longer.
        trials = ended_trials[: self._settings.trials]
        complete_trials = [trial for trial in trials if trial.state == states.COMPLETE]
        if not complete_trials:
            raise FedpflError(
                f"none of {len(trials)} trials came to its end; look at their run.log"
            )

        # ---- Step 2: the best of those that came to their end.
        sign = 1 if self._settings.task.is_higher_better else -1
        best = max(complete_trials, key=lambda trial: (sign * trial.value, -trial.number))
        # Equal proposals are one run.
        rounds = {trial.user_attrs["directory"]: trial.user_attrs["rounds"] for trial in trials}
        return SearchResult(
            overrides=tuple(self.to_overrides(best.params)),
            value=best.value,
            trials={
                "finished": len(complete_trials),
                "given up": len(trials) - len(complete_trials),
            },
            rounds=sum(rounds.values()),
            study=self.study,
            space=self._space,
            task=self._settings.task,
        )


def _match_value(distribution: Any, value: Any) -> Any:
    """Return the value as the distribution holds it, None if it does not."""
    number = _to_number(value)
    for choice in getattr(distribution, "choices", ()):
        is_same_number = number is not None and number == _to_number(choice)
        if str(value) == choice or is_same_number:
            return choice
    low = getattr(distribution, "low", None)
    high = getattr(distribution, "high", None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if low is None or high is None or not is_number or not low <= value <= high:
        return None
    step = getattr(distribution, "step", None)
    if step and (value - low) % step:
        return None
    return value


def _to_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# ---- Results of trials


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
    """Return whether no client of a finished run has made a step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("trained") == 0


def _list_scores(rows: Sequence[Mapping[str, Any]], task: Task) -> list[float]:
    """Return the validation scores in rows of rounds.csv."""
    values = [row.get(validation_column(task)) for row in rows]
    return [value for value in values if value is not None and math.isfinite(value)]


def _find_best_score(values: Sequence[float], task: Task) -> float | None:
    """Return the best of some scores, None without any."""
    return (max if task.is_higher_better else min)(values, default=None)


def _digest_trial(trial: Any, value: float | None) -> str:
    """Return the digest of all that is stored of a trial; it shows edits.

    Args:
        trial: Optuna's.
        value: its validation score, None where it was given up; Optuna then stores the last one
            that it was told.
    """
    attributes = {key: text for key, text in trial.user_attrs.items() if key != "digest"}
    content = [trial.params, value, trial.intermediate_values, attributes]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def explain_other_origin(summary: Mapping[str, Any], origin: TrialOrigin) -> str:
    """Return why a run's numbers do not belong to a search, empty where they do.

    Args:
        summary: of the run.
        origin: what the search's runs come from.
    """
    if summary.get("data") != origin.data:
        return "was run on other data"
    if summary.get("code") != [origin.code]:
        return "was run by other code"
    return ""


def require_origin(folder: Path, origin: TrialOrigin) -> None:
    """Raise FedpflError where a trial's run comes from other data or code than its search.

    They may have changed since the search began, and a finished run of other code is taken as it
    is.
    """
    from fedpfl.report import reading  # pandas is slow to load

    fault = explain_other_origin(reading.read_summary(folder), origin)
    if fault:
        raise FedpflError(
            f"{folder} {fault} than the search began with, so it cannot be compared; give the same "
            "command again, which searches anew, or remove that directory"
        )


def name_study(identity: str, seed: int, space_words: Sequence[str], origin: TrialOrigin) -> str:
    """Return a study's name, from what its trials have in common and its search space."""
    origin_text = json.dumps(origin, sort_keys=True)
    text = "\n".join([identity, str(seed), origin_text, *sorted(space_words)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# ---- Giving a trial up


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
    """Return what tells a job of a search, after an evaluation, whether to give up.

    Args:
        sweeper: the configuration of Hydra's sweeper.
        number: of the job.
    """
    # ---- Step 1: the study, as the process of the job reads it.
    optuna = _import_optuna()
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

    So what becomes of a trial, and what others are compared with, does not depend on which runs
    there are already.

    Args:
        folder: the run directory.
        should_prune: what `make_should_prune` returns.
        is_finished: whether the run is finished; nobody is asked after the last round.
    """
    if not (folder / "rounds.csv").is_file():
        return False
    _, rows = _read_evaluations(folder)
    if is_finished:
        # A run is never given up at its end, so its last evaluation is not reported.
        rows = rows[:-1]
    return any(should_prune(int(row["round"] or 0), row) for row in rows)
