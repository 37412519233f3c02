"""The Hydra launcher `lockstep`, where Hydra finds launchers; what it does is
fedpfl/engine/backends/lockstep.py's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict


@dataclass
class Options:
    """Keys of hydra.launcher. jobs: how many at once, for their states share the memory."""

    _target_: str = "hydra_plugins.fedpfl_lockstep.LockstepLauncher"
    jobs: int = 32


ConfigStore.instance().store(
    group="hydra/launcher", name="lockstep", node=Options, provider="fedpfl"
)


class LockstepLauncher(Launcher):
    """Run the jobs of a sweep in one process, in lockstep."""

    def __init__(self, jobs: int):
        self._jobs = jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Set up, as Hydra does before `launch`. Raises ValueError for what cannot work."""
        if self._jobs < 1:
            raise ValueError(f"hydra.launcher.jobs must be 1 or more, got {self._jobs}")
        if config.hydra.job.chdir:
            raise ValueError(
                "hydra.job.chdir must be false with hydra/launcher=lockstep, whose jobs share a process"
            )
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, given the overrides of each."""
        # Imports torch, which other Hydra programs need not wait for.
        from fedpfl.engine.backends import lockstep

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        before = HydraConfig.instance().cfg
        jobs = [
            self._job(list(overrides), initial_job_idx + i)
            for i, overrides in enumerate(job_overrides)
        ]
        try:
            returns = lockstep.Stage(self._jobs).play(jobs)
        finally:
            HydraConfig.instance().cfg = before  # the jobs have ended in any order
        for outcome in returns:
            if isinstance(
                outcome, BaseException
            ):  # not the job's own failure, which is a JobReturn
                raise outcome
        return returns

    def _job(self, overrides: list[str], number: int) -> Callable[[], JobReturn]:
        def run() -> JobReturn:
            config = self._context.config_loader.load_sweep_config(self._config, overrides)
            with open_dict(config):
                config.hydra.job.id = config.hydra.job.num = number
            return run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )

        return run
