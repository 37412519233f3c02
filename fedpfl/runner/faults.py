"""Kinds of errors of a run, their exit statuses, and advice for users."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedpfl import engine
from fedpfl.config.messages import format_error
from fedpfl.config.overrides import HYDRA_ERRORS
from fedpfl.config.run_location import register_resolver
from fedpfl.engine.backends import ranks
from fedpfl.ground import interrupts
from fedpfl.ground.errors import FedpflError, MethodError, error_text, original_error
from fedpfl.ground.origin import is_of_package
from fedpfl.ground.terminal import print_notice
from fedpfl.methods import METHODS

MEMORY_SIGNS = (
    "can't allocate memory",
    "out of memory",
    "Storage size calculation overflowed",
)
"""Parts of PyTorch's messages when memory runs out."""


class Diverged(FedpflError):
    """Training produced numbers that are not finite."""


class TrialPruned(FedpflError):
    """A search for hyperparameters has pruned the run."""


EXIT_STATUS: dict[type[Exception], int] = {MethodError: 1, Diverged: 3}
"""Exit status by kind of error; 2 for all other kinds."""


def run_guarded(
    help_text: str | None, words: Sequence[str], command: Callable[[Sequence[str]], int]
) -> int:
    """Run a command on its words; return the exit status.

    Faults of the user's making are one line. Without words it prints the help.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(help_text)
        return 0
    try:
        register_resolver()
        return command(words)
    except (FedpflError, *HYDRA_ERRORS) as error:
        print_notice(format_error(error))
        return EXIT_STATUS.get(type(error), 2)
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, print_notice)


@contextmanager
def user_errors(cfg: DictConfig, path: Path, keep_traceback: bool = False) -> Iterator[None]:
    """Turn errors that a user or a method's author can fix into FedpflError.

    Args:
        cfg: configuration of the run.
        path: its run directory.
        keep_traceback: whether errors of a method's code stay as they are, with their tracebacks.
    """
    started = time.time()
    try:
        yield
    except MethodError as error:
        raise MethodError(f"method={cfg.method.name}: {error}") from error
    except FedpflError:
        raise
    except (Exception, SystemExit) as error:
        user_error = _explain_shortage(error, cfg)
        if user_error is None and not (keep_traceback and isinstance(error, Exception)):
            user_error = _explain_method_error(error, cfg, path / "run.log", started)
        if user_error is None:
            raise
        raise user_error from error


def _explain_shortage(error: BaseException, cfg: DictConfig) -> FedpflError | None:
    """Explain that memory ran out; None for another error."""
    text = error_text(error)
    if not isinstance(error, MemoryError) and not any(sign in text for sign in MEMORY_SIGNS):
        return None
    text = text.rpartition("DefaultCPUAllocator: ")[2]
    hook, _ = _find_failed_hook(error, cfg)
    part = f" for the result of {hook}" if hook else ""
    return FedpflError(
        f"not enough memory{part} ({text}); make the model, the data set, the cohort or "
        "local.batch_size smaller, or set state.device=disk"
    )


def _find_failed_hook(error: BaseException, cfg: DictConfig) -> tuple[str, str]:
    """Return the hook that raised and its line; "" if no hook did."""
    method_name = OmegaConf.select(cfg, "method.name")
    if method_name not in METHODS:
        return "", ""
    return ranks.find_blamed_hook(error, METHODS[method_name]) or ("", "")


def _explain_method_error(
    error: BaseException, cfg: DictConfig, log: Path, started: float
) -> FedpflError | None:
    """Explain an error of the method's own code; None for a bug of the program.

    Args:
        error: the raised error.
        cfg: configuration of the run.
        log: file that has the traceback if this run wrote to it.
        started: time since which the run may have written to it.
    """
    method_name = OmegaConf.select(cfg, "method.name")
    hook, line = _find_failed_hook(error, cfg)
    if not hook:
        if method_name in METHODS and not is_of_package(METHODS[method_name]):
            error.add_note("`fedpfl check` tells which hook of a method answers wrongly")
        return None
    vmap_advice = engine.vmap_advice(error)
    if vmap_advice:
        return MethodError(f"method={method_name}: {hook} {vmap_advice} ({line})")
    traceback_hint = "HYDRA_FULL_ERROR=1 shows its traceback"
    # A log from before this run would send its reader to another error.
    if log.is_file() and log.stat().st_mtime >= started:
        traceback_hint = f"its traceback is in {log}"
    reason = error_text(original_error(error), with_class=True)
    return MethodError(f"method={method_name}: {hook} raised {reason} ({line}); {traceback_hint}")
