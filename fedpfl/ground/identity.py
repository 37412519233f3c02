"""What of a configuration determines a run's results: its identity, and what tells two runs apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedpfl.ground import dotted

RUNTIME_KEYS = {
    "seed",
    "logger",
    "device",
    "state",
    "data_dir",
    "checkpoint",
    "restart",
    "extend",
    "name",
    "plugins",
}
NON_IDENTITY_KEYS = RUNTIME_KEYS | {"quantile", "norm", "score", "hydra", "experiment"}
"""What does not tell runs apart: where and how they run, and groups that are already written into
`method`.
"""

OPTIONS_OFF: dict[str, Any] = {
    "local": {
        "clip": 0.0,
        "steps": None,
        "optimizer": "sgd",
        "nesterov": False,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "decay": 1.0,
        "decay_every": 1,
    },
    "stopping": {"early": False, "lam": 0.7},
    "validation": 0.0,
    "unseen": 0.0,
    "metrics": [],
    "eval": {"common": False, "classes": "all"},
    "model": {"weights": None, "overlap": False, "projection": 0, "head": None},
    "adapter": {"name": "none", "pairs": 1},
    "privacy": {"name": "none", "seed": None, "public_weights": False},
    "system": {"name": "none"},
    "dataset": {"only": None},
    "partition": {"seed": None},
    "method": {"statistics": "aggregate", "nesterov": False},
    "augment": {"flip": False, "rotate": 0.0, "crop": 0, "fill": "black"},
}
"""Options with the value at which they do nothing: so, or null, they are no part of an identity.

An option of a later release leaves the identities of earlier runs as they are.
"""


def result_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a resolved configuration that determines the result, but for the seed."""
    kept = {key: value for key, value in config.items() if key not in NON_IDENTITY_KEYS}
    for group, decides in (
        ("engine", lambda key: key == "precision"),
        ("dataset", lambda key: key != "download"),
    ):
        if isinstance(kept.get(group), Mapping):
            kept[group] = {key: value for key, value in kept[group].items() if decides(key)}
    for key, since in OPTIONS_OFF.items():
        value = kept.pop(key, since)
        if isinstance(since, dict) and isinstance(value, Mapping):
            value = {
                name: now
                for name, now in value.items()
                if name not in since or now not in (None, since[name])
            }
        if value not in ({}, since):
            kept[key] = value
    return kept


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any], most: int = 6) -> str:
    """Return by which keys two resolved configurations are different runs: `rounds 2 there, 3
    here`.
    """
    sides = [
        dict(dotted.flatten_keys({**result_config(config), "seed": config.get("seed")}))
        for config in (there, here)
    ]
    keys = [
        key for key in {**sides[0], **sides[1]} if sides[0].get(key, ...) != sides[1].get(key, ...)
    ]
    renamed = [key.removesuffix("name") for key in keys if key.endswith(".name")]
    told = [key for key in keys if key.endswith(".name") or not key.startswith(tuple(renamed))]
    values = [(dotted.get_dotted(there, key), dotted.get_dotted(here, key)) for key in told]
    texts = [
        f"{key.removesuffix('.name')} {_shown(old)} there, {_shown(new)} here"
        for key, (old, new) in zip(told, values, strict=True)
    ]
    return "; ".join([*texts[:most], *([f"{len(texts) - most} more"] if texts[most:] else [])])


def _shown(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)


def identity(config: Mapping[str, Any]) -> str:
    """Hash what a run computes, the same for all seeds, loggers and devices."""
    text = json.dumps(_canonical(result_config(config)), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def _canonical(value: Any) -> Any:
    """Return numbers as floats: 1 and 1.0 are the same choice."""
    if isinstance(value, Mapping):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return float(value) if type(value) is int else value
