"""The command line of a run, from its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.records import Record, Values
from fedpfl.report.names import read_yaml

_CONF = Path(__file__).parents[1] / "conf"
_OF_COMMANDS = ("seed", "data_dir", "device", "restart", "extend", "name", "logger")
"""Keys of the place and the moment of a run, which its repetition chooses anew."""


def find_words(config: Values) -> list[str]:
    """Return the words of the command line that make a configuration, but for its seed.

    Choices of groups come first, then each key that differs from their files.
    """
    defaults = read_yaml(_CONF / "train.yaml")
    names: dict[str, str] = {}
    for entry in defaults.pop("defaults"):
        if isinstance(entry, dict):
            names |= entry
    _apply_data_set(str(config["dataset"].get("name")), names, defaults)
    choices = []
    values = []
    for group, options in config.items():
        if group in _OF_COMMANDS:
            continue
        expected = dict(flatten_keys({group: defaults.get(group)}))
        if group in names:
            # Some groups do not keep their choice; their values tell it.
            name = options.get("name", names[group])
            path = _CONF / group / f"{name}.yaml"
            expected |= flatten_keys({group: read_yaml(path) if path.exists() else {}})
            if names[group] != name:
                choices.append(f"{group}={name}")
        for key, value in flatten_keys({group: options}):
            if key != f"{group}.name" and expected.get(key) != value:
                values.append(f"{key}={_format_value(value)}")
    return [*choices, *values]


def _apply_data_set(data_set: str, names: dict[str, str], defaults: Record) -> None:
    """Replace another data set's defaults by those that come with this one."""
    folder = _CONF / "dataset"
    for path in (folder / f"{data_set}.yaml", folder / "own" / f"{data_set}.yaml"):
        values = read_yaml(path) if path.exists() else {}
        for entry in values.get("defaults", []):
            if isinstance(entry, dict):
                for override, choice in entry.items():
                    group = override.removeprefix("override /").partition("@")[0]
                    names[group] = choice
        if path.parent.name == "own":
            # Such as the number of clients, which it counts: the run's own is always told.
            for key in values:
                defaults.pop(key, None)


def _format_value(value: Any) -> str:
    """Write a value as the command line reads it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    text = text.removesuffix("...").strip().replace(", ", ",")
    return f"'{text}'" if " " in text else text
