"""Messages: those of Hydra and OmegaConf as one line that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config.choices import FIXED, GROUPS, OPTIONAL_GROUPS, list_choices
from fedpfl.config.overrides import quote_word
from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError, choices_text, did_you_mean, missing_extra

NOISE = (
    "full_key:",
    "object_type=",
    "reference_type=",
    "Set the environment variable",
    "See https",
    "Error parsing override",
    "LexerNoViableAltException",
    "^",
)
"""How lines of Hydra's and OmegaConf's messages begin that help nobody."""
REWORDED = {
    r"Multiple values for (.*?)\. To override": (
        r"\1 has a value, which \1=... replaces; leave out the +, and in a file's defaults write"
        r" override /\1: ..."
    ),
    "Input config does not have a `_target_` field": (
        "hydra.launcher and hydra.sweeper are groups of keys; choose by "
        "hydra/launcher=... and hydra/sweeper=..."
    ),
    ".* does not support sweep type": (
        "interval is no sweep over values; name them, as in seed=1,2,3 or seed=range(1,4)"
    ),
}
"""What to say instead of messages of Hydra's that begin so."""
HIDDEN_KEYS = ("name", "title", "groups", "table")
"""Keys that nobody sets."""
EXTRAS = {"submitit": "slurm", "ray": "ray"}
"""What of fedpfl's extras brings launchers whose names begin so."""
PLUGINS = ("launcher", "sweeper")  # groups of Hydra's, which are chosen with a slash


def format_error(error: Exception) -> str:
    """Return an error's message as one line; of Hydra's and OmegaConf's, the part that helps."""
    text = str(error)
    if isinstance(error, FedpflError):
        return text
    # First of all: our own message is the cause, whatever Hydra and OmegaConf wrap around it.
    if message := _find_wrapped_message(error):
        return message
    if isinstance(error, MissingConfigException) and (missing := _explain_missing_choice(error)):
        return missing
    if isinstance(error, OverrideParseException):
        return _explain_unreadable(str(error.override), text)
    sweep_pattern = r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'(?:\n| requires)"
    if match := re.match(sweep_pattern, text, re.DOTALL):
        return needs_multirun(match[1])
    if match := re.search(r"Could not override '(.*?)'", text):
        return _explain_unknown_key(match[1], error.__cause__)
    for pattern, replacement in REWORDED.items():
        if match := re.match(pattern, text):
            return match.expand(replacement)
    if isinstance(error, UnicodeDecodeError):
        return f"a configuration file is no text in UTF-8 ({error.reason}); save it as UTF-8"
    if isinstance(error, OSError) and error.filename:
        return (
            f"cannot make {error.filename}: {error.strerror}; "
            "choose another place with hydra.run.dir=..."
        )
    return _strip_noise(error)


def _explain_missing_choice(error: MissingConfigException) -> str:
    """Return a group's choices, or which package is missing; "" if unknown."""
    group, name = _group_and_choice(str(error.missing_cfg_file))
    for prefix, extra in EXTRAS.items():
        if group == "hydra/launcher" and name.startswith(prefix):
            return str(missing_extra(f"{group}={name} needs a package that is absent", extra))
    # Of one among several (`logger=[wandb,foo]`) Hydra does not tell them.
    choices = list_choices(group) or error.options
    return f"{group} must be {choices_text(choices, name)}" if choices else ""


def _strip_noise(error: Exception) -> str:
    """Return a message of Hydra's or OmegaConf's on one line, without what helps nobody."""
    text = str(error)
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text}\n{error.__cause__}"
    if text.startswith("RecursionError raised while resolving interpolation"):
        text = "Recursive interpolation: its value asks for itself; give it a plain one"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        text = f"{error.full_key}: {text}"
    return "; ".join(_list_useful_lines(text)) or type(error).__name__


def _list_useful_lines(text: str) -> list[str]:
    """Return the lines of a message that help, without full stops."""
    lines = [line.strip().removesuffix(".") for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(NOISE)]


def needs_multirun(word: str) -> str:
    """Return what to say of a sweep without -m."""
    key, _, value = word.partition("=")
    if re.search(r"[(\[{'\"]", value):
        return f"{word} is a sweep, which needs -m"
    number_text = ""
    # A decimal comma, as in `local.lr=0,1`.
    if re.fullmatch(r"-?\d+,\d+", value):
        number_text = f", a number as {key}={value.replace(',', '.')}"
    return (
        f"{word} is a sweep, which needs -m; if it is one value, write a list as {key}=[{value}], "
        f"a text as {quote_word(key, value)}{number_text}"
    )


