"""A configuration as plain values, its interpolations resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config.choices import GROUPS, OPTIONAL_GROUPS
from fedpfl.config.messages import format_error
from fedpfl.config.schema import SETTINGS
from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values


def resolve_config(cfg: DictConfig) -> Record:
    """Return the configuration as plain values, its optional groups written into the method.

    Raises:
        FedpflError: for missing values, and for a hyperparameter that the method does not have.
    """
    # ---- Step 1: resolve interpolations.
    try:
        config, optional_groups = _resolve_values(cfg)
    except OmegaConfBaseException as error:
        raise FedpflError(format_error(error)) from None

    # ---- Step 2: nothing is missing, and groups are groups.
    groups = [group for group in GROUPS if group not in OPTIONAL_GROUPS]
    for key in (*SETTINGS, *groups):
        if config.get(key) is None:
            raise _missing_value_error(key)
    for group, values in (config | optional_groups).items():
        if group in GROUPS and not isinstance(values, Mapping):
            raise FedpflError(f"{group} must be a group of keys, got {values!r}")

    # ---- Step 3: optional groups are for methods that name them.
    method = config["method"]
    for group in ("method", "dataset"):
        config[group].pop("title", None)  # for tables (fedpfl.report.names): it decides nothing
    groups_of_method = method.pop("groups", ())
    for group in optional_groups:
        if group not in groups_of_method:
            raise FedpflError(
                f"{group} is for a hyperparameter that method={method.get('name')} does not have"
            )
    return config


def _resolve_values(cfg: DictConfig) -> tuple[Record, Record]:
    """Return the configuration as plain values, and its optional groups as they stand there.

    Raises:
        FedpflError: Something is missing.
        OmegaConfBaseException: An interpolation leads nowhere.
    """
    unresolved: Record = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    unresolved.pop("hydra", None)
    if missing := [key for key, value in flatten_keys(unresolved) if _is_missing(value)]:
        raise _missing_value_error(min(missing))
    # The method has their values by now. A group is not looked up where the user sets method.q.
    optional_groups = {key: unresolved.pop(key, None) for key in OPTIONAL_GROUPS}
    chosen_groups = {key: value for key, value in optional_groups.items() if value is not None}
    config: Record = {}
    for key in unresolved:
        part = cfg[key]
        is_group = OmegaConf.is_config(part)
        config[key] = OmegaConf.to_container(part, resolve=True) if is_group else part
    return config, chosen_groups


def _is_missing(value: Any) -> bool:
    """Return True if a value, or one in a list, has still to be set."""
    return value == MISSING or (isinstance(value, list) and MISSING in value)


def _missing_value_error(key: str) -> FedpflError:
    return FedpflError(f"{key} has no value; set it with {key}=...")


def escape_interpolations(config: Values) -> DictConfig:
    """Return a configuration of these very values.

    Interpolations in the values are plain text.
    """

    def escape(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: escape(inner_value) for key, inner_value in value.items()}
        if isinstance(value, list | tuple):
            return [escape(inner_value) for inner_value in value]
        if isinstance(value, str):
            return re.sub(r"(\\*)\$\{", r"\1\1\${", value)
        return value

    return OmegaConf.create(escape(config))
