"""Leaves no empty directories behind: Hydra makes a run's before anything of it is checked."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

# The directory that Hydra makes, and the deepest one of its path that was there before.
_footprints: list[Path] = []


class Footprints(Callback):
    """Remember which directories there were before Hydra made any; see conf/train.yaml."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note them before a single run."""
        _remember_folders(config, "hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note them before a sweep."""
        _remember_folders(config, "hydra.sweep.dir")


def remove_empty_directories(path: Path | None = None, otherwise: Path | None = None) -> None:
    """Remove empty directories that were not there before Hydra came.

    Args:
        path: the deepest one; None: the one that Hydra made.
        otherwise: where to stop in a worker process of a sweep, which has not seen its beginning.
    """
    hydra_folder, existing_folder = _footprints or (path, otherwise)
    if hydra_folder is not None and existing_folder is not None:
        remove_empty_parents(path or hydra_folder, existing_folder)


def remove_empty_parents(path: Path, stop: Path) -> None:
    """Remove `path` and its ancestors below `stop` as far as they are empty."""
    path = path.resolve()
    stop = stop.resolve()
    with contextlib.suppress(OSError):
        while path != stop and stop in path.parents:
            if os.path.isdir(path):  # else it was never made, but its parent may have been
                path.rmdir()  # refuses what is not empty
            path = path.parent


def _remember_folders(config: DictConfig, key: str) -> None:
    _footprints.clear()
    with contextlib.suppress(OmegaConfBaseException):  # which Hydra will tell
        hydra_folder = Path(OmegaConf.select(config, key))
        # Now, since Hydra makes the directory right after this callback.
        _footprints[:] = hydra_folder, find_existing_parent(hydra_folder)


def find_existing_parent(path: Path) -> Path:
    """Return the deepest directory of `path` that exists."""
    path = path.absolute()
    return next((folder for folder in (path, *path.parents) if os.path.isdir(folder)), Path("/"))
