"""Search for hyperparameters with Optuna, by the accuracy on held-out samples alone: what `hydra/sweeper=optuna` asks.

A study is a function of its configuration, seed and search space: killed anywhere, the same command ends in the same
trials. So each proposal has random numbers of its own, and nothing is told before a whole batch has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from fedpfl.ground.errors import FedpflError
from fedpfl.record.columns import VALIDATION as COLUMN
from fedpfl.record.console import duration
from fedpfl.record.rounds import read

if TYPE_CHECKING:
    import optuna

PRUNED = "pruned"
"""What a job returns that was given up."""
Watch = Callable[[int, Mapping[str, Any] | None], bool]

found: list[Found] = []
"""What the searches of this process found, in order."""


@dataclass(frozen=True)
class Found:
    """Hold a search's outcome.

    words: the overrides that were chosen. value: their validation accuracy in percent. trials: by what became of them.
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
        raise FedpflError("tuning needs Optuna, which is not installed; pip install 'fedpfl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def storage(folder: Path) -> Any:
    """Return the trials kept below a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trials.db"
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


def distribution(override: Override) -> Any:
    """Return what Optuna draws from for a sweep in Hydra's words.

    `a,b` and `choice(a, b)` are a choice, `range(1, 9, 2)` whole numbers, `interval(0.1, 1)` any, and
    `tag(log, interval(...))` uniform in the logarithm. Raises FedpflError for what is none of these.
    """
    kinds, sweep = _optuna().distributions, override.value()
    if isinstance(sweep, ChoiceSweep):
        return kinds.CategoricalDistribution(tuple(map(str, override.sweep_string_iterator())))
    if isinstance(sweep, RangeSweep):
        start, stop, step = sweep.start, sweep.stop, sweep.step
        if start is None or stop is None or not all(float(end).is_integer() for end in (start, stop, step)):
            raise FedpflError(f"{override.input_line}: ranges are of whole numbers; use interval(...) or choice(...)")
        return kinds.IntDistribution(int(start), int(start + (stop - 1 - start) // step * step), step=int(step))
    if isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None:
        return kinds.FloatDistribution(sweep.start, sweep.end, log="log" in sweep.tags)
    raise FedpflError(f"{override.input_line} cannot be searched; use choice(...), range(...) or interval(...)")


class Search:
    """One study: `trials` proposals in batches, of which `play` runs the jobs.

    name: of the study, the same for the same search. space: distributions by key. first: what the configuration has,
    tried first where the space holds it. startup: proposals at random, before which nothing is given up either.
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
        optuna = _optuna()
        self._space, self._trials, self._batch, self._startup, self._seed = space, trials, batch, startup, seed
        self._first = {key: known for key, value in first.items() if (known := _within(space[key], value)) is not None}
        self.study = optuna.create_study(
            storage=storage(folder), study_name=name, direction="maximize", load_if_exists=True
        )
        self.study.set_user_attr("startup", startup)
        self.study.set_user_attr("warmup", warmup)

    def run(self, play: Callable[[list[tuple[int, list[str]]]], list[Ended]], tell: Callable[[str], None]) -> Found:
        """Run what is missing. play: of numbers and overrides of jobs to what became of them, in order."""
        optuna = _optuna()
        states, began, here = optuna.trial.TrialState, time.monotonic(), 0
        while True:
            batch = self._next(states)
            if not batch:
                break
            jobs = [(trial.number, self.words(trial.params)) for trial in batch]
            once = {tuple(words): (number, words) for number, words in reversed(jobs)}  # equal ones are one run
            ends = dict(zip(sorted(once, key=once.__getitem__), play(sorted(once.values())), strict=True))
            spent, here = time.monotonic() - began, here + len(batch)
            for trial, (number, words) in zip(batch, jobs, strict=True):
                end = ends[tuple(words)]
                kept = optuna.trial.Trial(self.study, trial._trial_id)
                kept.set_user_attr("rounds", end.rounds)
                kept.set_user_attr("directory", end.directory)
                if end.value is None:
                    if not kept.storage.get_trial(trial._trial_id).intermediate_values:
                        kept.report(0.0, 0)  # it diverged before it was judged
                    self.study.tell(number, state=states.PRUNED)
                else:
                    self.study.tell(number, end.value)
                done = sum(one.state.is_finished() and one.state != states.FAIL for one in self.study.trials)
                value = end.lost if end.value is None else f"validation {end.value:.2f} %"
                left = (self._trials - done) * spent / here
                eta = f", ETA {duration(left)}" if done < self._trials else ""
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
        # A batch that was broken off while it was told is not filled up: its proposals would know more than they may.
        while count < self._trials and (not begun or count % self._batch):
            self.study.sampler = self._sampler(count)
            if count == 0 and self._first and not any(trial.state == states.WAITING for trial in self.study.trials):
                self.study.enqueue_trial(self._first)
            number = self.study.ask(dict(self._space)).number
            begun.append(self.study.trials[number])
            count += 1
        return begun

    def _sampler(self, place: int) -> Any:
        digest = hashlib.blake2b(f"{self._seed} {place}".encode(), digest_size=4).digest()
        return _optuna().samplers.TPESampler(seed=int.from_bytes(digest), n_startup_trials=self._startup)

    def words(self, params: Mapping[str, Any]) -> list[str]:
        """Return proposed values as overrides."""
        return [
            f"{key}={value:.4g}" if isinstance(value := params[key], float) else f"{key}={value}" for key in self._space
        ]

    def _found(self, states: Any) -> Found:
        over = [trial for trial in self.study.trials if trial.state in (states.COMPLETE, states.PRUNED)]
        trials = over[: self._trials]  # an earlier search may have been longer
        whole = [trial for trial in trials if trial.state == states.COMPLETE]
        if not whole:
            raise FedpflError(f"none of {len(trials)} trials came to its end; look at their run.log")
        best = max(whole, key=lambda trial: (trial.value, -trial.number))
        counts = {"finished": len(whole), "given up": len(trials) - len(whole)}
        # Equal ones are one run.
        rounds = {trial.user_attrs["directory"]: trial.user_attrs["rounds"] for trial in trials}
        return Found(tuple(self.words(best.params)), best.value, counts, sum(rounds.values()), self.study, self._space)


@dataclass(frozen=True)
class Ended:
    """Hold what became of a trial: its validation accuracy, None if it is `lost`; where it is."""

    value: float | None
    rounds: int
    directory: str
    lost: Literal["", "given up", "diverged", "untrained"] = ""


def _is_untrained(folder: Path) -> bool:
    """Tell whether no client of a finished run has made a step."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8")).get("trained") == 0


def ended(folder: Path, lost: Literal["", "given up", "diverged", "untrained"] = "") -> Ended:
    """Read a trial's run directory: the validation accuracy in rounds.csv, and no other column but `round`."""
    path, rows = folder / "rounds.csv", list[dict[str, float | None]]()
    if path.is_file() or not lost:  # it may have diverged in the first round
        rows = read(path.read_text(encoding="utf-8"), only=("round", COLUMN))
    values = [value for row in rows if (value := row.get(COLUMN)) is not None and math.isfinite(value)]
    if not lost and not values and _is_untrained(folder):
        lost = "untrained"
    if not lost and not values:
        raise FedpflError(f"{folder}: no sample was held out; set validation=0.1, or more for clients of few samples")
    return Ended(None if lost else max(values), int(rows[-1]["round"] or 0) if rows else 0, str(folder), lost)


def watch(sweeper: Mapping[str, Any], number: int) -> Watch:
    """Return what tells a job after an evaluation whether to give up: never where the sweep is no search.

    sweeper: the configuration of Hydra's sweeper. number: of the job. The function takes the round and the row of an
    evaluation, or None at the beginning.
    """
    if not sweeper.get("study"):
        return lambda round_number, row: False
    optuna = _optuna()
    study = optuna.load_study(study_name=sweeper["study"], storage=storage(Path(sweeper["folder"])))
    attributes = study.user_attrs
    study.pruner = (
        optuna.pruners.MedianPruner(n_startup_trials=attributes["startup"], n_warmup_steps=attributes["warmup"])
        if sweeper["prune"]
        else optuna.pruners.NopPruner()
    )
    trial = optuna.trial.Trial(study, study.trials[number]._trial_id)
    best = max(study.trials[number].intermediate_values.values(), default=-math.inf)

    def give_up(round_number: int, row: Mapping[str, Any] | None) -> bool:
        nonlocal best
        if row is not None:
            value = row.get(COLUMN)
            if value is None or not math.isfinite(value):
                return False
            best = max(best, value)
            trial.report(best, round_number)
        return best > -math.inf and bool(trial.should_prune())

    return give_up


def named(identity: str, seed: int, words: Sequence[str]) -> str:
    """Return a study's name, from what its trials have in common and the words of its search space."""
    text = "\n".join([identity, str(seed), *sorted(words)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _within(space: Any, value: Any) -> Any:
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
