"""What `python -m fedpfl.train --help` prints: the keys, each with its value, its comment and its
choices.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS, list_choices
from fedpfl.config.messages import HIDDEN_KEYS
from fedpfl.config.plan import register_resolver
from fedpfl.config.schema import SCHEMAS, Settings
from fedpfl.data import datasets, partition
from fedpfl.ground.casting import describe_limits, schema_annotations
from fedpfl.ground.checks import build_dataclass, without_name
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.models import ADAPTERS, MODELS
from fedpfl.privacy import PRIVACIES
from fedpfl.system import SYSTEMS

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "method": METHODS,
    "model": MODELS,
    "adapter": ADAPTERS,
    "partition": partition.SCHEMES,
    "privacy": PRIVACIES,
    "system": SYSTEMS,
}
LINE = re.compile(r"( *)([\w.]+):(?: ([^#]*?))? *(?:# (.*))?$")
HEAD = """python -m fedpfl.train [KEY=VALUE ...]

With -m, values separated by commas make a sweep. --cfg job prints the YAML, --hydra-help Hydra's own options.
--dry-run says what would run, and writes nothing. With words such as method=fedper, --help has their keys."""


def format_help(comment_words: Sequence[str]) -> str:
    """Return the page for a command line. Raises what Hydra and OmegaConf do for words that they
    cannot take.
    """
    register_resolver()
    cfg = overrides.compose_config([word for word in comment_words if not word.startswith("-")])
    chosen = {
        group: str(name)
        for group, name in cfg.hydra.runtime.choices.items()
        if not group.startswith("hydra/")
    }
    groups = [
        (group, ", ".join(_list_names(group)))
        for group in (*GROUPS, "paper", "experiment")
        if _list_names(group)
    ]
    parts = [
        HEAD,
        "Choices: GROUP=NAME\n\n"
        + "\n".join(_format_columns(group, names) for group, names in groups),
    ]
    general = _comments(Path(overrides.CONF, "train.yaml"))
    single = [key for key in cfg if key != "hydra" and not isinstance(cfg[key], DictConfig)]
    parts.append(
        "Keys: KEY=VALUE\n\n"
        + "\n".join(_describe_key(cfg, key, "", general, Settings) for key in single)
    )
    for group in sorted(
        (str(key) for key in cfg if key not in ("hydra", *single)), key=lambda key: key in chosen
    ):
        file = Path(overrides.CONF, group, f"{chosen.get(group, '')}.yaml")
        comments_of_group = _select_group(general, group) | (
            _comments(file) if file.is_file() else {}
        )
        title = ": ".join(
            filter(
                None,
                (
                    f"{group}={chosen[group]}" if group in chosen else group,
                    comments_of_group.get(""),
                ),
            )
        )
        if group == "method":
            title += _describe_server_view(cfg[group])
        keys = [key for key in cfg[group] if key not in HIDDEN_KEYS]
        lines = [
            _describe_key(
                cfg[group], key, f"{group}.", comments_of_group, _schema(group, cfg[group])
            )
            for key in keys
        ]
        parts.append("\n".join([textwrap.fill(title, _terminal_width()), "", *lines]).rstrip())
    return "\n\n".join(parts)


def _list_names(group: str) -> list[str]:
    """Return the choices of a group, but not Hydra's own."""
    registry = REGISTRIES.get(group, {})
    return sorted({*list_choices(group), *registry})


def _comments(file: Path) -> dict[str, str]:
    """Return what stands behind each key, by its path; the head of the file by the empty one."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = {"": lines[0].removeprefix("# ").rstrip(".")} if lines[0].startswith("# ") else {}
    path: list[str] = []
    for line in lines:
        if match := LINE.match(line):
            depth = len(match[1]) // 2
            path[depth:] = [match[2]]
            comments[".".join(path)] = match[4] or ""
    return comments


def _select_group(comments: Mapping[str, str], group: str) -> dict[str, str]:
    """Return those of a group's keys, by their names in it, and the group's by the empty one."""
    return {
        key[len(group) + 1 :]: text
        for key, text in comments.items()
        if f"{key}.".startswith(f"{group}.")
    }


def _schema(group: str, values: DictConfig) -> Callable[..., Any] | None:
    """Return what the group's values are for."""
    if group in REGISTRIES:
        return REGISTRIES[group].get(values.get("name"))
    return {**SCHEMAS, "dataset": datasets.load_samples}.get(group)


def _describe_server_view(values: DictConfig) -> str:
    """Say what a method's server sees, unless its values are incomplete or wrong."""
    try:
        group_values: Any = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
        kept = {key: value for key, value in group_values.items() if key not in HIDDEN_KEYS}
        method = build_dataclass(METHODS[group_values["name"]], without_name(kept), "method")
        return f" (the server sees: {method.server_sees})"
    except (FedpflError, OmegaConfBaseException):
        return ""


def _describe_key(
    values: DictConfig, key: Any, prefix: str, comments: Mapping[str, str], schema: Any
) -> str:
    """Write a line about a key."""
    group_values: Any = OmegaConf.to_container(values, resolve=True)
    text, hint = (
        comments.get(str(key), ""),
        schema_annotations(schema).get(str(key)) if schema else None,
    )
    comment_words = re.findall(r"\w+", text)
    if get_origin(hint) is not Literal or not {*map(str, get_args(hint))} <= {*comment_words}:
        text = "; ".join(filter(None, (text, describe_limits(hint))))
    value = group_values[key]
    if not isinstance(value, str) or not re.fullmatch(r"[\w./?-]*", value):
        value = next(overrides.format_words("", value)).removeprefix("=")
    return _format_columns(f"{prefix}{key}={value}", text)


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


def _format_columns(left: str, right: str) -> str:
    """Write two columns, as wide as the terminal is."""
    gap = " " * 30
    wrapped = textwrap.wrap(right, max(30, _terminal_width() - 32)) or [""]
    first = f"  {left:28}  " if len(left) <= 28 or not right else f"  {left}\n{gap}  "
    return f"\n{gap}  ".join([first + wrapped[0], *wrapped[1:]]).rstrip()
