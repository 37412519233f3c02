"""What `python -m fedpfl.train --help` prints: every key with its value, its comment and its choices."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf

from fedpfl import config, overrides
from fedpfl.data import datasets, partition
from fedpfl.methods import METHODS
from fedpfl.models import MODELS

REGISTRIES: dict[str, Mapping[str, Any]] = {"method": METHODS, "model": MODELS, "partition": partition.SCHEMES}
LINE = re.compile(r"( *)([\w.]+):(?: ([^#]*?))? *(?:# (.*))?$")
HEAD = """python -m fedpfl.train [KEY=VALUE ...]

Values separated by commas, or -m, make a sweep. --cfg job prints the configuration as YAML, --hydra-help Hydra's options.
With other words before --help, such as method=fedper, this page has their keys and values."""


def page(words: Sequence[str]) -> str:
    """Return the page for a command line. Raises what Hydra and OmegaConf do for words that they cannot take."""
    cfg = overrides.composed([word for word in words if not word.startswith("-")])
    chosen = {group: str(name) for group, name in cfg.hydra.runtime.choices.items() if not group.startswith("hydra/")}
    groups = [(group, ", ".join(_names(group))) for group in (*config.GROUPS, "paper", "experiment") if _names(group)]
    parts = [HEAD, "Choices: GROUP=NAME\n\n" + "\n".join(_line(group, names) for group, names in groups)]
    told = _comments(Path(overrides.CONF, "train.yaml"))
    single = [key for key in cfg if key != "hydra" and not isinstance(cfg[key], DictConfig)]
    parts.append("Keys: KEY=VALUE\n\n" + "\n".join(_key(cfg, key, "", told, config.Settings) for key in single))
    for group in (key for key in cfg if isinstance(cfg[key], DictConfig) and key != "hydra"):
        file = Path(overrides.CONF, str(group), f"{chosen.get(str(group), '')}.yaml")
        own = _comments(file) if file.is_file() else {key[len(group) + 1 :]: text for key, text in told.items()}
        title = f"{group}={chosen[group]}" if group in chosen else str(group)
        about = own.get("", told.get(str(group), ""))
        keys = [key for key in cfg[group] if key not in ("name", "groups", "table")]
        lines = [_key(cfg[group], key, f"{group}.", own, _schema(str(group), cfg[group])) for key in keys]
        parts.append("\n".join([f"{title}: {about}" if about else title, "", *lines]).rstrip())
    return "\n\n".join(parts)


def _names(group: str) -> list[str]:
    """The choices of a group, but not Hydra's own."""
    registry = REGISTRIES.get(group, {})
    return sorted({path.stem for path in Path(overrides.CONF, group).glob("*.yaml")} | set(registry))


def _comments(file: Path) -> dict[str, str]:
    """What stands behind each key, by its path; the head of the file by the empty one."""
    lines = file.read_text(encoding="utf-8").splitlines()
    found, path = {"": lines[0].removeprefix("# ").rstrip(".")} if lines[0].startswith("# ") else {}, []
    for line in lines:
        if match := LINE.match(line):
            depth = len(match[1]) // 2
            path[depth:] = [match[2]]
            found[".".join(path)] = match[4] or ""
    return found


def _schema(group: str, values: DictConfig) -> Callable[..., Any] | None:
    """What the group's values are for."""
    if group in REGISTRIES:
        return REGISTRIES[group].get(values.get("name"))
    return {**config.SCHEMAS, "dataset": datasets.load}.get(group)


def _key(values: DictConfig, key: Any, place: str, comments: Mapping[str, str], schema: Any) -> str:
    """A line about a key."""
    given = OmegaConf.to_container(values, resolve=False)[key]  # type: ignore[index, call-overload]
    if isinstance(given, str) and given.startswith("${"):
        given = values[key]
    text = comments.get(str(key), "")
    allowed = [choice for choice in _allowed(schema, str(key)) if not re.search(rf"\b{choice}\b", text)]
    if allowed and len(allowed) > 1:
        text = "; ".join(filter(None, (text, f"one of {', '.join(_allowed(schema, str(key)))}")))
    return _line(f"{place}{key}={next(iter(overrides.words('', given))).removeprefix('=')}", text)


def _allowed(schema: Any, key: str) -> Iterator[str]:
    """The values that a key may have, where they are few."""
    if schema is not None:
        told = schema.__init__ if inspect.isclass(schema) and not hasattr(schema, "__dataclass_fields__") else schema
        hint = get_type_hints(told).get(key)
        yield from map(str, get_args(hint)) if get_origin(hint) is Literal else ()


def _line(left: str, right: str) -> str:
    """Two columns, as wide as the terminal is."""
    width, gap = shutil.get_terminal_size().columns, " " * 30
    wrapped = textwrap.wrap(right, max(30, width - 32)) or [""]
    first = f"  {left:28}  " if len(left) <= 28 or not right else f"  {left}\n{gap}  "
    return f"\n{gap}  ".join([first + wrapped[0], *wrapped[1:]]).rstrip()
