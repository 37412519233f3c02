"""Search for hyperparameters with Optuna, by the accuracy on held-out samples alone: what
`hydra/sweeper=optuna` asks.

A study is a function of its configuration, seed and search space: killed anywhere, the same command
ends in the same trials. So each proposal has random numbers of its own, and nothing is told before
a whole batch has ended.
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
from fedpfl.record.columns import VALIDATION_ACCURACY as COLUMN
from fedpfl.record.console import format_duration
from fedpfl.record.rounds import read_rows
from fedpfl.runner import resume

if TYPE_CHECKING:
    import optuna

PRUNED = "pruned"
"""What a job returns that was given up."""
ShouldPrune = Callable[[int, Mapping[str, Any] | None], bool]


class TrialOrigin(NamedTuple):
    """What a run's numbers come from, as its summary says it.

    data: fingerprint of samples, split and initial weights. code: digests of the method's and the
    plugins' files.
    """

    data: str
    code: Mapping[str, str]


def find_origin(plan: Plan) -> TrialOrigin:
    """Read the data that a plan is about, and return what its runs come from. Raises FedpflError."""
    run = build_run(
        replace(plan, device=torch.device("cpu"))
    )  # an accelerator's memory is for the trials
    return TrialOrigin(run.fingerprint, resume.digest_code(run))


search_results: list[SearchResult] = []
"""What the searches of this process found, in order."""


@dataclass(frozen=True)
class SearchResult:
    """Hold a search's outcome.

    words: the overrides that were chosen. value: their validation accuracy in percent. trials: by
    what became of them.
    rounds: played by all of them. study: Optuna's, for figures. space: its distributions by key.
    """

    words: tuple[str, ...]
    value: float
    trials: Mapping[str, int]
    rounds: int
    study: optuna.Study = field(repr=False)
    space: Mapping[str, Any] = field(default_factory=dict)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise FedpflError(
            "tuning needs Optuna, which is not installed; pip install 'fedpfl[tune]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


DATABASE = "trials.db"


def open_storage(folder: Path) -> Any:
    """Return the trials kept below a folder. Raises FedpflError where the file is damaged."""
    with _reading(folder):
        return _storage(folder)


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise FedpflError for whatever SQLite, SQLAlchemy and Optuna say of a damaged file."""
    try:
        yield
    except FedpflError:
        raise
    except Exception as error:
        why = error_text(error).partition(" [SQL")[0]
        raise FedpflError(
            f"{folder / DATABASE} cannot be read as the trials of searches: {why}; remove it, and the same command "
            "goes through the trials again, by the runs that there are"
        ) from error


