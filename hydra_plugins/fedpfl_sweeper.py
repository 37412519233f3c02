"""The Hydra sweeper `fedpfl`: Hydra's own, which tells what each job came to, and in the end all
results.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from fedpfl.config import tidy
from fedpfl.config.overrides import requote_word
from fedpfl.ground import interrupts
from fedpfl.ground.errors import FedpflError, error_text, escape_controls
from fedpfl.ground.terminal import print_notice

PATIENCE = 20.0
"""Seconds that jobs in processes of their own are given to save their runs, where the sweep ends
before them.
"""


@dataclass
class Options(BasicSweeperConf):
    """Keys of hydra.sweeper. table: whether the results are printed in the end."""

    _target_: str = "hydra_plugins.fedpfl_sweeper.Sweeper"
    table: bool = True


ConfigStore.instance().store(group="hydra/sweeper", name="fedpfl", node=Options, provider="fedpfl")


class Sweeper(BasicSweeper):
    """Run all combinations of the values swept over.

    Unlike Hydra's own it composes all jobs before the first one runs, goes on after a batch in
    which one failed, and writes no file.
    """

    def __init__(self, max_batch_size: int | None = None, params: Any = None, table: bool = True):
        super().__init__(max_batch_size, params)
        self._table = table

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Set up, as Hydra does before `sweep`. Raises ValueError for what cannot work."""
        # This imports torch, which other Hydra programs need not wait for.
        from fedpfl.engine.backends import ranks

        if ranks.launched():
            raise ValueError(
                "torchrun starts one run, and no sweep; leave out -m, or add hydra.mode=RUN"
            )
        self._counted = Counted(task_function)
        super().setup(hydra_context=hydra_context, task_function=self._counted, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs of the command line's overrides. Raises what the first failed job raised."""
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(
                f"hydra.sweeper.max_batch_size must be 1 or more, or null, got {self.max_batch_size}"
            )
        assert self.hydra_context is not None
        assert self.launcher is not None
        from fedpfl.config.plan import prepare_sweep  # imports torch, as above

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        split = self.split_arguments(overrides, self.max_batch_size)
        batches = [[[*map(requote_word, job)] for job in batch] for batch in split]
        jobs = [list(words) for batch in batches for words in batch]
        composed = [self._check(words) for words in jobs]
        if not self._is_remote():
            try:
                prepare_sweep(composed)
            except FedpflError as error:
                print_notice(error)
                raise
        alike = set(jobs[0]).intersection(*jobs) if len(jobs) > 1 else set(plain(overrides))
        returns: list[JobReturn] = []
        try:
            with self._counted.playing(alike, len(jobs)):
                for batch in batches:
                    returns += self.launcher.launch(batch, initial_job_idx=len(returns))
        finally:
            tidy.remove_empty_directories()
            if self._table:
                show(returns)
            tell_failures(returns)
        for job in returns:
            if job.status == JobStatus.FAILED:
                raise job._return_value
        return [returns]

    def _is_remote(self) -> bool:
        """Return whether jobs may run on other machines, which have data of their own."""
        assert self.config is not None
        return any(name in self.config.hydra.launcher._target_ for name in ("submitit", "ray"))

    def _check(self, words: Sequence[str]) -> DictConfig:
        """Compose a job. Raises what Hydra does, and HydraException for one that is a sweep itself."""
        assert self.hydra_context is not None
        job = self.hydra_context.config_loader.load_sweep_config(self.config, list(words))
        if (job.hydra.sweeper.params or {}) != self.params:
            raise HydraException(
                f"{' '.join(words)}: an experiment with a sweep of its own; run one at a time"
            )
        return job


class Counted:
    """Do the task of a sweep under its label, and say when it ends what it came to and how long the
    rest may take.

    Jobs may run in several processes of this machine, so they share a folder: there `events` has
    when they began and ended, and each process with a job a file. On another machine nothing is
    said, nor where nobody counts jobs before.
    """

    def __init__(self, task: TaskFunction):
        self._task = task
        self._alike: Collection[str] = ()
        self._folder: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Travel to a process that has been begun by now, and all that the launcher needs."""
        interrupts.reinstall_handlers()
        return vars(self)

    @contextmanager
    def playing(self, alike: Collection[str], jobs: int = 0) -> Iterator[None]:
        """Label jobs by their other words than those `alike`, count them, and have them end with
        this process.
        """
        told = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with told as folder, interrupts.before_interrupt(partial(end_jobs, Path(folder))):
            self._alike, self._folder, self._jobs, self._here = (
                alike,
                Path(folder),
                jobs,
                os.getpid(),
            )
            yield

    def __call__(self, cfg: DictConfig) -> Any:
        """Do the task in Hydra's call."""
        from fedpfl.record import console

        own = " ".join(
            word.lstrip("+") for word in HydraConfig.get().overrides.task if word not in self._alike
        )
        before = console.label.set(own)
        try:
            if self._folder is None or not self._folder.exists():
                with interrupts.interrupt_on_signals():
                    return self._task(cfg)
            if os.getpid() == self._here:
                return self._told(cfg, self._folder / "events")
            with interrupts.interrupt_on_signals(), _at_work(self._folder):
                return self._told(cfg, self._folder / "events")
        finally:
            console.label.reset(before)

    def _told(self, cfg: DictConfig, events: Path) -> Any:
        """Do the task, and tell how it ended."""
        from fedpfl.record import console

        if not self._jobs:
            return self._task(cfg)
        hydra, began = HydraConfig.get(), time.time()
        _add(events, f"{hydra.job.num} {began}")
        path = Path(hydra.runtime.output_dir)
        if cfg.get("restart") or not _is_finished(path):
            far = console.begins(events.read_text(), self._jobs, began, hydra.job.num + 1)
            _say(far, console.label.get())
        try:
            result = self._task(cfg)
        except Exception as error:  # an interrupted job has not ended
            self._ended(events, hydra.job.num, began, path, f"failed: {error_text(error)}", "")
            raise
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        self._ended(
            events, hydra.job.num, began, path, console.result(summary), ", already finished"
        )
        return result

    def _ended(self, events: Path, job: int, began: float, path: Path, how: str, idle: str) -> None:
        """Tell of a job. idle: said instead of its time if it had nothing to do."""
        rows = path / "rounds.csv"
        played = (
            rows.is_file() and rows.stat().st_mtime >= began
        )  # else it was finished before, or failed at once
        took = time.time() - began
        from fedpfl.record.console import duration, label, progress

        try:
            _add(events, f"{job} {began} {took if played else 0}")
            far = progress(events.read_text(), self._jobs, began + took)
        except (
            FileNotFoundError
        ):  # who began the sweep has ended, which a cluster's jobs do not mind
            return
        told = ": ".join(filter(None, (label.get(), how))) + (
            f" in {duration(took)}" if played else idle
        )
        _say(far, told)


def _say(far: str, told: str) -> None:
    """Print how far a sweep is, and of which run there is something to tell."""
    print(
        escape_controls("  ".join(filter(None, (f"sweep: {far}", told)))),
        file=sys.stderr,
        flush=True,
    )


def _is_finished(path: Path) -> bool:
    """Tell whether a run directory says that its run has ended well, so that there is nothing to
    do.
    """
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("status") == "finished"


@contextmanager
def _at_work(folder: Path) -> Iterator[None]:
    """Have this process known as one with a job; none begins in a sweep that ends."""
    here = folder / f"{socket.gethostname()}:{os.getpid()}"
    here.touch()
    try:
        if (folder / "over").exists():
            raise KeyboardInterrupt
        yield
    finally:
        here.unlink(missing_ok=True)


def end_jobs(folder: Path) -> None:
    """Have the jobs in other processes of this machine end, and wait until their runs are saved;
    not for ever.
    """
    (folder / "over").touch()
    for place in folder.glob(f"{socket.gethostname()}:*"):
        with suppress(ProcessLookupError):
            os.kill(int(place.name.rpartition(":")[2]), signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and any(folder.glob(f"{socket.gethostname()}:*")):
        time.sleep(0.05)


def _add(events: Path, event: str) -> None:
    with events.open("a") as file:
        file.write(f"{event}\n")


def plain(overrides: Sequence[Override]) -> list[str]:
    """Return the words that all jobs of a sweep have, as they have them."""
    alike = [word for word in overrides if not word.is_sweep_override()]
    return [f"{word.get_key_element()}={word.get_value_element_as_str()}" for word in alike]


def show(returns: Sequence[JobReturn]) -> None:
    """Print the table of what ran, as `python -m fedpfl.report tables` does; nothing if nothing
    ran.
    """
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
    print_notice(
        f"{len(failed)} of {len(returns)} jobs failed; the same command skips what is finished and tries these again"
    )
    for job in failed:
        why = error_text(job._return_value)  # type: ignore[arg-type]
        folder = _folder(job)
        log = (
            folder / "run.log"
            if folder and (folder / "run.log").is_file()
            else "nothing was written"
        )
        print(escape_controls(f"  {' '.join(job.overrides or ())}: {why} ({log})"), file=sys.stderr)


def _folder(job: JobReturn) -> Path | None:
    """Return the run directory, from here where it lies below."""
    place = job.hydra_cfg and job.hydra_cfg.hydra.runtime.get("output_dir")
    if not place:
        return None
    folder = Path(place)
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
