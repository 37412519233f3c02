"""Search spaces of `tune`: conf/tune.yaml, without the user's keys and without degenerate values."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.plugins import LIMITS, SPACES
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Record, Values
from fedpfl.ground.terminal import print_notice

SPACES_FILE = Path(overrides.CONF) / "tune.yaml"
COMPARISONS = {
    "above": operator.gt,
    "at least": operator.ge,
    "at most": operator.le,
    "below": operator.lt,
}
"""Words of a limit."""
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
        user_values[override_key(word).lstrip("+")] = word.partition("=")[2]
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


def keep_within_limits(method: str, search_words: Sequence[str], cfg: DictConfig) -> list[str]:
    """Return words of a search without values that turn the method into another.

    Values that are left out are printed.

    Args:
        method: its name.
        search_words: of the search.
        cfg: configuration of a trial, which says how many layers and local epochs there are.

    Raises:
        FedpflError: if no value is left.
    """
    limits = _read_space(method, search_words).get(LIMITS)
    if not limits:
        return list(search_words)
    plan = check_config(cfg)
    net = build_run(plan).net
    # Networks of several kinds have their heads alone in common.
    layers = len(net.parts.layers) if len(net.nets) == 1 else 2
    # Runs that count steps have no epochs to be limited by.
    bounds = {"layers": layers, "epochs": plan.local.epochs or math.inf}
    kept_words = []
    for word in search_words:
        key = override_key(word)
        if key in limits and overrides.is_sweep(word):
            word = _keep_values(word, limits[key], bounds, method)
        kept_words.append(word)
    return kept_words


def _keep_values(word: str, limit: str, bounds: Mapping[str, float], method: str) -> str:
    """Return a swept word with the values that its limit allows. Raises FedpflError for none."""
    key = override_key(word)
    values = overrides.split_values(word)
    allowed_values = [value for value in values if _is_within(limit, float(value), bounds)]
    dropped_values = [value for value in values if value not in allowed_values]
    if not dropped_values:
        return word
    bounds_text = ", ".join(f"{name}={bound:g}" for name, bound in bounds.items() if name in limit)
    rule = f"method={method} is itself only with {key} {limit} (here {bounds_text})"
    if not allowed_values:
        raise FedpflError(f"{word}: {rule}; give it other values, or raise local.epochs")
    print_notice(f"{key}={', '.join(dropped_values)} is not searched: {rule}")
    return f"{key}=choice({','.join(allowed_values)})"


def _is_within(limit: str, value: float, bounds: Mapping[str, float]) -> bool:
    """Compare a value with a limit such as `above 0, below layers`."""
    for part in limit.split(", "):
        comparison, _, name = part.rpartition(" ")
        bound = bounds[name] if name in bounds else float(name)
        if not COMPARISONS[comparison](value, bound):
            return False
    return True


def find_edge_values(chosen_words: Sequence[str], space: Values) -> list[str]:
    """Return the chosen words with a number at an end of its search space.

    Args:
        chosen_words: result of the search.
        space: Optuna's distributions by key.
    """
    edge_words = []
    for word in chosen_words:
        key, _, text = word.partition("=")
        if key in space and _is_at_edge(text, space[key]):
            edge_words.append(word)
    return edge_words


def _is_at_edge(text: str, distribution: Any) -> bool:
    """Tell if a number is at an end of its search space."""
    values = getattr(distribution, "choices", None) or (distribution.low, distribution.high)
    try:
        numbers = [float(value) for value in (text, *values)]
    except ValueError:  # names have no end
        return False
    if getattr(distribution, "log", False):
        numbers = [math.log(number) for number in numbers]
    value, *ends = numbers
    low, high = min(ends), max(ends)
    is_interval = getattr(distribution, "step", 1) is None
    margin = EDGE_SHARE * (high - low) if is_interval else 0
    return low < high and not low + margin < value < high - margin


def override_key(word: str) -> str:
    """Return the key of `key=value`."""
    return word.partition("=")[0]


def _read_space(name: str, user_words: Sequence[str] = ()) -> Record:
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
