"""The search spaces of `tune`: conf/tune/, without what the user has set.

Values that would make the method another one are left out, too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.plugins import LIMITS, SPACES, check_search_space
from fedpfl.config.run import build_run
from fedpfl.config.schema import SCHEMAS
from fedpfl.ground.casting import cast_value, schema_annotations
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.ranges import COMPARISONS
from fedpfl.ground.terminal import print_notice
from fedpfl.methods import METHODS

SPACES_FOLDER = Path(overrides.CONF) / "tune"
EPOCHS_KEY = "local.epochs"
EDGE_SHARE = 0.05
"""Share of an interval at either end that counts as its edge."""


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
    """Return words of a search without values that make the method another one.

    Which these are is printed.

    Raises:
        FedpflError: where no value is left.
    """
    # ---- Step 1: the words that a limit is about.
    limits = _read_space(method, search_words).get(LIMITS, {})
    limited_words = [
        word
        for word in search_words
        if overrides.is_sweep(word)
        and override_key(word) in limits
        and overrides.split_values(word)
    ]
    if not limited_words:
        return list(search_words)

    # ---- Step 2: leave values out, and say so.
    bounds = _find_bounds(search_words, " ".join(limits.values()))
    kept_words = list(search_words)
    for word in limited_words:
        key = override_key(word)
        values = overrides.split_values(word)
        allowed_values = [
            value for value in values if _is_within(limits[key], float(value), bounds)
        ]
        if allowed_values == values:
            continue
        rule = _describe_limit(limits[key], bounds)
        if not allowed_values:
            advice = "give it other values"
            if EPOCHS_KEY in rule:
                advice += f", or raise {EPOCHS_KEY}"
            raise FedpflError(f"{word}: method={method} is itself only with {key} {rule}; {advice}")
        dropped_values = ", ".join(value for value in values if value not in allowed_values)
        print_notice(
            f"method={method}: {key}={dropped_values} is not searched; here it is itself only "
            f"with {key} {rule}"
        )
        kept_words[kept_words.index(word)] = f"{key}=choice({','.join(allowed_values)})"
    return kept_words


def find_edge_values(
    method: str,
    chosen_words: Sequence[str],
    distributions: Mapping[str, Any],
    user_words: Sequence[str] = (),
) -> list[str]:
    """Return the chosen words whose value is at an end of what was searched.

    Ends beyond which there is no value for the method are none.

    Args:
        method: name of the method.
        chosen_words: what the search has found.
        distributions: Optuna's, by key.
        user_words: of the command, which may name a folder of the user's.
    """
    limits = _read_space(method, user_words).get(LIMITS, {})
    edge_words = []
    for word in chosen_words:
        key, _, text = word.partition("=")
        if key not in distributions:
            continue
        directions = _find_directions_beyond(text, distributions[key])
        limit = limits.get(key, "")
        if any(
            _has_value_beyond(method, key, float(text), direction, limit)
            for direction in directions
        ):
            edge_words.append(word)
    return edge_words


def override_key(word: str) -> str:
    """Return the key of `key=value`."""
    return word.partition("=")[0]


def _read_space(name: str, user_words: Sequence[str] = ()) -> dict[str, Any]:
    """Return a search space by key: of the user's folder, the method's plugin, or conf/tune/.

    Raises:
        FedpflError: for a file that is no such space.
    """
    user_folders = [folder / "tune" for folder in overrides.find_config_dirs(user_words)]
    for folder in (*user_folders, SPACES_FOLDER):
        path = folder / f"{name}.yaml"
        if path.is_file():
            with _name_file_in_errors(path):
                values = yaml.safe_load(path.read_text(encoding="utf-8"))
                return check_search_space(values or {})
    return dict(SPACES.get(name, {}))


@contextlib.contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Raise FedpflError, with the file's name, for what is wrong in it."""
    try:
        yield
    except (yaml.YAMLError, ValueError, OSError, FedpflError) as error:
        raise FedpflError(f"{path}: {error_text(error)}") from None


def _is_left_open(key: str, user_values: Mapping[str, str]) -> bool:
    """Return whether a key's group was not chosen, or leaves it without a value."""
    group, _, name = key.partition(".")
    if group not in user_values:
        return True
    path = SPACES_FOLDER.parent / group / f"{user_values[group]}.yaml"
    return path.is_file() and yaml.safe_load(path.read_text()).get(name) == "???"


