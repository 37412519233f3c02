"""How a run goes wrong: kinds of errors, their exit statuses, and what a user can mend of others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedpfl import engine
from fedpfl.engine.backends import ranks
from fedpfl.ground.errors import FedpflError, MethodError, error_text, original_error
from fedpfl.methods import METHODS

NO_ROOM = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""What PyTorch says where memory runs out, by several kinds of errors."""
NO_THREAD = "can't start new thread"
TOO_LARGE = {
    "fedpfl/data/": ("the data set", "take a smaller one, or fewer samples of it"),
    "fedpfl/models/": ("the network", "make the model smaller"),
    "fedpfl/engine/store.py": ("the clients' states", "set state.device=disk"),
    "fedpfl/engine/": (
        "a cohort in training",
        "make the model, its cohort or local.batch_size smaller",
    ),
}
"""What takes the memory that is asked for in these files, and what to do."""


class Diverged(FedpflError):
    """Training produced numbers that are not finite."""


class TrialPruned(FedpflError):
    """A search for hyperparameters has no more use for the run."""


EXIT_STATUS: dict[type[Exception], int] = {MethodError: 1, Diverged: 3}
"""The exit status by the kind of error; 2 for the others."""


@contextmanager
def user_errors(cfg: DictConfig, path: Path, whole: bool = False) -> Iterator[None]:
    """Raise FedpflError for whatever a user or the method's author can mend.

    path: the run directory. whole: whether the errors of a method's code stay as they are, with
    their tracebacks.
    """
    started = time.time()
    try:
        yield
    except MethodError as error:
        raise MethodError(f"method={cfg.method.name}: {error}") from error
    except FedpflError:
        raise
    except (Exception, SystemExit) as error:
        as_it_is = whole and isinstance(error, Exception)
        fault = _no_room(error, cfg) or (
            None if as_it_is else _in_method(error, cfg, path / "run.log", started)
        )
        if fault is None:
            raise
        raise fault from error


def _no_room(error: BaseException, cfg: DictConfig) -> FedpflError | None:
    """Say what was too large for this machine, or that it has no more threads; None of other
    errors.
    """
    said = error_text(error)
    if NO_THREAD in said:
        return FedpflError(
            "the system lets this process start no more threads; set engine.workers=1, or raise the limit (ulimit -u)"
        )
    if not isinstance(error, MemoryError) and not any(sign in said for sign in NO_ROOM):
        return None
    said = said.rpartition("DefaultCPUAllocator: ")[2]
    hook, _ = _blamed(error, cfg)
    places = [file.replace(os.sep, "/") for file, _, _ in reversed(ranks.frames(error))]
    what, mend = next(
        (told for file in places for place, told in TOO_LARGE.items() if place in file),
        TOO_LARGE["fedpfl/engine/"],
    )
    return FedpflError(
        f"not enough memory for {(hook and f'what {hook} makes') or what} ({said}); {mend}"
    )


def _blamed(error: BaseException, cfg: DictConfig) -> tuple[str, str]:
    """Return the hook that an error comes from and its place; "" of one that is not the method's."""
    name = OmegaConf.select(cfg, "method.name")
    return (name in METHODS and ranks.blamed(error, METHODS[name])) or ("", "")


def _in_method(
    error: BaseException, cfg: DictConfig, log: Path, started: float
) -> FedpflError | None:
    """Say what the method's own code did; None for a bug of the program."""
    name, (hook, place) = OmegaConf.select(cfg, "method.name"), _blamed(error, cfg)
    if not hook:
        return None
    if instead := engine.vmap_advice(error):
        return MethodError(f"method={name}: {hook} {instead} ({place})")
    written = log.is_file() and log.stat().st_mtime >= started
    return MethodError(
        f"method={name}: {hook} raised {error_text(original_error(error), with_class=True)} ({place}); "
        f"{f'its traceback is in {log}' if written else 'HYDRA_FULL_ERROR=1 shows its traceback'}"
    )
