"""Register the Hydra launcher `lockstep`, which fedpfl/engine/backends/lockstep.py carries out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from fedpfl.ground.terminal import print_notice


@dataclass
class Options:
    """Hold the keys of hydra.launcher.

    Attributes:
        jobs: How many run together at most, as far as memory holds their states.
        on_cpu: Whether jobs run in lockstep on a CPU too; the default of a sweep leaves it out.
    """

    _target_: str = "hydra_plugins.fedpfl_lockstep.LockstepLauncher"
    jobs: int = 32
    on_cpu: bool = True


ConfigStore.instance().store(
    group="hydra/launcher", name="lockstep", node=Options, provider="fedpfl"
)


class LockstepLauncher(Launcher):
    """Run the jobs of a sweep in one process, in lockstep or one after another."""

    def __init__(self, jobs: int, on_cpu: bool):
        self._jobs = jobs
        self._on_cpu = on_cpu

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Set up, as Hydra does before `launch`. Raises ValueError for what cannot work."""
        if self._jobs < 1:
            raise ValueError(f"hydra.launcher.jobs must be 1 or more, got {self._jobs}")
        if config.hydra.job.chdir and self._on_cpu:
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
        compose = self._context.config_loader.load_sweep_config
        configs = [compose(self._config, list(overrides)) for overrides in job_overrides]
        jobs = [*map(self._make_job, configs, count(initial_job_idx))]
        if not self._should_join(configs):
            return [job() for job in jobs]
        returns = lockstep.LockstepStage(self._jobs).play(jobs)
        for job_return in returns:
            # A job's own failure is a JobReturn; anything else ends the sweep.
            if isinstance(job_return, BaseException):
                raise job_return
        return returns

    def _should_join(self, configs: Sequence[DictConfig]) -> bool:
        """Return whether jobs run in lockstep; tell of it where no word asks for it."""
        import torch

        if self._on_cpu:
            return True
        has_cpu = any(str(config.device).startswith("cpu") for config in configs)
        can_join = len(configs) > 1 and not self._config.hydra.job.chdir
        if has_cpu or not can_join or not torch.cuda.is_available():
            return False
        print_notice(
            f"{len(configs)} runs go in lockstep on the GPU, as many together as fit into its"
            " memory; hydra/launcher=basic runs one after another"
        )
        return True

    def _make_job(self, config: DictConfig, number: int) -> Callable[[], JobReturn]:
        """Return a function that runs a job as Hydra's own launcher does."""
        with open_dict(config):
            config.hydra.job.id = number
            config.hydra.job.num = number
        return partial(
            run_job,
            hydra_context=self._context,
            task_function=self._task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
