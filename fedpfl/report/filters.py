"""Choose runs by their configuration: `method=fedobp,fedavg partition.alpha=0.1`, any key of config.yaml."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fedpfl.errors import FedpflError, near
from fedpfl.identity import LATER
from fedpfl.report.text import bare, clip

_FILTER = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
_MOST = 12  # values that an error tells

Item = TypeVar("Item")


def is_filter(word: str) -> bool:
    """Return whether a word is `key=value`, not a path; a folder of such a name is written `./key=value`."""
    return _FILTER.match(word) is not None


def choose(
    items: Iterable[Item],
    filters: Sequence[str],
    config: Callable[[Item], Mapping[str, Any]],
    named: Callable[[Item], Mapping[str, str]] = lambda item: {},
) -> list[Item]:
    """Return the items that all filters let through; those of one key are alternatives, as are values behind commas.

    config: an item's configuration. A group, such as `method`, stands for its name. named: what groups' values are
    called for people, which is understood too. Raises FedpflError for a key that no item has, a value that none has,
    and for values that none has together.
    """
    kept = every = list(items)
    wanted: dict[str, list[str]] = {}
    for word in filters:
        key, _, text = word.partition("=")
        wanted.setdefault(key, []).extend([text] if text.startswith("[") else text.split(","))
    for key, words in wanted.items() if every else ():
        found = [_value(config(item), key) for item in every]
        if all(value is ... for value in found):
            raise FedpflError(f"{key}={','.join(words)}: no run here has such a key{_meant(key, map(config, every))}")
        if branches := [value for value in found if isinstance(value, Mapping)]:
            raise FedpflError(
                f"{key}: a group of keys; name one of them: {', '.join(f'{key}.{k}' for k in branches[0])}"
            )
        group = any(isinstance(config(item).get(key), Mapping) for item in every)
        plain = bare if group else _canonical
        answers = [
            {plain(_shown(value)), *(plain(name) for name in [named(item).get(key)] if name)}
            if value is not ...
            else {}
            for item, value in zip(every, found, strict=True)
        ]
        for word in words:
            if not any(plain(word) in own for own in answers):
                there = sorted({_shown(value) for value in found if value is not ...})
                meant = "" if re.fullmatch(r"[-+.\deE]+", word) else near(word, there)
                told = ", ".join(clip(text, 40) for text in there[:_MOST]) + ", ..." * bool(there[_MOST:])
                raise FedpflError(f"{key}={word}: no such run here; there are: {told}{meant}")
        chosen = {
            id(item) for item, own in zip(every, answers, strict=True) if any(plain(word) in own for word in words)
        }
        kept = [item for item in kept if id(item) in chosen]
    if every and not kept:
        raise FedpflError(f"no run here is all of {' '.join(filters)}")
    return kept


def since(key: str) -> Any:
    """Return the value that all runs had before there was the key, ... where it has always been or is unknown."""
    value: Any = LATER
    for part in key.split("."):
        value = value.get(part, ...) if isinstance(value, Mapping) else ...
    return value


def _value(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, of a group its name; ... where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, ...) if isinstance(value, Mapping) else ...
    if value is ... and not isinstance(older := since(key), Mapping):
        value = older
    return value.get("name", value) if isinstance(value, Mapping) else value


def _shown(value: Any) -> str:
    """The value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(_shown, value))}]" if isinstance(value, list) else str(value)


def _canonical(text: str) -> str:
    """Text that is equal for equal values: `0.10` is `0.1`, `None` is `null`."""
    if text.startswith("["):
        return ",".join(_canonical(part.strip()) for part in text.strip("[]").split(","))
    with contextlib.suppress(ValueError):
        return repr(float(text))
    return "null" if text == "None" else text.lower()


def _meant(key: str, configs: Iterable[Mapping[str, Any]]) -> str:
    """What was probably meant by an unknown key."""
    known = dict.fromkeys(one for config in configs for one in _keys(config))
    ends = [one for one in known if one.rpartition(".")[2] == key]
    return f"; did you mean {' or '.join(ends[:3])}?" if ends else near(key, known)


def _keys(config: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from [f"{prefix}{key}"] * ("name" in value)
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
