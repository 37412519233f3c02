"""Messages of Hydra and OmegaConf on one line, with help for the commonest mistakes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config.choices import GROUPS, list_choices
from fedpfl.config.overrides import quote_word
from fedpfl.ground.dotted import flatten_keys, get_dotted
from fedpfl.ground.errors import FedpflError, choices_text, did_you_mean
from fedpfl.ground.records import Values

NOISE = ("full_key:", "object_type=", "reference_type=", "Set the environment variable", "See http")
"""Beginnings of lines in messages of Hydra and OmegaConf that help no user."""
HIDDEN_KEYS = ("name", "title", "groups", "table")
"""Keys that come with a choice and are not for users to set."""


def format_error(error: Exception) -> str:
    """Return an error's message as one line.

    Four common mistakes have messages of their own: an unknown choice, an unknown key, a word that
    cannot be read, and a sweep without -m.
    """
    # Resolvers raise FedpflError, around which OmegaConf wraps its own.
    is_ours = isinstance(error, FedpflError | OmegaConfBaseException)
    inner: BaseException | None = error if is_ours else None
    while inner and not isinstance(inner, FedpflError):
        inner = inner.__cause__ or inner.__context__
    text = str(inner or error)
    if inner:
        return text
    if isinstance(error, MissingConfigException):
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        choices = list_choices(group) or error.options
        if choices:
            return f"{group or '--config-name'} must be {choices_text(choices, name)}"
    if isinstance(error, OverrideParseException):
        key, _, value = str(error.override).partition("=")
        advice = f"a text is quoted: {quote_word(key, value)}" if value else "write KEY=VALUE"
        return f"{error.override!r} cannot be read as key=value; {advice}"
    if match := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'[\n ]", text):
        word = quote_word(*match[1].split("=", 1))
        return f"{match[1]} is a sweep, which needs -m; one text is quoted: {word}"
    if match := re.search(r"Could not override '(.*?)'", text):
        return _explain_unknown_key(match[1], error.__cause__)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text}\n{error.__cause__}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        text = f"{error.full_key}: {text}"
    lines = [line.strip().removesuffix(".") for line in text.splitlines()]
    useful_lines = [line for line in lines if line and not line.startswith(NOISE)]
    return "; ".join(useful_lines) or type(error).__name__


def name_source_key(message: str, cfg: DictConfig) -> str:
    """Return a message about a key as one about the key that it interpolates.

    A message about `method.q` becomes one about `quantile.q`, which the user sets.
    """
    key, space, explanation = message.partition(" ")
    values: Any = OmegaConf.to_container(cfg, resolve=False)
    interpolation = re.fullmatch(r"\$\{([\w.]+)\}", str(get_dotted(values, key)))
    return f"{interpolation[1]}{space}{explanation}" if interpolation else message


def describe_choice(choice: Values) -> str:
    """Return a group's choice for people: `dirichlet (alpha=0.1, min_samples=10)`."""
    values = ", ".join(
        f"{key}={value}"
        for key, value in flatten_keys(choice)
        if key != "name" and value is not None
    )
    return f"{choice['name']} ({values})" if values else str(choice["name"])


def _explain_unknown_key(key: str, cause: BaseException | None) -> str:
    """Suggest the similar key, or list the known ones."""
    config: Any = {}
    if isinstance(cause, OmegaConfBaseException) and cause.parent_node:
        config = OmegaConf.to_container(cause.parent_node._get_root(), resolve=False)
    if key in (*GROUPS, *config):
        return f"{key} is a group of keys; set one of them, {key}.KEY=..."
    group, _, name = key.rpartition(".")
    by_name: dict[str, str] = {}
    siblings: dict[str, str] = {}
    for known, _ in flatten_keys(config):
        if known.startswith("hydra") == key.startswith("hydra"):
            by_name[known.rpartition(".")[2]] = known
        if known.rpartition(".")[0] == group:
            siblings[known.rpartition(".")[2]] = known
    near = siblings if group else by_name | siblings
    # `alpha` was meant as `partition.alpha`, the same name elsewhere.
    similar_key = near.get(did_you_mean(name, near, "{}")) or by_name.get(name)
    if similar_key:
        return f"{key} is not a key here; did you mean {similar_key}?"
    values = config.get(group) if group else config
    if not isinstance(values, Mapping):
        return f"{key} is not a key here; `python -m fedpfl.train --help` lists all keys"
    names = ", ".join(str(name) for name in values if name not in (*HIDDEN_KEYS, "hydra"))
    choice_text = f" of {group}={values['name']}" if group and "name" in values else ""
    return f"{key} is not a key here; known keys{choice_text}: {names}"
