"""Choose runs by keys of config.yaml, such as `method=fedobp,fedavg partition.alpha=0.1`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedpfl.ground import dotted
from fedpfl.ground.errors import FedpflError, did_you_mean
from fedpfl.ground.identity import OPTIONS_OFF
from fedpfl.ground.records import Values
from fedpfl.report.text import clip_text, join_few, letters_and_digits

_FILTER = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")


def is_filter(word: str) -> bool:
    """True if a word is `key=value` rather than a path.

    A folder of such a name is written `./key=value`.
    """
    return _FILTER.match(word) is not None


def apply_filters(
    configs: Sequence[Values],
    filters: Sequence[str],
    titles: Sequence[Mapping[str, str]],
) -> list[bool]:
    """Mark configurations that pass all filters; filters of one key are alternatives.

    Args:
        configs: the configurations.
        filters: words `key=value,value`; a group, such as `method`, stands for its name.
        titles: for each configuration the titles of its groups, which are understood too.

    Raises:
        FedpflError: no configuration has a key or a value, or none passes all filters.
    """
    words_by_key: dict[str, list[str]] = {}
    for word in filters:
        key, _, text = word.partition("=")
        # A list in brackets is one value.
        alternatives = [text] if text.startswith("[") else text.split(",")
        words_by_key.setdefault(key, []).extend(alternatives)
    if not configs:
        return []
    passes = [True] * len(configs)
    for key, words in words_by_key.items():
        # Names of choices may be written as in tables: LG-FedAvg is lg_fedavg.
        is_group = any(isinstance(config.get(key), Mapping) for config in configs)
        normalize = letters_and_digits if is_group else _normalize_value
        values = _values_of_key(configs, key)
        words_by_spelling = {normalize(word): word for word in words}
        known_spellings = set()
        for index, (value, names) in enumerate(zip(values, titles, strict=True)):
            spellings = {normalize(text) for text in (value, names.get(key, "")) if text}
            passes[index] &= not spellings.isdisjoint(words_by_spelling)
            known_spellings |= spellings
        # Each word must match a run: a misspelt one would silently choose less.
        for normal, word in words_by_spelling.items():
            if normal not in known_spellings:
                there_are = sorted({clip_text(value, 40) for value in values if value})
                alternatives_text = f"{join_few(there_are)}{did_you_mean(word, there_are)}"
                raise FedpflError(f"{key}={word}: no such run here; there are: {alternatives_text}")
    if not any(passes):
        raise FedpflError(f"no run here is all of {' '.join(filters)}")
    return passes


def value_when_off(key: str) -> Any:
    """Return the value at which an option does nothing, or ... if the key is no option."""
    return dotted.get_dotted(OPTIONS_OFF, key, ...)


def _values_of_key(configs: Sequence[Values], key: str) -> list[str]:
    """Return the key's value in each configuration as YAML writes it, empty without.

    Raises:
        FedpflError: no configuration has the key.
    """
    texts = []
    for config in configs:
        # A run from before an option came is as if it were off.
        value = dotted.get_dotted(config, key, value_when_off(key))
        if isinstance(value, Mapping):
            value = value.get("name", ...)
        texts.append("" if value is ... else _yaml_text(value))
    if not any(texts):
        pairs = [pair for config in configs for pair in dotted.flatten_keys(config)]
        known_keys = [name.removesuffix(".name") for name, _ in pairs]
        raise FedpflError(f"{key}: no run here has such a key{did_you_mean(key, known_keys)}")
    return texts


def _yaml_text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_text, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def _normalize_value(text: str) -> str:
    """Return a text that is equal for equal values: `0.10` is `0.1`, `None` is `null`."""
    if text.startswith("["):
        parts = text.strip("[]").split(",")
        return ",".join(_normalize_value(part.strip()) for part in parts)
    with contextlib.suppress(ValueError):
        return repr(float(text))
    return "null" if text == "None" else text.lower()
