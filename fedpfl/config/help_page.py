"""The page of `python -m fedpfl.train --help`: keys with values, comments and choices."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS, list_choices
from fedpfl.config.messages import HIDDEN_KEYS
from fedpfl.config.run_location import register_resolver
from fedpfl.config.schema import SCHEMAS, Settings
from fedpfl.data import datasets, partition
from fedpfl.ground.casting import describe_limits, schema_annotations
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
    choices = cfg.hydra.runtime.choices
    comments = _read_comments(Path(overrides.CONF, "train.yaml"))

    # ---- Step 1: groups and their choices.
    lines = [HEAD, "\nChoices: GROUP=NAME\n"]
    for group in (*GROUPS, "paper", "experiment"):
        names = sorted({*list_choices(group), *REGISTRIES.get(group, {})})
        if names:
            lines.append(_format_columns(group, ", ".join(names)))

    # ---- Step 2: keys in no group.
    keys = [str(key) for key in cfg if key != "hydra"]
    groups = [key for key in keys if isinstance(cfg[key], DictConfig)]
    lines.append("\nKeys: KEY=VALUE\n")
    lines += [_describe_key(cfg, key, comments, Settings) for key in keys if key not in groups]

    # ---- Step 3: a section for each group's keys, those with a choice last.
    for group in sorted(groups, key=lambda group: group in choices):
        title = f"{group}={choices[group]}" if group in choices else group
        # A group's own comment is under its name, one of a choice in the head of its file.
        own_comments = {f"{group}.": comments.get(group, "")}
        file = Path(overrides.CONF, group, f"{choices.get(group)}.yaml")
        if file.is_file():
            own_comments |= {f"{group}.{key}": text for key, text in _read_comments(file).items()}
        head = ": ".join(filter(None, (title, own_comments[f"{group}."])))
        lines += ["", textwrap.fill(head, shutil.get_terminal_size().columns), ""]
        schema = {**SCHEMAS, "dataset": datasets.load_samples}.get(group)
        schema = REGISTRIES.get(group, {}).get(cfg[group].get("name"), schema)
        for key in cfg[group]:
            if key not in HIDDEN_KEYS:
                lines.append(
                    _describe_key(cfg[group], key, comments | own_comments, schema, f"{group}.")
                )
    return "\n".join(lines)


def _read_comments(file: Path) -> dict[str, str]:
    """Return the comment behind each key, by the key's path."""
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


def _describe_key(
    values: DictConfig, key: Any, comments: Mapping[str, str], schema: Any, prefix: str = ""
) -> str:
    """Return the line about a key."""
    text = comments.get(f"{prefix}{key}", "")
    annotation = schema_annotations(schema).get(str(key)) if schema else None
    # A comment that names all choices needs no list of them.
    choices = set(map(str, get_args(annotation)))
    names_choices = get_origin(annotation) is Literal and choices <= set(re.findall(r"\w+", text))
    if not names_choices:
        text = "; ".join(filter(None, (text, describe_limits(annotation))))
    group_values: Any = OmegaConf.to_container(values, resolve=True)
    value = group_values[key]
    if not isinstance(value, str) or not re.fullmatch(r"[\w./?-]*", value):
        # Shown as it has to be typed.
        value = next(overrides.format_words("", value)).removeprefix("=")
    return _format_columns(f"{prefix}{key}={value}", text)


def _format_columns(key: str, text: str) -> str:
    """Return two columns, as wide as the terminal."""
    lines = textwrap.wrap(text, max(30, shutil.get_terminal_size().columns - 32)) or [""]
    # A long key has a line for itself.
    first_lines = [f"  {key}"] if len(key) > 28 and text else []
    if not first_lines:
        lines[0] = f"  {key:28}  {lines[0]}"
    return f"\n{' ' * 32}".join([*first_lines, *lines]).rstrip()
