"""Messages: those of Hydra and OmegaConf as one line that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config.choices import GROUPS, OPTIONAL_GROUPS, list_choices
from fedpfl.config.overrides import quote_word
from fedpfl.ground.errors import FedpflError, choices_text, did_you_mean

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
KNOWN = {
    r"Multiple values for (.*?)\. To override": (
        r"\1 has a value, which \1=... replaces; leave out the +"
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
    text, cause = str(error), error.__cause__
    if isinstance(error, FedpflError):
        return text
    if ours := _find_own_message(error):
        return ours
    if isinstance(error, MissingConfigException) and (missing := _explain_missing_choice(error)):
        return missing
    if isinstance(error, OverrideParseException):
        return _explain_unreadable(str(error.override), text)
    if swept := re.match(
        r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'(?:\n| requires)",
        text,
        re.DOTALL,
    ):
        return needs_multirun(swept[1])
    if unknown := re.search(r"Could not override '(.*?)'", text):
        return _explain_unknown_key(unknown[1], cause)
    for pattern, words in KNOWN.items():
        if match := re.match(pattern, text):
            return match.expand(words)
    if isinstance(error, OSError) and error.filename:
        return (
            f"cannot make {error.filename}: {error.strerror}; "
            "choose another place with hydra.run.dir=..."
        )
    return _strip_noise(error)


def _explain_missing_choice(error: MissingConfigException) -> str:
    """Return what a group has to choose from, or which package is missing; "" if unknown."""
    group, name = _group_and_choice(str(error.missing_cfg_file))
    extra = next((extra for start, extra in EXTRAS.items() if name.startswith(start)), "")
    if group == "hydra/launcher" and extra:
        return (
            f"{group}={name} needs a package that is not installed; pip install 'fedpfl[{extra}]'"
        )
    # Of one among several (`logger=[wandb,foo]`) Hydra does not tell them.
    known = list_choices(group) or error.options
    return f"{group} must be {choices_text(known, name)}" if known else ""


def _strip_noise(error: Exception) -> str:
    """Return a message of Hydra's or OmegaConf's on one line, without what helps nobody."""
    text, cause = str(error), error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        text = f"{text}\n{cause}"
    if text.startswith("RecursionError raised while resolving interpolation"):
        text = "Recursive interpolation: its value asks for itself; give it a plain one"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        text = f"{error.full_key}: {text}"
    lines = [line.strip().removesuffix(".") for line in text.splitlines()]
    return (
        "; ".join(line for line in lines if line and not line.startswith(NOISE))
        or type(error).__name__
    )


def needs_multirun(word: str) -> str:
    """Return what to say of a sweep without -m."""
    key, _, value = word.partition("=")
    if re.search(r"[(\[{'\"]", value):
        return f"{word} is a sweep, which needs -m"
    number = (
        f", a number as {key}={value.replace(',', '.')}"
        if re.fullmatch(r"-?\d+,\d+", value)
        else ""
    )
    return (
        f"{word} is a sweep, which needs -m; if it is one value, write a list as {key}=[{value}], "
        f"a text as {quote_word(key, value)}{number}"
    )


def _explain_unreadable(word: str, text: str) -> str:
    """Return what to do about a word that Hydra cannot parse."""
    key, equals, value = word.partition("=")
    problem_text = f"{word!r} cannot be read as key=value"
    if not re.fullmatch(r"[+~]*[A-Za-z_][\w./@:-]*", key, re.ASCII):
        spaced = equals and re.fullmatch(r"[\w./]+", key.strip(), re.ASCII)
        return (
            f"{problem_text}; write {key.strip()}={value.strip()}, without a space"
            if spaced
            else problem_text
        )
    if not equals:
        return f"{problem_text}; give it a value, {re.split('[:@]', key)[0]}=..."
    if value.startswith("="):
        return f"{problem_text}; write one =, {key}{value}"
    lines = [line.strip().removesuffix(".") for line in text.splitlines()]
    lines = [
        line for line in lines if line and not line.startswith(NOISE) and "expecting" not in line
    ]
    reasons = [line for line in lines if not line.startswith(("no viable", "token recognition"))]
    return "; ".join([problem_text, *reasons, f"a text is quoted: {quote_word(key, value)}"])


def _group_and_choice(missing: str) -> tuple[str, str]:
    """Return group and name of a choice such as `hydra/launcher/ray` or `experiment/folder/name`."""
    start = "hydra/" if missing.startswith("hydra/") else ""
    group, _, name = missing.removeprefix(start).partition("/")
    return start + group, name


def name_source_key(message: str, cfg: DictConfig) -> str:
    """Return a message about `method.q` as one about `quantile.q`, where `method.q` takes its value
    from there.
    """
    key, space, rest = message.partition(" ")
    value: Any = OmegaConf.to_container(cfg, resolve=False)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    source = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
    return f"{source[1]}{space}{rest}" if source else message


def describe_choice(choice: Mapping[str, Any]) -> str:
    """Return a group's choice for people: `dirichlet (alpha=0.1, min_samples=10)`."""
    values = ", ".join(
        f"{key}={value}" for key, value in choice.items() if key != "name" and value is not None
    )
    return f"{choice['name']} ({values})" if values else str(choice["name"])


