"""The Hydra sweeper `fedpfl`: Hydra's own, which tells at the end which jobs failed, why, and where their logs are."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus

from fedpfl import tidy
from fedpfl.errors import printable


@dataclass
class Options(BasicSweeperConf):
    """Keys of hydra.sweeper."""

    _target_: str = "hydra_plugins.fedpfl_sweeper.Sweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="fedpfl", node=Options, provider="fedpfl")


class Sweeper(BasicSweeper):
    """Every combination of the values swept over.

    Unlike Hydra's own it composes all jobs before the first one runs, goes on after a batch in which one failed, and
    writes no file of its own.
    """

    def sweep(self, arguments: list[str]) -> Any:
        """Called by Hydra with the overrides of the command line. Raises what the first failed job raised."""
        from fedpfl.engine import ranks  # imports torch, which other Hydra programs need not wait for

        if ranks.launched():
            raise ValueError("torchrun starts one run, and no sweep; leave out -m, or add hydra.mode=RUN")
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(f"hydra.sweeper.max_batch_size must be 1 or more, or null, got {self.max_batch_size}")
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        batches = self.split_arguments(overrides, self.max_batch_size)
        for batch in batches:
            self.validate_batch_is_legal(batch)
        returns: list[JobReturn] = []
        try:
            for batch in batches:
                returns += self.launcher.launch(batch, initial_job_idx=len(returns))
        finally:
            tidy.prune()
            tell(returns)
        for job in returns:
            if job.status == JobStatus.FAILED:
                raise job._return_value
        return [returns]


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
        print(printable(f"  {' '.join(job.overrides or ())}: {reason} ({_log(job)})"), file=sys.stderr)


def _log(job: JobReturn) -> str:
    folder = job.hydra_cfg and job.hydra_cfg.hydra.runtime.get("output_dir")
    log = Path(folder) / "run.log" if folder else None
    if log is None or not log.is_file():
        return "nothing was written"
    return str(log.relative_to(Path.cwd())) if log.is_relative_to(Path.cwd()) else str(log)
