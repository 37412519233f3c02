"""Register the Hydra sweeper `fedpfl`: Hydra's own, which reports progress and all results."""

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

from fedpfl.config.composition import CachingLoader
from fedpfl.config.overrides import requote_word
from fedpfl.ground import interrupts
from fedpfl.ground.errors import FedpflError, error_text, escape_controls
from fedpfl.ground.files import remove_empty_folders
from fedpfl.ground.terminal import print_notice
from hydra_plugins import fedpfl_lockstep

SAVING_TIMEOUT = 20.0
"""Seconds in which jobs in other processes save their runs, where the sweep ends before them."""
POLL_SECONDS = 0.05
EVENTS_FILE = "events"
END_FILE = "over"


@dataclass
class Options(BasicSweeperConf):
    """Hold the keys of hydra.sweeper.

    Attributes:
        table: Whether the results are printed in the end.
    """

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

        if ranks.is_launched_by_torchrun():
            raise ValueError(
                "torchrun starts one run, and no sweep; leave out -m, or add hydra.mode=RUN"
            )
        self._counted_task = CountedTask(task_function)
        self._loader = CachingLoader(hydra_context.config_loader)
        hydra_context.config_loader = self._loader
        # An experiment's launcher stands, as does one that the command line names.
        is_default = config.hydra.runtime.choices["hydra/launcher"] == "basic"
        if is_default and "hydra/launcher=basic" not in config.hydra.overrides.hydra:
            config.hydra.launcher = fedpfl_lockstep.Options(on_cpu=False)
        super().setup(hydra_context=hydra_context, task_function=self._counted_task, config=config)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the jobs of the command line's overrides. Raises what the first failed job raised."""
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(
                "hydra.sweeper.max_batch_size must be 1 or more, or null, "
                f"got {self.max_batch_size}"
            )
        assert self.hydra_context is not None
        assert self.launcher is not None
        from fedpfl.config.sweep import prepare_sweep  # imports torch, as above

        # ---- Compose every job: a mistake in the last is found before the first runs
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        batches = [
            [[*map(requote_word, job)] for job in batch]
            for batch in self.split_arguments(overrides, self.max_batch_size)
        ]
        jobs = [list(words) for batch in batches for words in batch]
        configs = [self._compose_job(words) for words in jobs]
        if not self._is_remote():
            try:
                prepare_sweep(configs)
            except FedpflError as error:
                print_notice(error)
                raise

        # ---- Run them; what there is, is reported even after Ctrl-C
        if len(jobs) > 1:
            shared_words = set(jobs[0]).intersection(*jobs)
        else:
            shared_words = set(words_without_sweep(overrides))
        returns: list[JobReturn] = []
        try:
            with self._counted_task.counting(shared_words, len(jobs)):
                for batch in batches:
                    returns += self.launcher.launch(batch, initial_job_idx=len(returns))
        finally:
            remove_empty_folders(Path(self.config.hydra.sweep.dir))
            if self._table:
                print_results(returns)
            print_failures(returns)
        for job in returns:
            if job.status == JobStatus.FAILED:
                raise job._return_value
        return [returns]

    def _is_remote(self) -> bool:
        """Return whether jobs may run on other machines, which have data of their own."""
        assert self.config is not None
        return any(name in self.config.hydra.launcher._target_ for name in ("submitit", "ray"))

    def _compose_job(self, words: Sequence[str]) -> DictConfig:
        """Return the configuration of a job.

        Raises:
            HydraException: for a job that is a sweep itself, and what Hydra raises.
        """
        config = self._loader.load_sweep_config(self.config, list(words))
        if (config.hydra.sweeper.params or {}) != self.params:
            raise HydraException(
                f"{' '.join(words)}: an experiment with a sweep of its own; run one at a time"
            )
        self._loader.checked_jobs[tuple(words)] = config
        return config


