"""Identities: hashes of the part of a configuration that determines a run's results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedpfl.ground import dotted
from fedpfl.ground.records import Record, Values

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
"""Keys that do not distinguish runs.

They say where and how a run runs, or are groups whose values stand in `method` already.
"""

OPTIONS_OFF: Record = {
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
    "unseen_groups": [],
    "metrics": [],
    "task": "classification",
    "eval": {"common": False, "classes": "all", "horizon": None},
    "model": {"weights": None, "overlap": False, "projection": 0, "head": None},
    "adapter": {"name": "none", "pairs": 1, "rslora": False, "assign": "cycle"},
    "privacy": {"name": "none", "seed": None, "public_weights": False},
    "attack": {"name": "none", "clients": None},
    "defence": {"name": "mean"},
    "system": {"name": "none"},
    "dataset": {"only": None, "categories": None, "missing": "refuse"},
    "partition": {"seed": None, "together": None, "by_name": False},
    "method": {"statistics": "aggregate", "nesterov": False, "personal_init": "initial"},
    "augment": {"flip": False, "rotate": 0.0, "crop": 0, "fill": "black"},
    "shift": {
        "rotation": 0.0,
        "noise": 0.0,
        "blur": 0.0,
        "contrast": 0.0,
        "colour": 0.0,
        "label_permutation": False,
        "label_noise": 0.0,
        "label_noise_kind": "symmetric",
        "imbalance": 1.0,
        "by": "cluster",
        "clusters": 4,
        "at": [],
        "drift": "draw",
        "recover": False,
        "test": "shifted",
    },
}
"""The value at which an option does nothing: with it, or null, it is no part of an identity.

An option of a later release so leaves the identities of earlier runs as they are.
"""


def result_config(config: Values) -> Record:
    """Return the part of a resolved configuration that determines the result, without the seed."""
    relevant = {key: value for key, value in config.items() if key not in NON_IDENTITY_KEYS}
    # Of the engine, the precision alone changes results beyond the order of sums.
    if isinstance(engine := relevant.get("engine"), Mapping):
        relevant["engine"] = {key: value for key, value in engine.items() if key == "precision"}
    if isinstance(dataset := relevant.get("dataset"), Mapping):
        relevant["dataset"] = {key: value for key, value in dataset.items() if key != "download"}

    for key, off_value in OPTIONS_OFF.items():
        value = relevant.pop(key, off_value)
        if isinstance(off_value, dict) and isinstance(value, Mapping):
            value = {
                name: option
                for name, option in value.items()
                if name not in off_value or option not in (None, off_value[name])
            }
        if value not in ({}, off_value):
            relevant[key] = value
    return relevant


def describe_differences(stored_config: Values, new_config: Values, limit: int = 6) -> str:
    """Describe the differences of two configurations: `rounds 2 there, 3 here`.

    Args:
        stored_config: The resolved configuration of the run that is "there".
        new_config: The resolved configuration "here".
        limit: How many differences are written out; the rest are counted.
    """
    stored = _flat_result_config(stored_config)
    new = _flat_result_config(new_config)
    keys = [key for key in {**stored, **new} if stored.get(key, ...) != new.get(key, ...)]
    # Of a group with another name the name is enough: its other keys differ as a matter of course.
    renamed_groups = tuple(key.removesuffix("name") for key in keys if key.endswith(".name"))
    texts = []
    for key in keys:
        if key.startswith(renamed_groups) and not key.endswith(".name"):
            continue
        label = key.removesuffix(".name")
        stored_text = _value_text(dotted.get_dotted(stored_config, key))
        new_text = _value_text(dotted.get_dotted(new_config, key))
        texts.append(f"{label} {stored_text} there, {new_text} here")
    if len(texts) > limit:
        texts[limit:] = [f"{len(texts) - limit} more"]
    return "; ".join(texts)


def _flat_result_config(config: Values) -> Record:
    relevant = {**result_config(config), "seed": config.get("seed")}
    return dict(dotted.flatten_keys(relevant))


def _value_text(value: Any) -> str:
    """Return a value as the configuration's YAML has it."""
    return value if isinstance(value, str) else json.dumps(value)


def identity(config: Values) -> str:
    """Hash what determines a run's result, but for the seed."""
    text = json.dumps(
        _canonical(result_config(config)),
        sort_keys=True,
        default=str,
    )
    # Ten characters: among a million configurations two are alike with a chance of a third.
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()


def _canonical(value: Any) -> Any:
    """Return whole numbers as floats: 1 and 1.0 are the same choice."""
    if isinstance(value, Mapping):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    if type(value) is int:
        return float(value)
    return value
