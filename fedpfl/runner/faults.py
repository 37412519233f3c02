"""How a run goes wrong: kinds of errors, their exit statuses, and what a user can mend of others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from fedpfl import engine
from fedpfl.engine import ranks
from fedpfl.ground.errors import Broken, FedpflError, reason
from fedpfl.methods import METHODS

NO_ROOM = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""What PyTorch says where memory runs out, by several kinds of errors."""


class Diverged(FedpflError):
    """Training produced numbers that are not finite."""


class GivenUp(FedpflError):
    """A search for hyperparameters has no more use for the run."""


STATUS: dict[type[Exception], int] = {Broken: 1, Diverged: 3}
"""The exit status by the kind of error; 2 for the others."""


@contextmanager
def mended(cfg: DictConfig, path: Path, whole: bool = False) -> Iterator[None]:
    """Raise FedpflError for whatever a user or the method's author can mend.

    path: the run directory. whole: whether the errors of a method's code stay as they are, with their tracebacks.
    """
    started = time.time()
    try:
        yield
    except Broken as error:
        raise Broken(f"method={cfg.method.name}: {error}") from error
    except FedpflError:
        raise
    except Exception as error:
        fault = _no_room(error) or (None if whole else _in_method(error, cfg, path / "run.log", started))
        if fault is None:
            raise
        raise fault from error


def _no_room(error: Exception) -> FedpflError | None:
    said = reason(error)
    if not isinstance(error, MemoryError) and not any(sign in said for sign in NO_ROOM):
        return None
    said = said.rpartition("DefaultCPUAllocator: ")[2]
    return FedpflError(f"not enough memory ({said}); make the model, its cohort or local.batch_size smaller")


def _in_method(error: Exception, cfg: DictConfig, log: Path, started: float) -> FedpflError | None:
    """Say what the method's own code did; None for a bug of the program."""
    name = OmegaConf.select(cfg, "method.name")
    if name not in METHODS or not (blamed := ranks.blamed(error, METHODS[name])):
        return None
    hook, place = blamed
    if instead := engine.unseen(error):
        return Broken(f"method={name}: {hook} {instead} ({place})")
    written = log.is_file() and log.stat().st_mtime >= started
    return Broken(
        f"method={name}: {hook} raised {reason(error, kind=True)} ({place}); "
        f"{f'its traceback is in {log}' if written else 'HYDRA_FULL_ERROR=1 shows its traceback'}"
    )
