"""The Hydra sweeper `fedpfl`: Hydra's own, which tells how far it is, and in the end the results and what failed."""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from fedpfl.config import tidy
from fedpfl.ground.errors import printable, reason
from fedpfl.ground.terminal import tell


@dataclass
class Options(BasicSweeperConf):
    """Keys of hydra.sweeper."""

    _target_: str = "hydra_plugins.fedpfl_sweeper.Sweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="fedpfl", node=Options, provider="fedpfl")


class Sweeper(BasicSweeper):
    """Run all combinations of the values swept over.

    Unlike Hydra's own it composes all jobs before the first one runs, goes on after a batch in which one failed, and
    writes no file.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Set up, as Hydra does before `sweep`. Raises ValueError for what cannot work."""
        from fedpfl.engine import ranks  # imports torch, which other Hydra programs need not wait for

        if ranks.launched():
            raise ValueError("torchrun starts one run, and no sweep; leave out -m, or add hydra.mode=RUN")
        self._counted = Counted(task_function)
        super().setup(hydra_context=hydra_context, task_function=self._counted, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs of the command line's overrides. Raises what the first failed job raised."""
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(f"hydra.sweeper.max_batch_size must be 1 or more, or null, got {self.max_batch_size}")
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        batches = self.split_arguments(overrides, self.max_batch_size)
        for words in (words for batch in batches for words in batch):
            self._check(words)
        returns: list[JobReturn] = []
        try:
            with tempfile.NamedTemporaryFile() as events:
                self._counted.begin(Path(events.name), sum(map(len, batches)))
                for batch in batches:
                    returns += self.launcher.launch(batch, initial_job_idx=len(returns))
        finally:
            tidy.prune()
            show(returns)
            tell_failures(returns)
        for job in returns:
            if job.status == JobStatus.FAILED:
                raise job._return_value
        return [returns]

    def _check(self, words: Sequence[str]) -> None:
        """Compose a job. Raises what Hydra does, and HydraException for one that is a sweep itself."""
        assert self.hydra_context is not None
        job = self.hydra_context.config_loader.load_sweep_config(self.config, list(words))
        if (job.hydra.sweeper.params or {}) != self.params:
            raise HydraException(f"{' '.join(words)}: an experiment with a sweep of its own; run one at a time")


class Counted:
    """Do the task of a sweep, and say whenever a job has ended how many have, and how long the rest may take.

    Jobs may run in several processes of this machine, so they share a file; on another machine nothing is said, nor in
    a sweep whose jobs nobody counts before they run.
    """

    def __init__(self, task: TaskFunction):
        self._task = task
        self._events: Path | None = None

    def begin(self, events: Path, jobs: int) -> None:
        """Count from here on. events: an empty file."""
        self._events, self._jobs = events, jobs

    def __call__(self, cfg: DictConfig) -> Any:
        """Do the task in Hydra's call."""
        if self._events is None or not self._events.exists():
            return self._task(cfg)
        job, path = HydraConfig.get().job.num, HydraConfig.get().runtime.output_dir
        began = time.time()
        _add(self._events, f"{job} {began}")
        try:
            result = self._task(cfg)
        except Exception:  # an interrupted job has not ended
            self._ended(self._events, job, began, Path(path))
            raise
        self._ended(self._events, job, began, Path(path))
        return result

    def _ended(self, events: Path, job: int, began: float, path: Path) -> None:
        rows = path / "rounds.csv"
        played = rows.is_file() and rows.stat().st_mtime >= began  # else it was finished before, or failed at once
        now = time.time()
        _add(events, f"{job} {began} {now - began if played else 0}")
        from fedpfl.record.console import progress

        print(f"sweep: {progress(events.read_text(), self._jobs, now)}", file=sys.stderr, flush=True)


def _add(events: Path, event: str) -> None:
    with events.open("a") as file:
        file.write(f"{event}\n")


def show(returns: Sequence[JobReturn]) -> None:
    """Print the table of what ran, as `python -m fedpfl.report tables` does; nothing if nothing ran."""
    tables = [folder.absolute() / "rounds.csv" for job in returns if (folder := _folder(job))]
    if begun := [str(table.parent) for table in tables if table.is_file() and table.stat().st_size]:
        from fedpfl.report.__main__ import main  # pandas is slow to load

        main(["tables", *begun])
        sys.stdout.flush()


def tell_failures(returns: Sequence[JobReturn]) -> None:
    """Print the jobs that failed; nothing if none did."""
    failed = [job for job in returns if job.status == JobStatus.FAILED]
    if not failed:
        return
    tell(f"{len(failed)} of {len(returns)} jobs failed; the same command skips what is finished and tries these again")
    for job in failed:
        why = reason(job._return_value)  # type: ignore[arg-type]
        folder = _folder(job)
        log = folder / "run.log" if folder and (folder / "run.log").is_file() else "nothing was written"
        print(printable(f"  {' '.join(job.overrides or ())}: {why} ({log})"), file=sys.stderr)


def _folder(job: JobReturn) -> Path | None:
    """Return the run directory, from here where it lies below."""
    place = job.hydra_cfg and job.hydra_cfg.hydra.runtime.get("output_dir")
    if not place:
        return None
    folder = Path(place)
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
