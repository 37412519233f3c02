"""The Hydra sweeper `optuna`: a search for the best validation accuracy; see
fedpfl/runner/trials.py.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from fedpfl.config import tidy
from fedpfl.config.overrides import requote_word
from fedpfl.ground.errors import pluralize
from fedpfl.ground.terminal import print_notice
from hydra_plugins.fedpfl_sweeper import Sweeper, plain, tell_failures

PROBLEM = ("dataset", "partition", "clients", "unseen", "validation")
"""Keys and groups that say by which samples trials are judged."""
SAME_ORIGIN = (
    "method.",
    "quantile.",
    "local.",
    "augment.",
    "stopping.",
    "rounds=",
    "participation=",
)
"""How words begin whose values change neither data nor code, so that trials share what these are.
"""


@dataclass
class Options(BasicSweeperConf):
    """Keys of hydra.sweeper.

    trials: proposals in all. batch: of them at a time, for launchers that run several. startup: of
    them at random,
    before any is given up. prune: whether a trial is given up whose validation accuracy is below
    the median of those that ended, at the same round. study, folder: of a job, written by the
    sweeper.
    """

    _target_: str = "hydra_plugins.fedpfl_optuna.OptunaSweeper"
    trials: int = 20
    batch: int = 1
    startup: int = 5
    prune: bool = True
    study: str = ""
    folder: str = ""


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=Options, provider="fedpfl")


class OptunaSweeper(Sweeper):
    """Try proposals for the keys swept over; the other keys are the same for all."""

    def __init__(
        self,
        trials: int,
        batch: int,
        startup: int,
        max_batch_size: int | None = None,
        params: Any = None,
        **of_jobs: Any,
    ):
        super().__init__(max_batch_size, params)
        self._trials, self._batch, self._startup = trials, batch, startup
        for name in ("trials", "batch", "startup"):
            if getattr(self, f"_{name}") < 1:
                raise ValueError(
                    f"hydra.sweeper.{name} must be 1 or more, got {getattr(self, f'_{name}')}"
                )

    def sweep(self, arguments: list[str]) -> Any:
        """Search as the command line's overrides say. Raises what the first failed job raised."""
        from fedpfl.ground.errors import FedpflError
        from fedpfl.runner import (
            trials,
        )  # imports torch, which other Hydra programs need not wait for

        returns: list[JobReturn] = []

        def play(jobs: list[tuple[int, list[str]]]) -> list[trials.TrialResult]:
            batch: list[JobReturn] = []
            cuts = [
                0,
                *(i for i, (a, b) in enumerate(pairwise(jobs), 1) if b[0] != a[0] + 1),
                len(jobs),
            ]
            for start, end in pairwise(
                cuts
            ):  # Hydra numbers the jobs of a call one after the other
                words = [[*fixed, *proposed] for _, proposed in jobs[start:end]]
                batch += self.launcher.launch(words, initial_job_idx=jobs[start][0])  # type: ignore[union-attr]
            returns.extend(batch)
            ended = [_ended(job) for job in batch]
            for (_, proposed), end in zip(jobs, ended, strict=True):
                trials.require_origin(Path(end.directory), origin(proposed))
            return ended

        try:
            search, fixed, origin = self._search(arguments)
            search.verify(origin, print_notice)
            with self._counted.playing(fixed):
                best = search.run(play, print_notice)
        except FedpflError as error:
            if not any(
                job.status == JobStatus.FAILED and job._return_value is error for job in returns
            ):
                print_notice(error)  # else it is among the failures below
            raise
        finally:
            tidy.remove_empty_directories()
            tell_failures([job for job in returns if not _diverged(job)])
        trials.search_results.append(best)
        counts = ", ".join(f"{count} {what}" for what, count in best.trials.items())
        print_notice(f"best of {counts}: validation {best.value:.2f} %  {' '.join(best.words)}")
        return [returns]

    def _search(self, arguments: list[str]) -> tuple[Any, list[str], Any]:
        """Return the search that the overrides ask for, those of them that all its jobs have, and
        `origin`.

        `origin(words)` is what the run of a trial's words must come from.
        """
        from fedpfl.config import overrides
        from fedpfl.config.plan import check_config, prepare_sweep
        from fedpfl.runner import trials

        assert self.hydra_context is not None
        assert self.config is not None
        loader = self.hydra_context.config_loader
        words = OverridesParser.create(config_loader=loader).parse_overrides(
            [*self._parse_config(), *arguments]
        )
        given = {
            word.get_key_element(): word for word in words
        }  # what is given again takes the experiment's place
        swept = {key: word for key, word in given.items() if word.is_sweep_override()}
        fixed = plain([*given.values()])
        if not swept:
            raise ValueError(
                "nothing to search for; give keys a choice(...), range(...) or interval(...)"
            )
        groups = {key.lstrip("+").split(".")[0]: key.lstrip("+") for key in swept}
        if "seed" in groups:
            raise ValueError(
                "seed is no hyperparameter; search with one seed, and judge the values by others"
            )
        if wrong := [key for group, key in groups.items() if group in PROBLEM]:
            raise ValueError(
                f"{wrong[0]} is no hyperparameter: it says by which samples to judge; give it one value"
            )
        space = {key: trials.parse_distribution(word) for key, word in swept.items()}
        common = loader.load_sweep_config(self.config, fixed)
        first = {
            key: OmegaConf.select(common, key.lstrip("+"), throw_on_missing=False) for key in space
        }
        lowest = {
            key: kind.choices[0] if hasattr(kind, "choices") else kind.low
            for key, kind in space.items()
        }
        some = [requote_word(f"{key}={value}") for key, value in lowest.items()]
        proposed = loader.load_sweep_config(self.config, [*fixed, *some])
        plan = check_config(proposed)
        settings = plan.settings
        if not settings.validation and plan.config["partition"]["name"] != "file":
            raise ValueError("a search needs held-out samples to judge by; set validation=0.1")
        if not self._is_remote():
            prepare_sweep([proposed])
        folder = Path(str(self.config.hydra.sweep.dir)).resolve()
        origins: dict[tuple[str, ...], Any] = {}

        def origin(proposed: list[str]) -> Any:
            deciding = tuple(
                word for word in proposed if not word.lstrip("+").startswith(SAME_ORIGIN)
            )
            if deciding not in origins:
                config = loader.load_sweep_config(self.config, [*fixed, *proposed])
                origins[deciding] = trials.find_origin(check_config(config))
            return origins[deciding]

        words_of_space = [str(word.input_line) for word in swept.values()]
        name = trials.name_study(plan.identity, settings.seed, words_of_space, origin(some))
        asked = self._trials, self._batch, self._startup, settings.rounds // 3, settings.seed
        here = [
            f"hydra.sweeper.study={name}",
            *overrides.format_words("hydra.sweeper.folder", str(folder)),
        ]
        search = trials.Search(folder, name, space, first, *asked)
        if settings.restart:
            search.forget()
        print_notice(
            f"method={plan.config['method']['name']}: {pluralize(self._trials, 'trial')} of {', '.join(space)}"
        )
        return search, [*fixed, *here], origin


def _diverged(job: JobReturn) -> bool:
    from fedpfl.runner.faults import Diverged

    return job.status == JobStatus.FAILED and isinstance(job._return_value, Diverged)


def _ended(job: JobReturn) -> Any:
    """Return what became of a trial. Raises what the job raised, but for divergence, which tells of
    its values.
    """
    from fedpfl.runner import trials

    assert job.hydra_cfg is not None
    diverged = _diverged(job)
    if job.status == JobStatus.FAILED and not diverged:
        raise job._return_value
    folder = Path(str(job.hydra_cfg.hydra.runtime.output_dir))
    return trials.read_trial_result(
        folder, "diverged" if diverged else "given up" if job.return_value == trials.PRUNED else ""
    )
