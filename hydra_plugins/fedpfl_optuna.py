"""Register the Hydra sweeper `optuna`, which searches for the best validation accuracy.

The search itself is fedpfl/runner/search.py's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from fedpfl.ground.errors import pluralize
from fedpfl.ground.files import remove_empty_folders
from fedpfl.ground.terminal import print_notice
from hydra_plugins.fedpfl_sweeper import Sweeper, print_failures, words_without_sweep

# Hydra loads this file under no name in sys.modules, so dataclasses here need evaluated annotations;
# others are quoted, as their modules import torch.
if TYPE_CHECKING:
    from fedpfl.config.plan import Plan
    from fedpfl.runner import trials
    from fedpfl.runner.search import Search

PROBLEM_GROUPS = (
    *("dataset", "partition", "shift"),
    *("clients", "unseen", "unseen_groups", "validation"),
)
"""Keys and groups that say by which samples trials are judged."""
SAME_ORIGIN_PREFIXES = (
    "method.",
    "quantile.",
    "local.",
    "augment.",
    "stopping.",
    "rounds=",
    "participation=",
)
"""Beginnings of words that change neither data nor code: trials that differ in them share these."""


@dataclass
class Options(BasicSweeperConf):
    """Hold the keys of hydra.sweeper.

    Attributes:
        trials: Proposals in all.
        batch: Proposals at a time, for launchers that run several.
        startup: Proposals at random, before any is given up.
        metric: The validation column that judges trials; empty for the score of the task.
        prune: Whether a trial is given up whose score is below the median of those
            that ended, at the same round.
        study: Of a job, written by the sweeper.
        folder: Of a job, written by the sweeper.
    """

    _target_: str = "hydra_plugins.fedpfl_optuna.OptunaSweeper"
    trials: int = 20
    batch: int = 1
    startup: int = 5
    metric: str = ""
    prune: bool = True
    study: str = ""
    folder: str = ""


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=Options, provider="fedpfl")


class SearchPlan(NamedTuple):
    """Hold a search that is ready to run.

    Attributes:
        search: The study.
        shared_words: The overrides that all its jobs have.
        find_origin: Returns what the run of a trial's words must come from.
    """

    search: "Search"
    shared_words: list[str]
    find_origin: "Callable[[list[str]], trials.TrialOrigin]"


class OptunaSweeper(Sweeper):
    """Try proposals for the keys swept over; the other keys are the same for all."""

    def __init__(
        self,
        trials: int,
        batch: int,
        startup: int,
        metric: str = "",
        max_batch_size: int | None = None,
        params: Any = None,
        **keys_of_jobs: Any,
    ):
        super().__init__(max_batch_size, params)
        for name, value in {"trials": trials, "batch": batch, "startup": startup}.items():
            if value < 1:
                raise ValueError(f"hydra.sweeper.{name} must be 1 or more, got {value}")
        self._trials = trials
        self._batch = batch
        self._startup = startup
        self._metric = metric

    def sweep(self, arguments: list[str]) -> Any:
        """Search as the command line's overrides say. Raises what the first failed job raised."""
        # Imports torch, which other Hydra programs need not wait for.
        from fedpfl.ground.errors import FedpflError
        from fedpfl.runner.search import search_results

        returns: list[JobReturn] = []
        try:
            search_plan = self._plan_search(arguments)

            def run_jobs(jobs: list[tuple[int, list[str]]]) -> "list[trials.TrialResult]":
                return self._run_batch(search_plan, jobs, returns)

            with self._counted_task.counting(search_plan.shared_words):
                best = search_plan.search.run(run_jobs, print_notice)
        except FedpflError as error:
            is_job_failure = any(
                job.status == JobStatus.FAILED and job._return_value is error for job in returns
            )
            if not is_job_failure:  # else it is among the failures below
                print_notice(error)
            raise
        finally:
            remove_empty_folders(Path(self.config.hydra.sweep.dir))
            print_failures([job for job in returns if not _is_diverged(job)])
        search_results.append(best)
        value_text = search_plan.search.settings.describe_value(best.value)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in best.trials.items())
        print_notice(f"best of {counts}: {value_text}  {' '.join(best.overrides)}")
        return [returns]

    def _run_batch(
        self,
        search_plan: SearchPlan,
        jobs: list[tuple[int, list[str]]],
        returns: list[JobReturn],
    ) -> "list[trials.TrialResult]":
        """Run a batch of proposals.

        Args:
            search_plan: The search.
            jobs: Job numbers, each with the proposed words.
            returns: The returns of all batches, to which this one's are added.
        """
        from fedpfl.runner import trials

        batch_returns: list[JobReturn] = []
        for consecutive_jobs in _consecutive(jobs):
            words = [[*search_plan.shared_words, *proposal] for _, proposal in consecutive_jobs]
            first_number, _ = consecutive_jobs[0]
            batch_returns += self.launcher.launch(words, initial_job_idx=first_number)  # type: ignore[union-attr]
        returns.extend(batch_returns)
        metric = search_plan.search.settings.metric
        results = [_read_result(job, metric) for job in batch_returns]
        for (_, proposal), job in zip(jobs, batch_returns, strict=True):
            trials.require_origin(_find_folder(job), search_plan.find_origin(proposal))
        return results

    def _plan_search(self, arguments: list[str]) -> SearchPlan:
        """Return the search that the overrides ask for.

        Raises:
            ValueError: for a space or a configuration that cannot be searched.
        """
        from fedpfl.config import overrides
        from fedpfl.config.sweep import prepare_sweep
        from fedpfl.record.columns import validation_column
        from fedpfl.runner import trials
        from fedpfl.runner.optuna_study import name_example, parse_distribution
        from fedpfl.runner.search import Search, SearchSettings

        # ---- The space, and the words that all jobs have
        assert self.hydra_context is not None
        assert self.config is not None
        loader = self.hydra_context.config_loader
        swept_words, shared_words = self._split_words(arguments)
        space = {key: parse_distribution(word) for key, word in swept_words.items()}

        # ---- Check a proposal before the first job
        config = loader.load_sweep_config(self.config, shared_words)
        configured_values = {
            key: OmegaConf.select(config, key.lstrip("+"), throw_on_missing=False) for key in space
        }
        example_words = [name_example(*item) for item in space.items()]
        example_config = loader.load_sweep_config(self.config, [*shared_words, *example_words])
        plan = self._check_plan(example_config)
        if not self._is_remote():
            prepare_sweep([example_config])

        # ---- The search: the same command finds it again by its name
        find_origin = self._make_find_origin(shared_words)
        space_words = [str(word.input_line) for word in swept_words.values()]
        metric = trials.choose_metric(plan, self._metric)
        if metric != validation_column(plan.task):
            space_words.append(f"hydra.sweeper.metric={metric}")
        settings = plan.settings
        name = trials.name_study(
            plan.identity, settings.seed, space_words, find_origin(example_words)
        )
        folder = Path(str(self.config.hydra.sweep.dir)).resolve()
        search = Search(
            path=folder / f"{name}.json",
            space=space,
            configured_values=configured_values,
            settings=SearchSettings(
                trials=self._trials,
                batch=self._batch,
                startup=self._startup,
                warmup=settings.rounds // 3,
                seed=settings.seed,
                task=plan.task,
                metric=metric,
            ),
        )
        if settings.restart:
            search.trials.clear()
        print_notice(
            f"method={plan.config['method']['name']}: {pluralize(self._trials, 'trial')} of "
            f"{', '.join(space)}"
        )
        study_words = [
            f"hydra.sweeper.study={name}",
            *overrides.format_words("hydra.sweeper.folder", str(folder)),
        ]
        return SearchPlan(search, [*shared_words, *study_words], find_origin)

    def _split_words(self, arguments: list[str]) -> tuple[dict[str, Override], list[str]]:
        """Return the words that are swept over by key, and those that all jobs have."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        words = parser.parse_overrides([*self._parse_config(), *arguments])
        # The command line's words replace those of the experiment.
        word_by_key = {word.get_key_element(): word for word in words}
        swept_words = {key: word for key, word in word_by_key.items() if word.is_sweep_override()}
        _require_searchable(swept_words)
        return swept_words, words_without_sweep([*word_by_key.values()])

    def _check_plan(self, config: DictConfig) -> "Plan":
        """Return the plan of a proposal. Raises ValueError where trials cannot be judged."""
        from fedpfl.config.plan import check_config

        plan = check_config(config)
        if not plan.settings.validation and plan.config["partition"]["name"] != "file":
            raise ValueError("a search needs held-out samples to judge by; set validation=0.1")
        return plan

    def _make_find_origin(
        self, shared_words: list[str]
    ) -> "Callable[[list[str]], trials.TrialOrigin]":
        """Return a function that finds what the run of a trial's words must come from."""
        from fedpfl.config.plan import check_config
        from fedpfl.runner import trials

        assert self.hydra_context is not None
        loader = self.hydra_context.config_loader
        origins: dict[tuple[str, ...], trials.TrialOrigin] = {}

        def find_origin(proposal: list[str]) -> trials.TrialOrigin:
            deciding_words = tuple(
                word for word in proposal if not word.lstrip("+").startswith(SAME_ORIGIN_PREFIXES)
            )
            if deciding_words not in origins:
                config = loader.load_sweep_config(self.config, [*shared_words, *proposal])
                origins[deciding_words] = trials.find_origin(check_config(config))
            return origins[deciding_words]

        return find_origin


