"""Resolvers of configuration files: `${fedpfl.lookup:q}`, `${fedpfl.folder:${experiment}}`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedpfl.ground.errors import FedpflError, error_text

DEFAULT_TEST_FRACTION = 0.25
DEFAULT_CLIENTS = 100  # as in conf/train.yaml, which a data set's own number takes the place of


def choice_folder(choice: str | None) -> str:
    """Return the folder of a choice such as `fedobp/table3`, or the choice itself."""
    return str(choice).partition("/")[0]


def look_up_value(key: str, *, _root_: DictConfig, _parent_: DictConfig) -> Any:
    """Return the value of `key` for the run's data set and Dirichlet alpha.

    It is taken from `table` (data sets to alphas to values) beside the key, or else from
    `otherwise`; errors call the table by `title`. Raises FedpflError where neither has a
    value.
    """
    group_values: Any = OmegaConf.to_container(_parent_)
    group = _parent_._get_full_key(None)
    table = group_values.get("table")
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise FedpflError(f"{group}.table must map data sets to alphas to {key}, got {table!r}")
    dataset = OmegaConf.select(_root_, "dataset.name")
    alpha = OmegaConf.select(_root_, "partition.alpha")
    row = table.get(dataset, {})
    value = group_values.get("otherwise")
    # A partition without alpha, such as iid, has no column: `otherwise` is for it.
    if isinstance(alpha, int | float) and alpha in row:
        value = row[alpha]
    if value is None:
        title = group_values.get("title") or f"{group}.table"
        raise FedpflError(
            f"{title} has no {key} for dataset {dataset} with alpha {alpha}; set {group}.{key}=..."
        )
    return value


def count_sites(*, _root_: DictConfig) -> int:
    """Count the sites in dataset.path. Raises FedpflError."""
    # Data sets load torch, which a command that only composes does not wait for.
    from fedpfl.data.datasets.sites import list_sites

    return len(list_sites(_find_folder(_root_)))


def sites_test_fraction(*, _root_: DictConfig) -> float | None:
    """Return the share to test on, None where sites have test parts."""
    from fedpfl.data.datasets.sites import have_test_parts

    dataset = OmegaConf.select(_root_, "dataset")
    # `dataset.path=null` leaves the samples at nodes, where this machine cannot look.
    are_at_nodes = not OmegaConf.is_missing(dataset, "path") and dataset.path is None
    if not are_at_nodes and have_test_parts(_find_folder(_root_)):
        return None
    return DEFAULT_TEST_FRACTION


def read_json_value(name: str, key: str, *, _root_: DictConfig) -> Any:
    """Return a value of a JSON file in dataset.path. Raises FedpflError for an absent one."""
    file = _find_folder(_root_) / name
    try:
        return json.loads(file.expanduser().read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FedpflError(
            f"dataset.path: {file} tells no {key} ({error_text(error)}); name a folder as its"
            " generator wrote it, or set clients=N"
        ) from None


def _find_folder(config: DictConfig) -> Path:
    """Return dataset.path. Raises FedpflError where it has no value."""
    folder = OmegaConf.select(config, "dataset.path")
    if folder is None:
        raise FedpflError("dataset.path has no value; set it to the folder of your data")
    return Path(folder)


def count_hf_clients(*, _root_: DictConfig) -> int:
    """Count the clients in the column dataset.by; without a column return the default."""
    from fedpfl.data.datasets.hf import count_clients

    dataset = OmegaConf.select(_root_, "dataset")
    return DEFAULT_CLIENTS if dataset.by is None else count_clients(dataset)


def hf_test_fraction(*, _root_: DictConfig) -> float | None:
    """Return the share to test on, None where there is a test split."""
    from fedpfl.data.datasets.hf import has_test_part

    dataset = OmegaConf.select(_root_, "dataset")
    if dataset.get("by") is None:
        raise FedpflError(
            "dataset=hf takes its clients from the column dataset.by, which is null; name it, or "
            "choose how to deal samples, as with partition=dirichlet"
        )
    return None if has_test_part(dataset) else DEFAULT_TEST_FRACTION


RESOLVERS: dict[str, Callable[..., Any]] = {
    "lookup": look_up_value,
    "folder": choice_folder,
    "count_sites": count_sites,
    "read_json_value": read_json_value,
    "sites_test_fraction": sites_test_fraction,
    "count_hf_clients": count_hf_clients,
    "hf_test_fraction": hf_test_fraction,
}
for _name, _function in RESOLVERS.items():
    OmegaConf.register_new_resolver(f"fedpfl.{_name}", _function, replace=True, use_cache=False)