def _explain_unreadable(word: str, text: str) -> str:
    """Return what to do about a word that Hydra cannot parse."""
    key, equals, value = word.partition("=")
    problem_text = f"{word!r} cannot be read as key=value"
    # The key is to blame, be it a space around `=` or a letter that keys do not have.
    if not re.fullmatch(r"[+~]*[A-Za-z_][\w./@:-]*", key, re.ASCII):
        if equals and re.fullmatch(r"[\w./]+", key.strip(), re.ASCII):
            return f"{problem_text}; write {key.strip()}={value.strip()}, without a space"
        return problem_text
    if not equals:
        return f"{problem_text}; give it a value, {re.split('[:@]', key)[0]}=..."
    if value.startswith("="):
        return f"{problem_text}; write one =, {key}{value}"
    reasons = [
        line
        for line in _list_useful_lines(text)
        if "expecting" not in line and not line.startswith(("no viable", "token recognition"))
    ]
    return "; ".join([problem_text, *reasons, f"a text is quoted: {quote_word(key, value)}"])


def _group_and_choice(missing: str) -> tuple[str, str]:
    """Return group and name of a choice such as `hydra/launcher/ray` or `dataset/mnist`."""
    prefix = "hydra/" if missing.startswith("hydra/") else ""
    group, _, name = missing.removeprefix(prefix).partition("/")
    return prefix + group, name


def name_source_key(message: str, cfg: DictConfig) -> str:
    """Return a message about a key as one about the key that it interpolates.

    So a message about `method.q` is one about `quantile.q`, where the user sets it.
    """
    key, space, explanation = message.partition(" ")
    value: Any = OmegaConf.to_container(cfg, resolve=False)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    interpolation = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    if interpolation is None:
        return message
    return f"{interpolation[1]}{space}{explanation}"


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Return a group's choice for people: `dirichlet (alpha=0.1, min_samples=10)`."""
    values = ", ".join(
        f"{key}={value}"
        for key, value in flatten_keys(choice)
        if key != "name" and value is not None
    )
    return f"{choice['name']} ({values})" if values else str(choice["name"])


def _find_wrapped_message(error: Exception) -> str:
    """Return the message of a resolver's FedpflError, which OmegaConf wraps; "" without one."""
    inner: BaseException | None = error if isinstance(error, OmegaConfBaseException) else None
    while inner and not isinstance(inner, FedpflError):
        inner = inner.__cause__ or inner.__context__
    return str(inner or "")


def _explain_unknown_key(key: str, cause: BaseException | None) -> str:
    config: Any = dict.fromkeys(GROUPS)
    if isinstance(cause, OmegaConfBaseException) and cause.parent_node:
        config = OmegaConf.to_container(cause.parent_node._get_root(), resolve=False)
    group = key.split(".")[0]
    # A file of one's own below such a group would be merged as a text.
    if key in FIXED:
        return (
            f"{key} is a group of keys and no choice; set these, {key}.KEY=..., on the command line"
            " or in an experiment"
        )
    if group in OPTIONAL_GROUPS and not config.get(group):
        return f"{key} is for a hyperparameter that the method does not have"

    # ---- What was meant, if one key is much like it.
    similar_key = _find_similar_key(key, config)
    if similar_key:
        advice = f"did you mean {similar_key}?"
    else:
        help_option = "--cfg hydra" if group == "hydra" else "--help"
        advice = f"`python -m fedpfl.train {help_option}` tells all keys"

    # ---- Which keys there are: of a method all, as they differ from method to method.
    values = config.get(group) if "." in key else config
    should_list_keys = group == "method" or not similar_key
    if key and group != "hydra" and should_list_keys and isinstance(values, Mapping):
        names = ", ".join(name for name in values if name not in (*HIDDEN_KEYS, "hydra"))
        choice_text = ""
        if values is not config and "name" in values:
            choice_text = f" of {group}={values['name']}"
        advice_text = f"; {advice}" if similar_key else ""
        advice = f"known keys{choice_text}: {names}{advice_text}"
    return f"{key or 'nothing'} is not a key here; {advice}"


def _find_similar_key(unknown_key: str, config: Any) -> str | None:
    """Return the key, with dots, that was probably meant.

    It has the same name elsewhere, or a similar one.
    """
    is_hydra_key = unknown_key.startswith("hydra")
    keys = [key for key in _list_keys(config, "") if key.startswith("hydra") == is_hydra_key]
    parent_key, dot, name = unknown_key.replace("/", ".").rpartition(".")
    if "/" in unknown_key or unknown_key in PLUGINS:
        hydra_group = did_you_mean(name, PLUGINS, "hydra/{}")
        if hydra_group:
            return hydra_group
    sibling_names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent_key]
    if similar_name := did_you_mean(name, sibling_names, "{}"):
        return f"{parent_key}{dot}{similar_name}"
    # `alpha` was meant as `partition.alpha`: the very name elsewhere wins over similar ones.
    for key in keys:
        if key.endswith(f".{name}"):
            return key
    if not dot:
        method_keys = [key.removeprefix("method.") for key in keys if key.startswith("method.")]
        return did_you_mean(name, method_keys, "method.{}")
    # A group that exists lists its keys, which helps more than a similar key of another group.
    if sibling_names:
        return ""
    return did_you_mean(unknown_key, keys, "{}")


def _list_keys(values: Any, path: str) -> Iterator[str]:
    """Yield all keys of a configuration, with dots, those of groups included."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{path}{key}"
            yield from _list_keys(value, f"{path}{key}.")