# ---- Limits, such as "above 0, below layers"


def _find_bounds(search_words: Sequence[str], limits: str) -> dict[str, float]:
    """Return the least numbers of `layers` and of local `epochs` in a search.

    Args:
        search_words: of the search.
        limits: texts that may name them.
    """
    fixed_words = [
        word
        for word in search_words
        if not (overrides.is_sweep(word) or overrides.is_hydra_setting(word))
    ]
    swept_values = {
        override_key(word): overrides.split_values(word)
        for word in search_words
        if overrides.is_sweep(word)
    }
    model_words = [[f"model={name}"] for name in swept_values.get("model", [])] or [[]]
    plans = [
        check_config(overrides.compose_config([*fixed_words, *model_word]))
        for model_word in model_words
    ]
    epochs = list(map(float, swept_values.get(EPOCHS_KEY, [])))
    # Runs that count steps have no epochs to be limited by.
    epochs += [plan.local.epochs or math.inf for plan in plans]
    layers = [0]
    if "layers" in limits:
        layers = [len(build_run(plan).net.parts.layers) for plan in plans]
    return {"layers": min(layers), "epochs": min(epochs)}


def _parse_limit(limit: str, bounds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return `above 0, below layers` as `("above", 0), ("below", 4)`.

    Args:
        limit: the text.
        bounds: numbers by name; parts with a name that is not there are left out.
    """
    parts = []
    for part in limit.split(", "):
        comparison, _, name = part.rpartition(" ")
        if name in bounds or name.isdecimal():
            parts.append((comparison, bounds.get(name) or float(name)))
    return parts


def _describe_limit(limit: str, bounds: Mapping[str, float]) -> str:
    """Return `above 0 and below local.epochs=1`, with what the user can set by its key."""
    texts = []
    for comparison, bound in _parse_limit(limit, bounds):
        is_of_epochs = f"{comparison} epochs" in limit.split(", ")
        if is_of_epochs and bound == bounds.get("epochs"):
            texts.append(f"{comparison} {EPOCHS_KEY}={bound:g}")
        else:
            texts.append(f"{comparison} {bound:g}")
    return " and ".join(texts)


def _is_within(limit: str, value: float, bounds: Mapping[str, float]) -> bool:
    return all(
        COMPARISONS[comparison](value, bound) for comparison, bound in _parse_limit(limit, bounds)
    )


# ---- Ends of what was searched


def _find_directions_beyond(text: str, distribution: Any) -> list[int]:
    """Return -1 for a value at its distribution's lower end, 1 at the upper."""
    choices = getattr(distribution, "choices", None)
    try:
        numbers = sorted(map(float, choices or (distribution.low, distribution.high)))
    except ValueError:  # names have no end
        return []
    scale: Callable[[float], float] = float
    if getattr(distribution, "log", False):
        scale = math.log
    low = scale(numbers[0])
    high = scale(numbers[-1])
    value = scale(float(text))
    is_stepped = choices or getattr(distribution, "step", None)
    # Between two steps there is nothing: only the last one is an edge.
    margin = 0 if is_stepped else EDGE_SHARE * (high - low)
    directions = []
    if low < high and value <= low + margin:
        directions.append(-1)
    if low < high and value >= high - margin:
        directions.append(1)
    return directions


def _has_value_beyond(method: str, key: str, value: float, direction: int, limit: str) -> bool:
    """Return whether the key takes a value beyond this one, within the method's limit."""
    group, _, name = key.partition(".")
    annotation = schema_annotations(SCHEMAS.get(group, METHODS[method])).get(name)

    def is_allowed(further_value: float) -> bool:
        if not _is_within(limit, further_value, {}):
            return False
        if annotation is None:
            return True
        with contextlib.suppress(ValueError):
            return cast_value(further_value, annotation, key) is not None
        return False

    next_real = math.nextafter(value, direction * math.inf)
    next_integer = int(value) + direction
    # The next number of either kind: a key's type says which it takes.
    return is_allowed(next_real) or is_allowed(next_integer)
