"""Train: `python -m fedpfl.train method=fedobp dataset=cifar100`; `-m` sweeps. conf/train.yaml
lists every key.

Exit status: 0 finished (or finished before), 1 a method's own code failed, 2 something in the
command, the data or the files to mend, 3 diverged, 130 interrupted (Ctrl-C), 143 terminated
(SIGTERM, SIGUSR2).
"""

from __future__ import annotations

import sys

from fedpfl.ground import answer, interrupts

if __name__ == "__main__":
    interrupts.begin_imports()

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config import help_page, overrides, plugins
from fedpfl.config.choices import GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.overrides import CONF
from fedpfl.config.run_location import plan_run, register_resolver
from fedpfl.engine.backends import ranks
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import remove_empty_folders
from fedpfl.ground.terminal import print_notice
from fedpfl.record import console
from fedpfl.runner import dry_run, session, trials
from fedpfl.runner.faults import EXIT_STATUS, TrialPruned, user_errors

DRY_RUN = "--dry-run"
_reached_jobs: list[bool] = []  # not empty once a job was reached
_wants_tracebacks: list[bool] = []  # not empty where the user asked for tracebacks


@hydra.main(config_path=CONF, config_name="train", version_base="1.3")
def job(cfg: DictConfig) -> str | None:
    """Run one job, alone or of a sweep.

    Returns:
        `trials.PRUNED` where a search gave it up.
    """
    _reached_jobs.append(True)
    hydra_cfg = HydraConfig.get()
    path = Path(hydra_cfg.runtime.output_dir)
    is_single_run = hydra_cfg.mode == RunMode.RUN
    try:
        # ---- Step 1: what only the command line can get wrong.
        if hydra_cfg.job.chdir and ranks.is_launched_by_torchrun():
            raise FedpflError(
                "hydra.job.chdir must be false under torchrun: one process alone has the run "
                "directory"
            )
        trial = None
        if is_single_run:
            _require_multirun(hydra_cfg)
        elif hydra_cfg.sweeper.get("study"):
            trial = trials.SearchTrial(hydra_cfg.sweeper)

        # ---- Step 2: play the run.
        with user_errors(cfg, path, keep_traceback=bool(_wants_tracebacks)):
            plan = plan_run(cfg, path)
            experiment = hydra_cfg.runtime.choices.get("experiment")
            train_session = session.Session(
                plan=plan,
                path=path,
                experiment=experiment,
                trial=trial,
            )
            for _ in train_session.play():
                pass
    except TrialPruned:
        return trials.PRUNED
    except FedpflError as error:
        if is_single_run:
            _give_up(error)
        # In a sweep other jobs go on, and Hydra raises the first failure after the last job.
        if not console.run_label.get():  # a labelled job is reported by the sweeper
            _tell(f"job {hydra_cfg.job.num} ({hydra_cfg.job.override_dirname}): {error}")
        raise error from None
    except Exception:
        if ranks.should_report_error():
            raise
        sys.exit(1)
    finally:
        remove_empty_folders(path)
    return None


def _require_multirun(hydra_cfg: HydraConf) -> None:
    """Raise FedpflError for one run of an experiment that sweeps."""
    run_words: Any = OmegaConf.to_container(hydra_cfg.overrides.task)  # interpolations stay
    dropped_keys = overrides.find_dropped_sweeps(hydra_cfg, run_words)
    if dropped_keys:
        experiment = hydra_cfg.runtime.choices.get("experiment")
        raise FedpflError(
            f"experiment={experiment} sweeps over {', '.join(dropped_keys)}, and this is one run:"
            f" add -m, or give one value of each: {'=... '.join(dropped_keys)}=..."
        )


def _give_up(error: Exception) -> NoReturn:
    _tell(format_error(error))
    sys.exit(EXIT_STATUS.get(type(error), 2))


def _tell(text: str) -> None:
    if ranks.should_report_error():
        print_notice(text)


def run_command(arguments: Sequence[str]) -> int:
    """Do as the command line with these words, and return its exit status."""
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def main() -> None:
    """Run the command: faults of the user's making are one line and a non-zero exit."""
    interrupts.end_imports()
    _reached_jobs.clear()  # those of an earlier command of this process
    has_started = False
    try:
        register_resolver()
        logging.captureWarnings(True)
        _wants_tracebacks[:] = [True] * (os.environ.get("HYDRA_FULL_ERROR") == "1")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and the line below is ours
        ranks.join_process_group()

        # ---- Step 1: words, as Hydra takes them.
        is_dry_run = DRY_RUN in sys.argv
        arguments = overrides.move_options_first(word for word in sys.argv[1:] if word != DRY_RUN)
        # Hydra then knows the choices that they add.
        plugins.load_plugins(overrides.read_list_value(arguments, "plugins"))
        arguments = overrides.replace_config_dir_option(arguments)

        # ---- Step 2: what runs nothing.
        if {"-h", "--help"} & {*arguments}:
            print(help_page.format_help(arguments))
            return
        arguments = overrides.adapt_for_sweeps(arguments, GROUPS)
        if is_dry_run:
            dry_run.print_dry_run(arguments)
            return

        # ---- Step 3: run.
        sys.argv[1:] = arguments
        if not ranks.is_main_process():
            sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]  # one process makes it
        has_started = True
        job()
        ranks.leave_process_group()
    except FedpflError as error:
        # The sweeper has reported the faults of its jobs.
        if has_started:
            sys.exit(EXIT_STATUS.get(type(error), 2))
        _give_up(error)
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, _tell)
    except Exception as error:
        # A fault in a job is a bug, and shows where it was raised.
        if _reached_jobs and not isinstance(error, HydraException | OmegaConfBaseException):
            raise
        # Hydra makes parents of a folder before it fails to make the folder.
        if isinstance(error, OSError) and error.filename:
            remove_empty_folders(Path(error.filename))
        _give_up(error)


if __name__ == "__main__":
    answer.run_command(main)
