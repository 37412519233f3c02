"""The Hydra sweeper `fedpfl`: Hydra's own, which tells at the end which jobs failed, why, and where their logs are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class Options(BasicSweeperConf):
    """Keys of hydra.sweeper."""

    _target_: str = "hydra_plugins.fedpfl_sweeper.Sweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="fedpfl", node=Options, provider="fedpfl")


class Sweeper(BasicSweeper):
    """Every combination of the values swept over."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `sweep`."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        assert self.launcher is not None
        self.launcher = Noting(self.launcher)

    def sweep(self, arguments: list[str]) -> Any:
        """Called by Hydra with the overrides of the command line."""
        try:
            return super().sweep(arguments)
        finally:
            assert isinstance(self.launcher, Noting)
            tell(self.launcher.returns)


class Noting(Launcher):
    """Another launcher, whose jobs' returns are kept: the sweeper itself looks at none after the first failure."""

    def __init__(self, launcher: Launcher):
        self._launcher = launcher
        self.returns: list[JobReturn] = []

    def setup(self, **context: Any) -> None:
        """Nothing: the other one is set up."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Called by the sweeper with the overrides of every job."""
        returns = self._launcher.launch(job_overrides, initial_job_idx)
        self.returns += returns
        return returns


def tell(returns: Sequence[JobReturn]) -> None:
    """Print the jobs that failed; nothing if none did."""
    failed = [job for job in returns if job.status == JobStatus.FAILED]
    if not failed:
        return
    whole = f"{len(failed)} of {len(returns)} jobs failed"
    print(f"fedpfl: {whole}; the same command skips what is finished and tries these again", file=sys.stderr)
    for job in failed:
        error = job._return_value
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"  {' '.join(job.overrides or ())}: {reason} ({_log(job)})", file=sys.stderr)


def _log(job: JobReturn) -> str:
    folder = job.hydra_cfg and job.hydra_cfg.hydra.runtime.get("output_dir")
    log = Path(folder) / "run.log" if folder else None
    if log is None or not log.is_file():
        return "nothing was written"
    return str(log.relative_to(Path.cwd())) if log.is_relative_to(Path.cwd()) else str(log)