def _storage(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / DATABASE
    if not path.exists():  # made aside, as two searches may begin at once
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / path.name
            _opened(made).engine.dispose()
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
    return _opened(path)


def _opened(path: Path) -> Any:
    wait = {"connect_args": {"timeout": 120}}  # seconds, for jobs side by side
    return _optuna().storages.RDBStorage(f"sqlite:///{path.resolve()}", engine_kwargs=wait)


def parse_distribution(override: Override) -> Any:
    """Return what Optuna draws from for a sweep in Hydra's words.

    `a,b` and `choice(a, b)` are a choice, `range(1, 9, 2)` whole numbers, `interval(0.1, 1)` any,
    and `tag(log, interval(...))` uniform in the logarithm. Raises FedpflError for what is none of
    these.
    """
    kinds, sweep = _optuna().distributions, override.value()
    if isinstance(sweep, ChoiceSweep):
        return kinds.CategoricalDistribution(tuple(map(str, override.sweep_string_iterator())))
    if isinstance(sweep, RangeSweep):
        start, stop, step = sweep.start, sweep.stop, sweep.step
        if (
            start is None
            or stop is None
            or not all(float(end).is_integer() for end in (start, stop, step))
        ):
            raise FedpflError(
                f"{override.input_line}: ranges are of whole numbers; use interval(...) or choice(...)"
            )
        return kinds.IntDistribution(
            int(start), int(start + (stop - 1 - start) // step * step), step=int(step)
        )
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        return kinds.FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
    raise FedpflError(
        f"{override.input_line} cannot be searched; use choice(...), range(...) or interval(...)"
    )


class Search:
    """One study: `trials` proposals in batches, of which `play` runs the jobs.

    name: of the study, the same for the same search. space: distributions by key. first: what the
    configuration has, tried first where the space holds it. startup: proposals at random, before
    which nothing is given up either.
    warmup: rounds before which nothing is given up.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        space: Mapping[str, Any],
        first: Mapping[str, Any],
        trials: int,
        batch: int,
        startup: int,
        warmup: int,
        seed: int,
    ):
        self._space, self._trials, self._batch, self._startup, self._seed = (
            space,
            trials,
            batch,
            startup,
            seed,
        )
        self._folder, self._name, self._warmup = folder.resolve(), name, warmup
        self._first = {
            key: known
            for key, value in first.items()
            if (known := _match_value(space[key], value)) is not None
        }
        with _reading(folder):
            self.study = self._open()

    def _open(self) -> Any:
        study = _optuna().create_study(
            storage=open_storage(self._folder),
            study_name=self._name,
            direction="maximize",
            load_if_exists=True,
        )
        study.set_user_attr("startup", self._startup)
        study.set_user_attr("warmup", self._warmup)
        return study

    def forget(self) -> None:
        """Drop all trials; proposals come again as they came, and runs that are whole are not run
        again.
        """
        _optuna().delete_study(study_name=self._name, storage=self.study._storage)
        self.study = self._open()

    def verify(
        self, origin: Callable[[list[str]], TrialOrigin], tell: Callable[[str], None]
    ) -> None:
        """Check every stored trial against its run, and forget all where one is not what its run
        says.

        Later proposals rest on every earlier value, so no single trial can be taken out.

        Args:
            origin: Of a trial's words, what its run must come from.
            tell: Told why the trials are forgotten.
        """
        states = _optuna().trial.TrialState
        with _reading(self._folder):
            stored = [
                trial
                for trial in self.study.trials
                if trial.state in (states.COMPLETE, states.PRUNED)
            ]
        for trial in stored:
            if fault := self._fault(trial, origin):
                tell(f"trial {trial.number + 1} {fault}: the search goes through its trials again")
                self.forget()
                return

    def _fault(self, trial: Any, origin: Callable[[list[str]], TrialOrigin]) -> str:
        """Return in what a stored trial differs from its run, empty where in nothing."""
        complete = trial.state == _optuna().trial.TrialState.COMPLETE
        value = trial.value if complete else None
        if trial.user_attrs.get("digest") != _digest(trial, value):
            return f"is not in {self._folder / DATABASE} as it was stored"
        path = self._folder / trial.user_attrs["directory"]
        try:
            from fedpfl.report import load  # pandas is slow to load

            run = load.read_started_run(path)
            values = _validation([*run.rounds.to_dict("records")])
        except FedpflError as error:
            return f"has lost its run ({error})"
        if fault := foreign(run.summary, origin(self.words(trial.params))):
            return f"{fault} ({path})"
        # The run of one that was given up may have gone on since, for an equal proposal.
        if complete and (run.status != "finished" or max(values, default=None) != value):
            return f"has another accuracy than its run ({path})"
        return ""

    def run(
        self,
        play: Callable[[list[tuple[int, list[str]]]], list[TrialResult]],
        tell: Callable[[str], None],
    ) -> SearchResult:
        """Run what is missing. play: of numbers and overrides of jobs to what became of them, in
        order.
        """
        optuna = _optuna()
        states, began, here = optuna.trial.TrialState, time.monotonic(), 0
        while True:
            batch = self._next(states)
            if not batch:
                break
            jobs = [(trial.number, self.words(trial.params)) for trial in batch]
            once = {
                tuple(words): (number, words) for number, words in reversed(jobs)
            }  # equal ones are one run
            ends = dict(
                zip(sorted(once, key=once.__getitem__), play(sorted(once.values())), strict=True)
            )
            spent, here = time.monotonic() - began, here + len(batch)
            for trial, (number, words) in zip(batch, jobs, strict=True):
                end = ends[tuple(words)]
                kept = optuna.trial.Trial(self.study, trial._trial_id)
                kept.set_user_attr("rounds", end.rounds)
                place = os.path.relpath(
                    Path(end.directory).resolve(), self._folder
                )  # the folder may be moved
                kept.set_user_attr("directory", place)
                if end.value is None and not self.study.trials[number].intermediate_values:
                    kept.report(0.0, 0)  # it diverged before it was judged
                kept.set_user_attr("digest", _digest(self.study.trials[number], end.value))
                if end.value is None:
                    self.study.tell(number, state=states.PRUNED)
                else:
                    self.study.tell(number, end.value)
                done = sum(
                    one.state.is_finished() and one.state != states.FAIL
                    for one in self.study.trials
                )
                value = end.lost if end.value is None else f"validation {end.value:.2f} %"
                left = (self._trials - done) * spent / here
                eta = f", ETA {format_duration(left)}" if done < self._trials else ""
                tell(f"trial {done}/{self._trials}{eta}  {' '.join(words)}: {value}")
        return self._found(states)

    def _next(self, states: Any) -> list[Any]:
        """Return the next batch's trials: those that a killed process left first."""
        for trial in self.study.trials:
            if trial.state == states.RUNNING and trial.params.keys() != self._space.keys():
                self.study.tell(trial.number, state=states.FAIL)  # killed while it was drawn
        alive = [trial for trial in self.study.trials if trial.state != states.FAIL]
        begun = [trial for trial in alive if trial.state == states.RUNNING]
        count = sum(trial.state != states.WAITING for trial in alive)
        # A batch that was broken off while it was told is not filled up: its proposals would know
        # more than they may.
        while count < self._trials and (not begun or count % self._batch):
            self.study.sampler = self._sampler(count)
            if (
                count == 0
                and self._first
                and not any(trial.state == states.WAITING for trial in self.study.trials)
            ):
                self.study.enqueue_trial(self._first)
            number = self.study.ask(dict(self._space)).number
            begun.append(self.study.trials[number])
            count += 1
        return begun

    def _sampler(self, place: int) -> Any:
        digest = hashlib.blake2b(f"{self._seed} {place}".encode(), digest_size=4).digest()
        return _optuna().samplers.TPESampler(
            seed=int.from_bytes(digest), n_startup_trials=self._startup
        )

    def words(self, params: Mapping[str, Any]) -> list[str]:
        """Return proposed values as overrides."""
        return [
            f"{key}={value:.4g}"
            if isinstance(value := params[key], float)
            else requote_word(f"{key}={value}")
            for key in self._space
        ]

    def _found(self, states: Any) -> SearchResult:
        over = [
            trial for trial in self.study.trials if trial.state in (states.COMPLETE, states.PRUNED)
        ]
        trials = over[: self._trials]  # an earlier search may have been longer
        whole = [trial for trial in trials if trial.state == states.COMPLETE]
        if not whole:
            raise FedpflError(
                f"none of {len(trials)} trials came to its end; look at their run.log"
            )
        best = max(whole, key=lambda trial: (trial.value, -trial.number))
        counts = {"finished": len(whole), "given up": len(trials) - len(whole)}
        # Equal ones are one run.
        rounds = {trial.user_attrs["directory"]: trial.user_attrs["rounds"] for trial in trials}
        return SearchResult(
            tuple(self.words(best.params)),
            best.value,
            counts,
            sum(rounds.values()),
            self.study,
            self._space,
        )


@dataclass(frozen=True)
class TrialResult:
    """Hold what became of a trial: its validation accuracy, None if it is `lost`; where it is."""

    value: float | None
    rounds: int
    directory: str
    lost: Literal["", "given up", "diverged", "untrained"] = ""


def _is_untrained(folder: Path) -> bool:
    """Tell whether no client of a finished run has made a step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("trained") == 0


def read_trial_result(
    folder: Path, lost: Literal["", "given up", "diverged", "untrained"] = ""
) -> TrialResult:
    """Read a trial's run directory: the validation accuracy in rounds.csv, and no other column but
    `round`.
    """
    path, rows = folder / "rounds.csv", list[dict[str, float | None]]()
    if path.is_file() or not lost:  # it may have diverged in the first round
        rows = read_rows(path.read_text(encoding="utf-8"), only=("round", COLUMN))
    values = _validation(rows)
    if not lost and not values and _is_untrained(folder):
        lost = "untrained"
    if not lost and not values:
        raise FedpflError(
            f"{folder}: no sample was held out; set validation=0.1, or more for clients of few samples"
        )
    return TrialResult(
        None if lost else max(values), int(rows[-1]["round"] or 0) if rows else 0, str(folder), lost
    )


def _validation(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the validation accuracies in rows of rounds.csv."""
    values = [row.get(COLUMN) for row in rows]
    return [value for value in values if value is not None and math.isfinite(value)]


def _digest(trial: Any, value: float | None) -> str:
    """Return the digest of all that is stored of a trial, so that an edited one is noticed.

    value: its validation accuracy, None where it was given up; Optuna then stores the last one that
    it was told.
    """
    attributes = {key: text for key, text in trial.user_attrs.items() if key != "digest"}
    content = [trial.params, value, trial.intermediate_values, attributes]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def foreign(summary: Mapping[str, Any], origin: TrialOrigin) -> str:
    """Return why a run's numbers do not belong to a search, empty where they do. summary: of the
    run.
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

    if fault := foreign(reading.read_summary(folder), origin):
        raise FedpflError(
            f"{folder} {fault} than the search began with, so it cannot be compared; give the same command again, "
            "which searches anew, or remove that directory"
        )


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
    """Return the trial that a job of a sweep is, None where the sweep is no search.

    Args:
        sweeper: the configuration of Hydra's sweeper.
        number: of the job.
    """
    study_name = sweeper.get("study")
    if not study_name:
        return None
    return SearchTrial(study_name, make_should_prune(sweeper, number))


def replay_evaluations(folder: Path, should_prune: ShouldPrune, is_finished: bool) -> bool:
    """Tell a search of the evaluations that a run directory holds, and return whether it gives the
    run up.

    So what becomes of a trial, and what others are compared with, does not depend on which runs
    there are already.

    Args:
        folder: Of the run.
        should_prune: What `make_should_prune` returns.
        is_finished: Whether the run is finished; nobody is asked after the last round.
    """
    path = folder / "rounds.csv"
    rows = (
        read_rows(path.read_text(encoding="utf-8"), only=("round", COLUMN))
        if path.is_file()
        else []
    )
    judged = rows[:-1] if is_finished else rows
    return any(should_prune(int(row["round"] or 0), row) for row in judged)


def make_should_prune(sweeper: Mapping[str, Any], number: int) -> ShouldPrune:
    """Return what tells a job after an evaluation whether to give up: never where the sweep is no
    search.

    sweeper: the configuration of Hydra's sweeper. number: of the job. The function takes the round
    and the row of an evaluation, or None at the beginning.
    """
    if not sweeper.get("study"):
        return lambda round_number, row: False
    optuna = _optuna()
    study = optuna.load_study(
        study_name=sweeper["study"], storage=open_storage(Path(sweeper["folder"]))
    )
    attributes = study.user_attrs
    study.pruner = (
        optuna.pruners.MedianPruner(
            n_startup_trials=attributes["startup"], n_warmup_steps=attributes["warmup"]
        )
        if sweeper["prune"]
        else optuna.pruners.NopPruner()
    )
    stored = study.trials[number]
    trial = optuna.trial.Trial(study, stored._trial_id)
    best = max(stored.intermediate_values.values(), default=-math.inf)

    def give_up(round_number: int, row: Mapping[str, Any] | None) -> bool:
        nonlocal best
        if row is not None:
            value = row.get(COLUMN)
            if value is None or not math.isfinite(value):
                return False
            best = max(best, value)
            if round_number not in stored.intermediate_values:
                trial.report(best, round_number)
        return best > -math.inf and bool(trial.should_prune())

    return give_up


def name_study(identity: str, seed: int, words: Sequence[str], origin: TrialOrigin) -> str:
    """Return a study's name, from what its trials have in common and the words of its search space."""
    come_from = json.dumps(origin, sort_keys=True)
    text = "\n".join([identity, str(seed), come_from, *sorted(words)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _match_value(space: Any, value: Any) -> Any:
    """Return the value as the space holds it, None if it does not."""
    for known in getattr(space, "choices", ()):
        if str(value) == known or _number(value) == _number(known) is not None:
            return known
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    step = getattr(space, "step", None)
    return value if low <= value <= high and not (step and (value - low) % step) else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
