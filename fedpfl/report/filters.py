"""Choose runs by keys of config.yaml, such as `method=fedobp,fedavg partition.alpha=0.1`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedpfl.ground import dotted
from fedpfl.ground.errors import FedpflError, did_you_mean
from fedpfl.ground.identity import OPTIONS_OFF
from fedpfl.report.text import clip_text, join_few, letters_and_digits

_FILTER = re.compile(r"[A-Za-z_]\w*(\.\w+)*=")


def is_filter(word: str) -> bool:
    """True if a word is `key=value` rather than a path.

    A folder of such a name is written `./key=value`.
    """
    return _FILTER.match(word) is not None


def apply_filters(
    configs: Sequence[Mapping[str, Any]],
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
    # ---- Step 1: the words of each key.
    words_by_key: dict[str, list[str]] = {}
    for word in filters:
        key, _, text = word.partition("=")
        # A list in brackets is one value.
        alternatives = [text] if text.startswith("[") else text.split(",")
        words_by_key.setdefault(key, []).extend(alternatives)
    if not configs:
        return []

    # ---- Step 2: of each key, which configurations have one of its words.
    passes = [True] * len(configs)
    for key, words in words_by_key.items():
        values = _values_of_key(configs, key)
        is_group = any(isinstance(config.get(key), Mapping) for config in configs)
        # Names of choices may be written as in tables: LG-FedAvg is lg_fedavg.
        normalize = letters_and_digits if is_group else _normalize_value
        accepted_texts = [
            {normalize(text) for text in (_yaml_text(value), names.get(key, "")) if text}
            for value, names in zip(values, titles, strict=True)
        ]
        # Each word must match a run: a misspelt one would silently choose less.
        for word in words:
            if not any(normalize(word) in texts for texts in accepted_texts):
                there_are = sorted({clip_text(_yaml_text(value), 40) for value in values} - {""})
                listed = f"{join_few(there_are)}{did_you_mean(word, there_are)}"
                raise FedpflError(f"{key}={word}: no such run here; there are: {listed}")
        wanted_texts = {normalize(word) for word in words}
        passes = [
            passed and bool(texts & wanted_texts)
            for passed, texts in zip(passes, accepted_texts, strict=True)
        ]
    if not any(passes):
        raise FedpflError(f"no run here is all of {' '.join(filters)}")
    return passes


def value_when_off(key: str) -> Any:
    """Return the value at which an option does nothing, or ... if the key is no option."""
    return dotted.get_dotted(OPTIONS_OFF, key, ...)


def _values_of_key(configs: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    """Return the key's value in each configuration, ... if it is absent.

    Raises:
        FedpflError: no configuration has the key, or it is a group without a name.
    """
    values = [_value_of_key(config, key) for config in configs]
    if all(value is ... for value in values):
        pairs = [pair for config in configs for pair in dotted.flatten_keys(config)]
        known_keys = [name.removesuffix(".name") for name, _ in pairs]
        endings = [name for name in known_keys if name.rpartition(".")[2] == key]
        hint = f"; did you mean {endings[0]}?" if endings else did_you_mean(key, known_keys)
        raise FedpflError(f"{key}: no run here has such a key{hint}")
    groups = [value for value in values if isinstance(value, Mapping)]
    if groups:
        keys = ", ".join(f"{key}.{name}" for name in groups[0])
        raise FedpflError(f"{key} is a group; name a key of it: {keys}")
    return values


def _value_of_key(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, of a group its name; ... if it is absent."""
    value = dotted.get_dotted(config, key, ...)
    if value is ...:
        off_value = value_when_off(key)
        # A run from before an option came is as if it were off.
        if not isinstance(off_value, Mapping):
            value = off_value
    return value.get("name", value) if isinstance(value, Mapping) else value


def _yaml_text(value: Any) -> str:
    """Return the value as YAML writes it."""
    if value is ...:
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_text, value))}]"
    return str(value)


def _normalize_value(text: str) -> str:
    """Return a text that is equal for equal values: `0.10` is `0.1`, `None` is `null`."""
    if text.startswith("["):
        parts = text.strip("[]").split(",")
        return ",".join(_normalize_value(part.strip()) for part in parts)
    with contextlib.suppress(ValueError):
        return repr(float(text))
    return "null" if text == "None" else text.lower()
