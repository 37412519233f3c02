"""Leaves no empty directories behind: Hydra makes a run's directory before anything of the run is checked."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

_kept: list[Path] = []


class Footprints(Callback):
    """Remembers which directories there were before Hydra made any; see conf/train.yaml."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a single run."""
        _kept[:] = [_nearest(Path(config.hydra.run.dir))]

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before a sweep."""
        _kept[:] = [_nearest(Path(config.hydra.sweep.dir))]


def prune(path: Path, otherwise: Path) -> None:
    """Remove `path` and its ancestors as far as they are empty and were not there before.

    otherwise: where to stop in a worker process of a sweep, which has not seen its beginning.
    """
    stop = (_kept[0] if _kept else otherwise).resolve()
    path = path.resolve()
    with contextlib.suppress(OSError):
        while path != stop and stop in path.parents:
            path.rmdir()  # refuses what is not empty
            path = path.parent


def _nearest(path: Path) -> Path:
    """The deepest directory of `path` that exists."""
    path = path.absolute()
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))