def _consecutive(
    jobs: list[tuple[int, list[str]]],
) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield jobs in parts with consecutive numbers, as Hydra numbers the jobs of a call."""
    gaps = [
        index
        for index, ((number, _), (next_number, _)) in enumerate(pairwise(jobs), 1)
        if next_number != number + 1
    ]
    for start, end in pairwise([0, *gaps, len(jobs)]):
        yield jobs[start:end]


def _require_searchable(swept_words: Mapping[str, Override]) -> None:
    """Raise ValueError for a space that is empty or has keys which are no hyperparameters."""
    if not swept_words:
        raise ValueError(
            "nothing to search for; give keys a choice(...), range(...) or interval(...)"
        )
    keys = [key.lstrip("+") for key in swept_words]
    groups = {key.split(".")[0]: key for key in keys}
    if "seed" in groups:
        raise ValueError(
            "seed is no hyperparameter; search with one seed, and judge the values by others"
        )
    for group, key in groups.items():
        if group in PROBLEM_GROUPS:
            raise ValueError(
                f"{key} is no hyperparameter: it says by which samples to judge; give it one value"
            )


def _is_diverged(job: JobReturn) -> bool:
    """Return whether a job failed because its training diverged."""
    from fedpfl.runner.faults import Diverged

    return job.status == JobStatus.FAILED and isinstance(job._return_value, Diverged)


def _read_result(job: JobReturn, metric: str) -> "trials.TrialResult":
    """Return what became of a trial.

    Raises what the job raised, but for divergence, which is a result: its values are bad.
    """
    from fedpfl.runner import trials

    is_diverged = _is_diverged(job)
    if job.status == JobStatus.FAILED and not is_diverged:
        raise job._return_value
    outcome = ""
    if is_diverged:
        outcome = "diverged"
    elif job.return_value == trials.PRUNED:
        outcome = "given up"
    return trials.read_trial_result(_find_folder(job), metric, outcome)


def _find_folder(job: JobReturn) -> Path:
    """Return a job's run directory."""
    assert job.hydra_cfg is not None
    return Path(str(job.hydra_cfg.hydra.runtime.output_dir))
