"""Register the Hydra launcher `lockstep`, which fedpfl/engine/backends/lockstep.py carries out."""

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
    """Hold the keys of hydra.launcher.

    Attributes:
        jobs: How many run at once; their states share the memory.
    """

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
                "hydra.job.chdir must be false with hydra/launcher=lockstep, whose jobs share a"
                " process"
            )
        self._context = hydra_context
        self._task = task_function
        self._config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run jobs, given the overrides of each."""
        # Imports torch, which other Hydra programs need not wait for.
        from fedpfl.engine.backends import lockstep

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        config_before = HydraConfig.instance().cfg
        jobs = [
            self._make_job(list(overrides), initial_job_idx + index)
            for index, overrides in enumerate(job_overrides)
        ]
        try:
            returns = lockstep.LockstepStage(self._jobs).play(jobs)
        finally:
            HydraConfig.instance().cfg = config_before  # jobs end in any order
        for job_return in returns:
            # A job's own failure is a JobReturn; anything else ends the sweep.
            if isinstance(job_return, BaseException):
                raise job_return
        return returns

    def _make_job(self, overrides: list[str], job_number: int) -> Callable[[], JobReturn]:
        """Return a function that runs one job as Hydra does."""

        def run_hydra_job() -> JobReturn:
            config = self._context.config_loader.load_sweep_config(self._config, overrides)
            with open_dict(config):
                config.hydra.job.id = job_number
                config.hydra.job.num = job_number
            return run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )

        return run_hydra_job
