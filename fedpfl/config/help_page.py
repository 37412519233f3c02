"""The page of `python -m fedpfl.train --help`: keys with values, comments and choices."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS, list_choices
from fedpfl.config.group_options import READ_GROUPS, Group
from fedpfl.config.messages import HIDDEN_KEYS
from fedpfl.config.run_location import register_resolver
from fedpfl.ground.casting import describe_limits, schema_annotations
from fedpfl.ground.records import Record

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

    # ---- Step 1: groups and their choices.
    lines = [HEAD, "\nChoices: GROUP=NAME\n"]
    for group in (*GROUPS, "paper", "experiment"):
        names = sorted({*list_choices(group), *READ_GROUPS.get(group, Group()).registry})
        if names:
            lines.append(_format_columns(group, ", ".join(names)))

    # ---- Step 2: keys in no group, then a section for each group, those with a choice last.
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    del config["hydra"]
    groups = [key for key, value in config.items() if isinstance(value, dict)]
    comments = _read_comments(Path(overrides.CONF, "train.yaml"))
    lone_values = {key: value for key, value in config.items() if key not in groups}
    lines += ["\nKeys: KEY=VALUE\n", *_describe_keys("", lone_values, comments)]
    for group in sorted(groups, key=lambda group: group in choices):
        title = f"{group}={choices[group]}" if group in choices else group
        file = Path(overrides.CONF, group, f"{choices.get(group)}.yaml")
        # A group's own comment is under its name, one of a choice in the head of its file.
        own_comments = _read_comments(file) if file.is_file() else {"": comments.get(group, "")}
        head = ": ".join(filter(None, (title, own_comments[""])))
        lines += ["", textwrap.fill(head, shutil.get_terminal_size().columns), ""]
        full_comments = comments | {f"{group}.{key}": text for key, text in own_comments.items()}
        lines += _describe_keys(group, config[group], full_comments)
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


def _describe_keys(group: str, values: Record, comments: dict[str, str]) -> list[str]:
    """Return a line about each key of a group."""
    described = READ_GROUPS.get(group, Group())
    annotations: Record = {}
    for taker in (*described.common, described.registry.get(str(values.get("name")))):
        annotations |= schema_annotations(taker) if taker else {}
    lines = []
    for key, value in values.items():
        if group and key in HIDDEN_KEYS:
            continue
        full_key = f"{group}.{key}" if group else key
        text = comments.get(full_key, "")
        limits = describe_limits(annotations.get(key))
        # A comment that names all choices needs no list of them.
        if not {*re.findall(r"\w+", limits)} <= {"one", "of", *re.findall(r"\w+", text)}:
            text = "; ".join(filter(None, (text, limits)))
        # Shown as it has to be typed.
        if not isinstance(value, str) or not re.fullmatch(r"[\w./?-]*", value):
            value = next(overrides.format_words("", value)).removeprefix("=")
        lines.append(_format_columns(f"{full_key}={value}", text))
    return lines


def _format_columns(key: str, text: str) -> str:
    """Return two columns, as wide as the terminal."""
    lines = textwrap.wrap(text, max(30, shutil.get_terminal_size().columns - 32)) or [""]
    # A long key has a line for itself.
    first_lines = [f"  {key}"] if len(key) > 28 and text else []
    if not first_lines:
        lines[0] = f"  {key:28}  {lines[0]}"
    return f"\n{' ' * 32}".join([*first_lines, *lines]).rstrip()
