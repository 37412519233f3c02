"""Choose runs by their configuration: `method=fedobp,fedavg partition.alpha=0.1`, any key of
config.yaml.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedpfl.ground import dotted
from fedpfl.ground.errors import FedpflError, did_you_mean
from fedpfl.ground.identity import OPTIONS_OFF
from fedpfl.report.text import clip_text, letters_and_digits

_FILTER = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")
_NUMBER = re.compile(r"[-+.\deE]+")
_MOST = 12  # values that an error tells


def is_filter(word: str) -> bool:
    """Return whether a word is `key=value`, not a path; a folder of such a name is written
    `./key=value`.
    """
    return _FILTER.match(word) is not None


def apply_filters(
    configs: Sequence[Mapping[str, Any]], filters: Sequence[str], named: Sequence[Mapping[str, str]]
) -> list[bool]:
    """Return which configurations all filters let through; those of one key are alternatives.

    A group, such as `method`, stands for its name. named: by group, what each configuration's is
    called for people, which is understood too. Raises FedpflError for a key or a value that none
    has, and where none has all.
    """
    wanted: dict[str, list[str]] = {}
    for word in filters:
        key, _, text = word.partition("=")
        wanted.setdefault(key, []).extend([text] if text.startswith("[") else text.split(","))
    kept = [True] * len(configs)
    for key, words in wanted.items() if configs else ():
        values = _values(configs, key)
        plain = (
            letters_and_digits
            if any(isinstance(config.get(key), Mapping) for config in configs)
            else _canonical
        )
        texts = [set() if value is ... else {plain(_shown(value))} for value in values]
        for own, names in zip(texts, named, strict=True):
            own |= {plain(names[key])} if own and key in names else set()
        for word in words:
            if not any(plain(word) in own for own in texts):
                raise FedpflError(
                    f"{key}={word}: no such run here; there are: {_there(values, word)}"
                )
        asked = set(map(plain, words))
        kept = [before and bool(own & asked) for before, own in zip(kept, texts, strict=True)]
    if configs and not any(kept):
        raise FedpflError(f"no run here is all of {' '.join(filters)}")
    return kept


def value_when_off(key: str) -> Any:
    """Return the value at which an option does nothing, or ... if the key is no option."""
    return dotted.get_dotted(OPTIONS_OFF, key, ...)


def _values(configs: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """The key's value in each configuration, ... where there is none. Raises FedpflError where
    there is none at all.
    """
    values = [_value(config, key) for config in configs]
    if all(value is ... for value in values):
        raise FedpflError(f"{key}: no run here has such a key{_meant(key, configs)}")
    if groups := [value for value in values if isinstance(value, Mapping)]:
        raise FedpflError(
            f"{key} is a group; name a key of it: {', '.join(f'{key}.{one}' for one in groups[0])}"
        )
    return values


def _there(values: Iterable[Any], word: str) -> str:
    """The values that there are, and which was probably meant."""
    there = sorted({_shown(value) for value in values if value is not ...})
    told = ", ".join(clip_text(text, 40) for text in there[:_MOST]) + (
        ", ..." if there[_MOST:] else ""
    )
    return told + ("" if _NUMBER.fullmatch(word) else did_you_mean(word, there))


def _value(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key, of a group its name; ... where there is none."""
    value = dotted.get_dotted(config, key, ...)
    if value is ... and not isinstance(older := value_when_off(key), Mapping):
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
    known = dict.fromkeys(
        one.removesuffix(".name") for config in configs for one, _ in dotted.flatten_keys(config)
    )
    ends = [one for one in known if one.rpartition(".")[2] == key]
    return f"; did you mean {' or '.join(ends[:3])}?" if ends else did_you_mean(key, known)
