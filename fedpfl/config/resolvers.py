"""What configuration files may ask OmegaConf for: `${fedpfl.lookup:q}` and
`${fedpfl.folder:${experiment}}`.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedpfl.ground.errors import FedpflError


def choice_folder(choice: str | None) -> str:
    """Return the folder of a choice such as `fedobp/table3`; of one in no folder, the choice."""
    return str(choice).partition("/")[0]


def look_up_value(key: str, *, _root_: DictConfig, _parent_: DictConfig) -> Any:
    """Return the value of `key` for the run's data set and Dirichlet alpha.

    It is taken from `table` (data sets to alphas to values) beside the key, or else from
    `otherwise`; `title` is what errors call the table. Raises FedpflError where neither has a
    value.
    """
    group_values: Any = OmegaConf.to_container(_parent_)
    table, group = group_values.get("table"), _parent_._get_full_key(None)
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise FedpflError(f"{group}.table must map data sets to alphas to {key}, got {table!r}")
    name, alpha = (
        OmegaConf.select(_root_, key_path) for key_path in ("dataset.name", "partition.alpha")
    )
    row = table.get(name, {})
    value = (
        row[alpha]
        if isinstance(alpha, int | float) and alpha in row
        else group_values.get("otherwise")
    )
    if value is None:
        available = "; ".join(
            f"{one} ({', '.join(map(str, alphas))})" for one, alphas in table.items()
        )
        raise FedpflError(
            f"{group_values.get('title') or f'{group}.table'} has no {key} for dataset {name} with"
            f" alpha {alpha}; it has {available}; set {group}.{key}=..."
        )
    return value


for _name, _function in (("lookup", look_up_value), ("folder", choice_folder)):
    OmegaConf.register_new_resolver(f"fedpfl.{_name}", _function, replace=True, use_cache=False)
