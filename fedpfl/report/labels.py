"""Name data sets, partitions and methods as tables head them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedpfl.ground.identity import OPTIONS_OFF, result_config
from fedpfl.ground.records import Values
from fedpfl.report.names import DATASET_TITLES, METHOD_TITLES
from fedpfl.report.text import clip_text, one_line

SPLIT_DETAILS = frozenset(
    {
        "seed",
        "by_name",
        "test_fraction",
        "min_samples",
        "samples_per_client",
        "test_samples_per_client",
        "max_attempts",
    }
)
"""Keys of a partition that its label leaves out."""
CONDITION_KEYS = frozenset({"attack.name", "attack.share", "attack.clients", "defence.name"})
"""Keys that a setting names beside its partition's, and beside all those of `shift`."""
_VAGUE_KEYS = frozenset({"seed", "every", "early"})


def dataset_label(values: Values) -> str:
    """Return a data set's title, or the name of a user's file or folder."""
    name = str(values["name"])
    if name == "npz" and values.get("path"):
        return one_line(Path(values["path"]).stem)
    if name in ("sites", "hf", "pfllib", "flbench") and values.get("path"):
        return one_line(Path(values["path"]).name)
    title = DATASET_TITLES.get(name, one_line(name))
    # No pixel of x / 255 is above 1: statistics of 0..255 pixels are the published fault, chosen by
    # name.
    has_published_fault = any(mean > 1 for mean in values.get("mean") or ())
    return f"{title} as published" if has_published_fault else title


def partition_label(values: Values) -> str:
    """Return a label such as `Dir(0.1)`, `Dir(0.1) published`, `IID` or `Shards(2)`."""
    name = one_line(values["name"])
    suffixes = {"dirichlet": "", "published": " published", "fixed_dirichlet": " of fixed sizes"}
    if name in suffixes and "alpha" in values:
        return f"Dir({values['alpha']:g}){suffixes[name]}"
    if name == "iid":
        return "IID"
    if name == "file":
        return f"File({one_line(Path(str(values['path'])).name)})"
    title = name.replace("shuffled_", "shuffled ").capitalize()
    hidden_keys = ("name", *SPLIT_DETAILS)
    numbers = [
        f"{value:g}"
        for key, value in values.items()
        if key not in hidden_keys and value is not True and isinstance(value, int | float)
    ]
    return f"{title}({', '.join(numbers)})" if numbers else title


def conditions_label(config: Values) -> str:
    """Return attack, defence and shift of a run, such as `lie 20 %, median`."""
    options = result_config(config)
    conditions = []
    if "attack" in options:
        attack = options["attack"]
        size = f"{100 * attack['share']:g} %"
        if attack.get("clients"):
            size = f"{len(attack['clients'])} clients"
        conditions.append(f"{attack['name']} {size}")
    if "defence" in options:
        conditions.append(options["defence"]["name"])
    shift = options.get("shift", {})
    for key in OPTIONS_OFF["shift"]:
        if key in shift:
            conditions.append(key if shift[key] is True else f"{key}={shift[key]}")
    return clip_text(", ".join(conditions), 80)


def method_label(values: Values, quantile: bool = True, own_title: str = "") -> str:
    """Return the title with the most important settings, such as `FedOBP (q=0.9998)`.

    Args:
        values: the method's configuration.
        quantile: whether to name the quantile q.
        own_title: of a plugin's method, which has no file with one.
    """
    q = values.get("q")
    settings = []
    if quantile and isinstance(q, int | float):
        settings.append(f"q={float(q):.10g}")
    if values.get("score", "obp") != "obp":
        settings.append(f"score={values['score']}")
    if values.get("ema"):
        settings.append(f"ema={values['ema']:g}")
    if values.get("classifier_only"):
        settings.append("classifier only")
    if values.get("variant") not in (None, "default", "paper"):
        settings.append(str(values["variant"]))
    title = METHOD_TITLES.get(
        str(values["name"]),
        one_line(own_title or values["name"]),
    )
    return add_in_brackets(title, settings)


def add_in_brackets(label: str, settings: Sequence[str]) -> str:
    """Add settings in brackets: `A (b)` and `c` give `A (b, c)`."""
    if not settings:
        return label
    text = ", ".join(map(one_line, settings))
    return f"{label[:-1]}, {text})" if label.endswith(")") else f"{label} ({text})"


def setting_text(key: str, values: Values, keys: Sequence[str]) -> str:
    """Return a setting such as `lr=0.1`.

    Args:
        key: its dotted key, which is shortened to its last part where that is clear.
        values: the configuration by dotted key.
        keys: all keys that are named together.
    """
    parts = key.split(".")
    short_key = parts[-1]
    if short_key == "name" and len(parts) > 1:
        short_key = parts[-2]
    else:
        equal_endings = [name for name in keys if name.rsplit(".", 1)[-1] == short_key]
        # `lr` is enough where no other key ends so; `seed` alone would be the run's.
        if short_key in _VAGUE_KEYS or len(equal_endings) > 1:
            short_key = key
    value = values.get(key, ...)
    if value in (None, ...):
        return f"{short_key} not set"
    return f"{short_key}={clip_text(value, 40)}"
