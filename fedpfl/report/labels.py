"""What data sets, partitions and methods are called in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpfl.report.names import DATASET_TITLES, METHOD_TITLES
from fedpfl.report.text import clip_text, one_line

SPLIT_DETAILS = frozenset(
    {
        "seed",
        "test_fraction",
        "min_samples",
        "samples_per_client",
        "test_samples_per_client",
        "max_attempts",
    }
)
"""Keys of a partition that its label leaves out."""
_VAGUE = frozenset({"seed", "every", "early"})


def dataset_label(values: Mapping[str, Any]) -> str:
    """Return the data set's title; of an npz file its name."""
    name = str(values["name"])
    if name == "npz" and values.get("path"):
        return one_line(Path(values["path"]).stem)
    # No pixel of x / 255 is above 1: statistics of 0..255 pixels are the published fault, chosen by
    # name.
    faulty = any(mean > 1 for mean in values.get("mean") or ())
    return DATASET_TITLES.get(name, one_line(name)) + (" as published" if faulty else "")


def partition_label(values: Mapping[str, Any]) -> str:
    """Return `Dir(0.1)`, `Dir(0.1) published`, `IID`, `Shards(2)`, `Groups`, or the name with its
    values.
    """
    name = one_line(values["name"])
    after = {"dirichlet": "", "published": " published", "fixed_dirichlet": " of fixed sizes"}
    if name in after and "alpha" in values:
        return f"Dir({values['alpha']:g}){after[name]}"
    if name == "iid":
        return "IID"
    if name == "file":
        return f"File({one_line(Path(str(values['path'])).name)})"
    name = name.replace("shuffled_", "shuffled ").capitalize()
    shown = [
        value
        for key, value in values.items()
        if key not in ("name", *SPLIT_DETAILS) and value is not True
    ]
    numbers = [f"{value:g}" for value in shown if isinstance(value, int | float)]
    return f"{name}({', '.join(numbers)})" if numbers else name


def method_label(values: Mapping[str, Any], quantile: bool = True) -> str:
    """Return the title and what it is first told apart by: `FedOBP (q=0.9998)`, or without the
    quantile.
    """
    q = values.get("q")
    shown = [f"q={float(q):.10g}"] if quantile and isinstance(q, int | float) else []
    if values.get("score", "obp") != "obp":
        shown.append(f"score={values['score']}")
    if values.get("ema"):
        shown.append(f"ema={values['ema']:g}")
    if values.get("classifier_only"):
        shown.append("classifier only")
    if values.get("variant") not in (None, "default", "paper"):
        shown.append(str(values["variant"]))
    return add_in_brackets(METHOD_TITLES.get(str(values["name"]), one_line(values["name"])), shown)


def add_in_brackets(label: str, words: Sequence[str]) -> str:
    """Add to a label's brackets: `A (b)` and `c` give `A (b, c)`."""
    if not words:
        return label
    inside = ", ".join(map(one_line, words))
    return f"{label[:-1]}, {inside})" if label.endswith(")") else f"{label} ({inside})"


def setting_text(key: str, values: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return `lr=0.1` of a dotted key; with the whole key where another of `keys` ends alike, or
    its end is vague.
    """
    *_, end = parts = key.split(".")
    if end == "name" and len(parts) > 1:
        end = parts[-2]
    elif end in _VAGUE or sum(other.rsplit(".", 1)[-1] == end for other in keys) > 1:
        end = key
    value = values.get(key, ...)
    return f"{end} not set" if value in (None, ...) else f"{end}={clip_text(value, 40)}"
