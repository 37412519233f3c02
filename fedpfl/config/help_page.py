"""The page of `python -m fedpfl.train --help`: keys with values, comments and choices."""

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
from fedpfl.config.run_location import register_resolver
from fedpfl.config.schema import SCHEMAS, Settings
from fedpfl.data import datasets, partition
from fedpfl.ground.casting import describe_limits, schema_annotations
from fedpfl.ground.checks import build_dataclass, without_name
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.models import ADAPTERS, MODELS
from fedpfl.privacy import PRIVACIES
from fedpfl.robust import ATTACKS, DEFENCES
from fedpfl.system import SYSTEMS

REGISTRIES: dict[str, Mapping[str, Any]] = {
    "method": METHODS,
    "model": MODELS,
    "adapter": ADAPTERS,
    "partition": partition.SCHEMES,
    "privacy": PRIVACIES,
    "attack": ATTACKS,
    "defence": DEFENCES,
    "system": SYSTEMS,
}
LINE = re.compile(r"( *)([\w.]+):(?: ([^#]*?))? *(?:# (.*))?$")
HEAD = (
    "python -m fedpfl.train [KEY=VALUE ...]\n\n"
    "With -m, values separated by commas make a sweep. --cfg job prints the YAML, --hydra-help"
    " Hydra's own options.\n"
    "--dry-run says what would run, and writes nothing. With words such as method=fedper, --help"
    " has their keys."
)


def format_help(run_words: Sequence[str]) -> str:
    """Return the page for a command line. Raises what Hydra and OmegaConf do."""
    register_resolver()
    cfg = overrides.compose_config([word for word in run_words if not word.startswith("-")])
    comments = _read_comments(Path(overrides.CONF, "train.yaml"))
    choices = {
        group: str(name)
        for group, name in cfg.hydra.runtime.choices.items()
        if not group.startswith("hydra/")
    }

    # ---- Step 1: groups and what they choose from.
    choice_lines = ["Choices: GROUP=NAME", ""]
    for group in (*GROUPS, "paper", "experiment"):
        names = _list_names(group)
        if names:
            choice_lines.append(_format_columns(group, ", ".join(names)))

    # ---- Step 2: keys in no group.
    key_lines = ["Keys: KEY=VALUE", ""]
    groups: list[str] = []
    for key in map(str, cfg):
        if isinstance(cfg[key], DictConfig):
            groups.append(key)
        else:
            key_lines.append(_describe_key(cfg, key, "", comments, Settings))
    # Its keys are Hydra's own, which `--cfg hydra` tells.
    groups.remove("hydra")

    # ---- Step 3: a section for each group's keys, last for those with a choice.
    sections = [HEAD, "\n".join(choice_lines), "\n".join(key_lines)]
    # A stable sort: within either half, groups stay in the order of train.yaml.
    for group in sorted(groups, key=lambda group: group in choices):
        section = _format_group(
            group=group,
            name=choices.get(group, ""),
            values=cfg[group],
            comments=_select_group(comments, group),
        )
        sections.append(section)
    return "\n\n".join(sections)


def _format_group(group: str, name: str, values: DictConfig, comments: Mapping[str, str]) -> str:
    """Return the section about a group's keys.

    Args:
        group: of the configuration.
        name: of its choice, "" for a group of keys alone.
        values: by key.
        comments: by key, from train.yaml; those of the choice's own file are added.
    """
    title = group
    file = Path(overrides.CONF, group, f"{name}.yaml")
    if name:
        title = f"{group}={name}"
    if file.is_file():
        comments = {**comments, **_read_comments(file)}
    if comments.get(""):
        title += f": {comments['']}"
    if group == "method":
        title += _describe_server_view(values)
    lines = [textwrap.fill(title, _terminal_width()), ""]
    schema = _find_schema(group, values)
    for key in values:
        if key not in HIDDEN_KEYS:
            lines.append(_describe_key(values, key, f"{group}.", comments, schema))
    return "\n".join(lines).rstrip()


def _list_names(group: str) -> list[str]:
    """Return the choices of a group, but not Hydra's own."""
    registry = REGISTRIES.get(group, {})
    return sorted({*list_choices(group), *registry})


def _read_comments(file: Path) -> dict[str, str]:
    """Return the comment behind each key, by the key's path.

    That of the head of the file is by the empty path.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    comments: dict[str, str] = {}
    if lines[0].startswith("# "):
        comments[""] = lines[0].removeprefix("# ").rstrip(".")
    path: list[str] = []
    for line in lines:
        if match := LINE.match(line):
            depth = len(match[1]) // 2
            # Two spaces a level; a line takes the place of its level and ends all deeper ones.
            path[depth:] = [match[2]]
            comments[".".join(path)] = match[4] or ""
    return comments


def _select_group(comments: Mapping[str, str], group: str) -> dict[str, str]:
    """Return comments of a group's keys by their names in it, its own by ""."""
    return {
        key[len(group) + 1 :]: text
        for key, text in comments.items()
        if f"{key}.".startswith(f"{group}.")
    }


def _find_schema(group: str, values: DictConfig) -> Callable[..., Any] | None:
    """Return the class or function that takes a group's values, None for others."""
    if group in REGISTRIES:
        return REGISTRIES[group].get(values.get("name"))
    return {**SCHEMAS, "dataset": datasets.load_samples}.get(group)


def _describe_server_view(values: DictConfig) -> str:
    """Say what a method's server sees, unless its values are incomplete or wrong."""
    try:
        group_values: Any = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
        hyperparameters = {
            key: value for key, value in group_values.items() if key not in HIDDEN_KEYS
        }
        method_class = METHODS[group_values["name"]]
        method = build_dataclass(method_class, without_name(hyperparameters), "method")
        return f" (the server sees: {method.server_sees})"
    except (FedpflError, OmegaConfBaseException):
        return ""


def _describe_key(
    values: DictConfig, key: Any, prefix: str, comments: Mapping[str, str], schema: Any
) -> str:
    """Return the line about a key."""
    text = comments.get(str(key), "")
    annotation = schema_annotations(schema).get(str(key)) if schema else None
    # A comment that names all choices needs no list of them.
    choices = set(map(str, get_args(annotation)))
    names_choices = get_origin(annotation) is Literal and choices <= set(re.findall(r"\w+", text))
    if not names_choices:
        text = "; ".join(filter(None, (text, describe_limits(annotation))))
    group_values: Any = OmegaConf.to_container(values, resolve=True)
    value = group_values[key]
    if not isinstance(value, str) or not re.fullmatch(r"[\w./?-]*", value):
        # What a shell or Hydra would read otherwise is shown as one has to type it.
        value = next(overrides.format_words("", value)).removeprefix("=")
    return _format_columns(f"{prefix}{key}={value}", text)


def _terminal_width() -> int:
    return shutil.get_terminal_size().columns


def _format_columns(key: str, text: str) -> str:
    """Return two columns, as wide as the terminal is."""
    indent = " " * 32
    lines = textwrap.wrap(text, max(30, _terminal_width() - 32)) or [""]
    if len(key) > 28 and text:
        # A long key has a line for itself, so that the second column stays straight.
        lines.insert(0, f"  {key}")
        return f"\n{indent}".join(lines).rstrip()
    lines[0] = f"  {key:28}  {lines[0]}"
    return f"\n{indent}".join(lines).rstrip()