class CountedTask:
    """Run the task of a sweep under its label, and report progress.

    Jobs may run in several processes of this machine, so they share a folder: there `events` has
    when they began and ended, and each process with a job a file. On another machine nothing is
    reported, nor where nobody counts jobs before.
    """

    def __init__(self, task: TaskFunction):
        self._task = task
        self._shared_words: Collection[str] = ()
        self._folder: Path | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a launcher's other process needs; that process has begun by now."""
        interrupts.reinstall_handlers()
        return vars(self)

    @contextmanager
    def counting(self, shared_words: Collection[str], job_count: int = 0) -> Iterator[None]:
        """Label and count jobs, and end them with this process.

        Args:
            shared_words: The words that all jobs have; the others are a job's label.
            job_count: How many there are; 0 to report nothing.
        """
        temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with temporary as name, interrupts.before_interrupt(partial(end_jobs, Path(name))):
            self._shared_words = shared_words
            self._folder = Path(name)
            self._job_count = job_count
            self._main_process = os.getpid()
            yield

    def __call__(self, cfg: DictConfig) -> Any:
        """Run the task where Hydra calls it."""
        from fedpfl.record import console

        job_words = HydraConfig.get().overrides.task
        label = " ".join(word.lstrip("+") for word in job_words if word not in self._shared_words)
        token = console.run_label.set(label)
        try:
            # Another machine does not have the folder.
            if self._folder is None or not self._folder.exists():
                with interrupts.interrupt_on_signals():
                    return self._task(cfg)
            if os.getpid() == self._main_process:
                return self._run_reported(cfg, self._folder / EVENTS_FILE)
            with interrupts.interrupt_on_signals(), _registered_process(self._folder):
                return self._run_reported(cfg, self._folder / EVENTS_FILE)
        finally:
            console.run_label.reset(token)

    def _run_reported(self, cfg: DictConfig, events: Path) -> Any:
        """Run the task, and print how far the sweep is at its beginning and end."""
        from fedpfl.record import console, eta

        if not self._job_count:
            return self._task(cfg)
        hydra = HydraConfig.get()
        start_time = time.time()
        _append_line(events, f"{hydra.job.num} {start_time}")
        run_directory = Path(hydra.runtime.output_dir)
        if cfg.get("restart") or not _is_finished(run_directory):
            position = eta.describe_sweep(
                events.read_text(), self._job_count, start_time, hydra.job.num + 1
            )
            _print_progress(position, console.run_label.get())
        report_end = partial(self._report_end, events, hydra.job.num, start_time, run_directory)
        try:
            result = self._task(cfg)
        except Exception as error:  # an interrupted job has not ended
            report_end(outcome=f"failed: {error_text(error)}", idle_text="")
            raise
        summary = json.loads((run_directory / "summary.json").read_text(encoding="utf-8"))
        report_end(outcome=console.describe_result(summary), idle_text=", already finished")
        return result

    def _report_end(
        self,
        events: Path,
        job_number: int,
        start_time: float,
        run_directory: Path,
        outcome: str,
        idle_text: str,
    ) -> None:
        """Print how a job has ended.

        Args:
            events: The file of the sweep's events.
            job_number: Hydra's.
            start_time: Of the job.
            run_directory: Of the job.
            outcome: What the job came to.
            idle_text: Stands instead of the duration where the job had nothing to do.
        """
        from fedpfl.record.console import run_label
        from fedpfl.record.eta import describe_sweep, format_duration

        # A run that was finished before, or failed at once, has no new row.
        rounds_file = run_directory / "rounds.csv"
        has_played = rounds_file.is_file() and rounds_file.stat().st_mtime >= start_time
        seconds = time.time() - start_time
        try:
            _append_line(events, f"{job_number} {start_time} {seconds if has_played else 0}")
            position = describe_sweep(events.read_text(), self._job_count, start_time + seconds)
        except FileNotFoundError:
            # The process that began the sweep has ended; a cluster's jobs go on without it.
            return
        text = ": ".join(filter(None, (run_label.get(), outcome)))
        text += f" in {format_duration(seconds)}" if has_played else idle_text
        _print_progress(position, text)


def _print_progress(position: str, text: str) -> None:
    """Print how far a sweep is, and what there is to say of a run."""
    line = "  ".join(filter(None, (f"sweep: {position}", text)))
    print(escape_controls(line), file=sys.stderr, flush=True)


def _is_finished(run_directory: Path) -> bool:
    """Return whether a run has ended well, so that there is nothing to do."""
    try:
        summary = json.loads((run_directory / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("status") == "finished"


@contextmanager
def _registered_process(folder: Path) -> Iterator[None]:
    """Register this process as one with a job, unless the sweep ends."""
    process_file = folder / f"{socket.gethostname()}:{os.getpid()}"
    process_file.touch()
    try:
        if (folder / END_FILE).exists():
            raise KeyboardInterrupt
        yield
    finally:
        process_file.unlink(missing_ok=True)


def end_jobs(folder: Path) -> None:
    """End the jobs in other processes, and wait until their runs are saved."""
    (folder / END_FILE).touch()
    process_pattern = f"{socket.gethostname()}:*"
    for process_file in folder.glob(process_pattern):
        with suppress(ProcessLookupError):
            os.kill(int(process_file.name.rpartition(":")[2]), signal.SIGTERM)
    deadline = time.monotonic() + SAVING_TIMEOUT
    while time.monotonic() < deadline and any(folder.glob(process_pattern)):
        time.sleep(POLL_SECONDS)


def _append_line(events: Path, event: str) -> None:
    with events.open("a") as file:
        file.write(f"{event}\n")


def words_without_sweep(overrides: Sequence[Override]) -> list[str]:
    """Return the words that all jobs of a sweep have, as they have them."""
    return [
        f"{override.get_key_element()}={override.get_value_element_as_str()}"
        for override in overrides
        if not override.is_sweep_override()
    ]


def print_results(returns: Sequence[JobReturn]) -> None:
    """Print the table of what ran, as `python -m fedpfl.report tables` does."""
    folders = [_run_directory(job) for job in returns]
    tables = [folder.absolute() / "rounds.csv" for folder in folders if folder]
    nonempty_tables = [table for table in tables if table.is_file() and table.stat().st_size]
    if nonempty_tables:
        from fedpfl.report.__main__ import main  # pandas is slow to load

        main(["tables", *(str(table.parent) for table in nonempty_tables)])
        sys.stdout.flush()


def print_failures(returns: Sequence[JobReturn]) -> None:
    """Print the jobs that failed; nothing if none did."""
    failed_jobs = [job for job in returns if job.status == JobStatus.FAILED]
    if not failed_jobs:
        return
    print_notice(
        f"{len(failed_jobs)} of {len(returns)} jobs failed; the same command skips what is "
        "finished and tries these again"
    )
    for job in failed_jobs:
        cause = error_text(job._return_value)  # type: ignore[arg-type]
        folder = _run_directory(job)
        log: Path | str = "nothing was written"
        if folder and (folder / "run.log").is_file():
            log = folder / "run.log"
        line = f"  {' '.join(job.overrides or ())}: {cause} ({log})"
        print(escape_controls(line), file=sys.stderr)


def _run_directory(job: JobReturn) -> Path | None:
    """Return a job's run directory, relative where it lies below the working directory."""
    output_dir = job.hydra_cfg and job.hydra_cfg.hydra.runtime.get("output_dir")
    if not output_dir:
        return None
    folder = Path(output_dir)
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