def _find_own_message(error: Exception) -> str:
    """Return the message of the FedpflError that a resolver raised, which OmegaConf wraps; empty
    without one.
    """
    inner: BaseException | None = error if isinstance(error, OmegaConfBaseException) else None
    while inner and not isinstance(inner, FedpflError):
        inner = inner.__cause__ or inner.__context__
    return str(inner or "")


def _explain_unknown_key(key: str, cause: BaseException | None) -> str:
    root = (
        cause.parent_node._get_root()
        if isinstance(cause, OmegaConfBaseException) and cause.parent_node
        else None
    )
    known: Any = (
        dict.fromkeys(GROUPS) if root is None else OmegaConf.to_container(root, resolve=False)
    )
    group = key.split(".")[0]
    if group in OPTIONAL_GROUPS and not known.get(group):
        return f"{key} is for a hyperparameter that the method does not have"
    help_option = "--cfg hydra" if group == "hydra" else "--help"
    similar_key = _find_similar_key(key, known)
    advice = (
        f"did you mean {similar_key}?"
        if similar_key
        else f"`python -m fedpfl.train {help_option}` tells all keys"
    )
    values = known.get(group) if "." in key else known
    if (
        key
        and group != "hydra"
        and isinstance(values, Mapping)
        and (group == "method" or not similar_key)
    ):
        listed = ", ".join(
            method_keys for method_keys in values if method_keys not in (*HIDDEN_KEYS, "hydra")
        )
        name = f" of {group}={values['name']}" if values is not known and "name" in values else ""
        advice = f"known keys{name}: {listed}" + (f"; {advice}" if similar_key else "")
    return f"{key or 'nothing'} is not a key here; {advice}"


def _find_similar_key(got: str, config: Any) -> str | None:
    """Return the key, with dots, that was probably meant: of the same name elsewhere, or with a
    similar one.
    """

    def keys(values: Any, path: str) -> Iterator[str]:
        for key, value in values.items() if isinstance(values, Mapping) else ():
            yield f"{path}{key}"
            yield from keys(value, f"{path}{key}.")

    known = [key for key in keys(config, "") if key.startswith("hydra") == got.startswith("hydra")]
    parent_key, dot, name = got.replace("/", ".").rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == parent_key]
    if ("/" in got or got in PLUGINS) and (group := did_you_mean(name, PLUGINS, "hydra/{}")):
        return group
    if similar_key := did_you_mean(name, beside, "{}"):
        return f"{parent_key}{dot}{similar_key}"
    elsewhere = next((key for key in known if key.endswith(f".{name}")), None)
    method_keys = [key.removeprefix("method.") for key in known if key.startswith("method.")]
    return elsewhere or (
        did_you_mean(name, method_keys, "method.{}")
        if not dot
        else ""
        if beside
        else did_you_mean(got, known, "{}")
    )
