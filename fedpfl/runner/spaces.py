"""Search spaces of `tune`: conf/tune.yaml, without the user's keys and without degenerate values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.plugins import LIMITS, SPACES
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.ranges import COMPARISONS
from fedpfl.ground.terminal import print_notice

SPACES_FILE = Path(overrides.CONF) / "tune.yaml"
EPOCHS_KEY = "local.epochs"
EDGE_SHARE = 0.05
"""Share of an interval that counts as its edge, at either end."""


def make_search_space(method: str, user_words: Sequence[str]) -> list[str]:
    """Return the words of a method's search space, without keys that the user has set.

    A group that the user chose (`quantile=paper`) sets its keys, but for those that it leaves open
    (as `tuned`).

    Raises:
        FedpflError: for a file that is no space.
    """
    user_values = {}
    for word in user_words:
        key, _, value = word.partition("=")
        user_values[key.lstrip("+")] = value
    # The method's own values replace those that all methods have.
    space = {**_read_space("all", user_words), **_read_space(method, user_words)}
    space.pop(LIMITS, None)
    search_words = [
        f"{key}={text}"
        for key, text in space.items()
        if key not in user_values and _is_left_open(key, user_values)
    ]
    if not search_words and not any(map(overrides.is_sweep, user_words)):
        return [f"local.lr=choice({user_values['local.lr']})"]  # every trial is the same run
    return search_words


def keep_within_limits(method: str, search_words: Sequence[str]) -> list[str]:
    """Return words of a search without values that turn the method into another.

    Values that are left out are printed.

    Raises:
        FedpflError: if no value is left.
    """
    limits = _read_space(method, search_words).get(LIMITS, {})
    bounds: dict[str, float] = {}
    kept_words = []
    for word in search_words:
        key = override_key(word)
        values = overrides.split_values(word)
        if key not in limits or not overrides.is_sweep(word) or not values:
            kept_words.append(word)
            continue
        bounds = bounds or _find_bounds(search_words, " ".join(limits.values()))
        allowed_values = [
            value for value in values if _is_within(limits[key], float(value), bounds)
        ]
        bounds_text = ", ".join(
            f"{name}={bound:g}" for name, bound in bounds.items() if name in limits[key]
        )
        rule = f"method={method} is itself only with {key} {limits[key]} (here {bounds_text})"
        if not allowed_values:
            raise FedpflError(f"{word}: {rule}; give it other values, or raise local.epochs")
        if allowed_values != values:
            dropped_values = ", ".join(value for value in values if value not in allowed_values)
            print_notice(f"{key}={dropped_values} is not searched: {rule}")
            word = f"{key}=choice({','.join(allowed_values)})"
        kept_words.append(word)
    return kept_words


def find_edge_values(chosen_words: Sequence[str], distributions: Mapping[str, Any]) -> list[str]:
    """Return the chosen words with a value at an end of the search space.

    Args:
        chosen_words: result of the search.
        distributions: Optuna's, by key.
    """
    edge_words = []
    for word in chosen_words:
        key, _, text = word.partition("=")
        distribution = distributions.get(key)
        if distribution is not None and _is_at_edge(text, distribution):
            edge_words.append(word)
    return edge_words


def _is_at_edge(text: str, distribution: Any) -> bool:
    """Tell if a number is at an end of its search space."""
    choices = getattr(distribution, "choices", None)
    try:
        numbers = list(map(float, choices or (distribution.low, distribution.high)))
    except ValueError:  # names have no end
        return False
    is_logarithmic = getattr(distribution, "log", False)
    scale: Callable[[float], float] = math.log if is_logarithmic else float
    low, high, value = (scale(number) for number in (min(numbers), max(numbers), float(text)))
    # Between two steps there is nothing: only the last one is an edge.
    is_stepped = choices or getattr(distribution, "step", None)
    margin = 0 if is_stepped else EDGE_SHARE * (high - low)
    return low < high and not low + margin < value < high - margin


def override_key(word: str) -> str:
    """Return the key of `key=value`."""
    return word.partition("=")[0]


def _read_space(name: str, user_words: Sequence[str] = ()) -> dict[str, Any]:
    """Return a search space by key: of the user's tune.yaml, the method's plugin, or conf/tune.yaml.

    Raises:
        FedpflError: for a file that is no such space.
    """
    user_files = [folder / "tune.yaml" for folder in overrides.find_config_dirs(user_words)]
    for path in filter(Path.is_file, (*user_files, SPACES_FILE)):
        try:
            space = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get(name)
            if space is not None:
                return dict(space)
        except (yaml.YAMLError, ValueError, OSError, AttributeError) as error:
            raise FedpflError(f"{path}: {error_text(error)}") from None
    return dict(SPACES.get(name, {}))


def _is_left_open(key: str, user_values: Mapping[str, str]) -> bool:
    """Tell if a key's group was not chosen, or leaves it without a value."""
    group, _, name = key.partition(".")
    if group not in user_values:
        return True
    path = SPACES_FILE.parent / group / f"{user_values[group]}.yaml"
    return path.is_file() and yaml.safe_load(path.read_text()).get(name) == "???"


def _find_bounds(search_words: Sequence[str], limits: str) -> dict[str, float]:
    """Return the smallest numbers of `layers` and of local `epochs` in a search.

    Args:
        search_words: of the search.
        limits: texts that may name them.
    """
    swept_words = list(filter(overrides.is_sweep, search_words))
    fixed_words = [
        word
        for word in search_words
        if not (word in swept_words or overrides.is_hydra_setting(word))
    ]
    swept_values = {override_key(word): overrides.split_values(word) for word in swept_words}
    model_words = [[f"model={name}"] for name in swept_values.get("model", [])] or [[]]
    plans = [
        check_config(overrides.compose_config([*fixed_words, *model_word]))
        for model_word in model_words
    ]
    # Runs that count steps have no epochs to be limited by.
    epochs = [plan.local.epochs or math.inf for plan in plans]
    epochs += map(float, swept_values.get(EPOCHS_KEY, []))
    layers = [math.inf]
    if "layers" in limits:
        layers = [len(build_run(plan).net.parts.layers) for plan in plans]
    return {"layers": min(layers), "epochs": min(epochs)}


def _is_within(limit: str, value: float, bounds: Mapping[str, float]) -> bool:
    """Compare a value with a limit such as `above 0, below layers`."""
    parts = [part.rpartition(" ") for part in limit.split(", ")]
    return all(
        COMPARISONS[comparison](value, bounds[name] if name in bounds else float(name))
        for comparison, _, name in parts
    )
