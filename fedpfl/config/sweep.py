"""Checks of a whole sweep before its first run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.data import datasets
from fedpfl.ground.errors import FedpflError


def prepare_sweep(configs: Sequence[DictConfig]) -> None:
    """Raise FedpflError for absent data and for faults that all runs of a sweep share."""
    preload_datasets(configs)
    fault = _find_fault(configs[0])
    if fault and fault == _find_fault(configs[-1]):
        raise FedpflError(fault)


def preload_datasets(configs: Iterable[DictConfig]) -> None:
    """Read the data of runs, so that absent data are noticed before any run.

    A configuration that is wrong in itself is left to its run, which says so.

    Raises:
        FedpflError: for data that are not there.
    """
    checked = set()
    for cfg in configs:
        try:
            # To check a run whole takes longer than some runs.
            sources = _describe_sources(cfg)
            if sources in checked:
                continue
            plan = check_config(cfg)
        except (FedpflError, OmegaConfBaseException):
            continue
        checked.add(sources)
        datasets.load_samples(data_dir=Path(plan.settings.data_dir), **plan.dataset.options)


def _describe_sources(cfg: DictConfig) -> str:
    """Return all that decides which data a run reads.

    Raises:
        OmegaConfBaseException: for what has no value.
    """
    values = []
    for key in ("data_dir", "dataset", "task", "plugins"):
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        values.append(value)
    return repr(values)


def _find_fault(cfg: DictConfig) -> str:
    """Return the fault of a run's configuration, "" without one."""
    try:
        build_run(check_config(cfg))
    except FedpflError as error:
        return str(error)
    except Exception:  # the run itself tells of it, with its log
        return ""
    return ""
