"""The search spaces of `tune`: conf/tune/, without what the user has set and what would be another
method.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedpfl.config import overrides
from fedpfl.config.plan import build_run, check_config
from fedpfl.config.plugins import LIMITS, SPACES, check_search_space
from fedpfl.config.schema import SCHEMAS
from fedpfl.ground.casting import cast_value, schema_annotations
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.ranges import COMPARISONS
from fedpfl.ground.terminal import print_notice
from fedpfl.methods import METHODS

SPACES_FOLDER = Path(overrides.CONF) / "tune"
EPOCHS = "local.epochs"
MARGIN = 0.05  # of an interval, that count as its end


def make_search_space(method: str, words: Sequence[str]) -> list[str]:
    """Return the words of a method's search space, without keys that the user has set. Raises
    FedpflError.

    A group that the user chose (`quantile=paper`) sets its keys, but for those that it leaves open
    (as `tuned`).
    """
    given = {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}
    known = {**_read_space("all", words), **_read_space(method, words)}
    known.pop(LIMITS, None)
    searched = [
        f"{key}={text}" for key, text in known.items() if key not in given and _open(key, given)
    ]
    if not searched and not any(map(overrides.is_sweep, words)):
        return [f"local.lr=choice({given['local.lr']})"]  # every trial is the same run
    return searched


def keep_within_limits(method: str, words: Sequence[str]) -> list[str]:
    """Return words of a search without values that make the method another one, and say which.
    Raises FedpflError.
    """
    limits = _read_space(method, words).get(LIMITS, {})
    bounded = [
        word for word in words if word.partition("=")[0] in limits and overrides.split_values(word)
    ]
    swept, left = [word for word in bounded if overrides.is_sweep(word)], list(words)
    facts = _facts(words, " ".join(limits.values())) if swept else {}
    for word in swept:
        key, values = word.partition("=")[0], overrides.split_values(word)
        kept = [value for value in values if _holds(limits[key], float(value), facts)]
        if kept != values:
            rule = _rule(limits[key], facts)
            if not kept:
                mend = "give it other values"
                mend += f", or raise {EPOCHS}" if EPOCHS in rule else ""
                raise FedpflError(
                    f"{word}: method={method} is itself only with {key} {rule}; {mend}"
                )
            lost = ", ".join(value for value in values if value not in kept)
            print_notice(
                f"method={method}: {key}={lost} is not searched; here it is itself only with {key} {rule}"
            )
            left[left.index(word)] = f"{key}=choice({','.join(kept)})"
    return left


def find_edge_values(
    method: str, chosen: Sequence[str], kinds: Mapping[str, Any], words: Sequence[str] = ()
) -> list[str]:
    """Return the chosen words whose value is at an end of what was searched, and could lie beyond.

    kinds: Optuna's distributions by key. words: of the command, which may name a folder of the
    user's.
    """
    limits = _read_space(method, words).get(LIMITS, {})
    there = [word for word in chosen if word.partition("=")[0] in kinds]
    return [word for word in there if _at_end(method, word, kinds[word.partition("=")[0]], limits)]


def _read_space(name: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return a search space by key: of the user's folder, of the plugin with the method, or of
    conf/tune/.

    Raises FedpflError for a file that is no such space.
    """
    for folder in (
        *(folder / "tune" for folder in overrides.find_config_dirs(words)),
        SPACES_FOLDER,
    ):
        path = folder / f"{name}.yaml"
        if path.is_file():
            with _readable(path):
                return check_search_space(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return dict(SPACES.get(name, {}))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise FedpflError, with the file's name, for what is wrong in it."""
    try:
        yield
    except (yaml.YAMLError, ValueError, OSError, FedpflError) as error:
        raise FedpflError(f"{path}: {error_text(error)}") from None


def _rule(limit: str, facts: Mapping[str, float]) -> str:
    """Return `above 0 and below local.epochs=1`: a limit in words, with what the user can set by
    its key.
    """
    parts = []
    for kind, bound in _bounds(limit, facts):
        of_epochs = f"{kind} epochs" in limit.split(", ") and bound == facts.get("epochs")
        parts.append(f"{kind} {EPOCHS}={bound:g}" if of_epochs else f"{kind} {bound:g}")
    return " and ".join(parts)


def _open(key: str, given: Mapping[str, str]) -> bool:
    """Tell whether the group of a key was not chosen, or leaves it without a value."""
    group, _, name = key.partition(".")
    if group not in given:
        return True
    path = SPACES_FOLDER.parent / group / f"{given[group]}.yaml"
    return path.is_file() and yaml.safe_load(path.read_text()).get(name) == "???"


def _facts(words: Sequence[str], limits: str) -> dict[str, float]:
    """Return what limits name: the least number of `layers` and of local `epochs` of the runs of
    these words.
    """
    plain = [
        word for word in words if not (overrides.is_sweep(word) or overrides.is_hydra_setting(word))
    ]
    swept = {
        word.partition("=")[0]: overrides.split_values(word)
        for word in words
        if overrides.is_sweep(word)
    }
    plans = [
        check_config(overrides.compose_config([*plain, f"model={name}"]))
        for name in swept.get("model", [])
    ]
    plans = plans or [check_config(overrides.compose_config(plain))]
    epochs = [
        *map(float, swept.get("local.epochs", [])),
        *(plan.local.epochs or math.inf for plan in plans),
    ]
    layers = (
        [len(build_run(plan).net.parts.layers) for plan in plans] if "layers" in limits else [0]
    )
    return {"layers": min(layers), "epochs": min(epochs)}


def _bounds(limit: str, facts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return `above 0, below layers` as `("above", 0), ("below", 4)`; without facts, those that
    need none.
    """
    found = [part.rpartition(" ") for part in limit.split(", ")]
    return [
        (kind, facts.get(name) or float(name))
        for kind, _, name in found
        if name in facts or name.isdecimal()
    ]


def _holds(limit: str, value: float, facts: Mapping[str, float]) -> bool:
    return all(COMPARISONS[kind](value, bound) for kind, bound in _bounds(limit, facts))


def _at_end(method: str, word: str, kind: Any, limits: Mapping[str, str]) -> bool:
    key, _, text = word.partition("=")
    choices = getattr(kind, "choices", None)
    try:
        numbers = sorted(map(float, choices or (kind.low, kind.high)))
    except ValueError:  # names have no end
        return False
    scale: Callable[[float], float] = math.log if getattr(kind, "log", False) else float
    low, value, high = (scale(number) for number in (numbers[0], float(text), numbers[-1]))
    margin = 0 if choices or getattr(kind, "step", None) else MARGIN * (high - low)
    beyond = [
        way
        for way, at in ((-1, value <= low + margin), (1, value >= high - margin))
        if at and low < high
    ]
    return any(_allowed(method, key, float(text), way, limits.get(key, "")) for way in beyond)


def _allowed(method: str, key: str, value: float, way: int, limit: str) -> bool:
    """Tell whether there is a value beyond this one that the key takes, and with which the method
    stays itself.
    """
    group, _, name = key.partition(".")
    hint = schema_annotations(SCHEMAS.get(group, METHODS[method])).get(name)

    def fits(further: float) -> bool:
        with contextlib.suppress(ValueError):
            return _holds(limit, further, {}) and (
                hint is None or cast_value(further, hint, key) is not None
            )
        return False

    return any(map(fits, (math.nextafter(value, way * math.inf), int(value) + way)))
